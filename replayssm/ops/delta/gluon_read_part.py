"""A program that reads: outputs of some v-heads of a row from the read copy, on the tensor cores."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from replayssm.ops.delta.gluon_common import log_decay, row_of, row_of_age, sigmoid, wrap
from replayssm.ops.delta.gluon_layouts import scores_layout
from replayssm.ops.delta.gluon_read_codes import (
    as_shape,
    block_sums,
    load_operand,
    load_words,
    operand_sets,
    words_a_row,
)
from replayssm.ops.delta.gluon_read_scales import load_scales, scale_sums
from replayssm.ops.delta.gluon_read_scores import read_scalar, read_vector
from replayssm.ops.gluon_formats import scales_a_row
from replayssm.ops.gluon_window_parts import copy_to_shared, mma_layout


@gluon.jit
def far(slot, stride):
    """slot * stride in 64 bits, of two 32-bit numbers that are not negative."""
    stride = (slot * 0 + stride).to(gl.uint32)
    return slot.to(gl.uint32).to(gl.int64) * stride.to(gl.int64)


@gluon.jit
def token_gates(
    g, beta, A_log, dt_bias, cols, offs_h, mask_h, lower_bound, stride_g_head, stride_beta_head,
    KDA: gl.constexpr, RAW: gl.constexpr, HAS_BIAS: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """This token's log decay ([heads], KDA [K]) and beta [heads]."""
    b = gl.load(beta + offs_h * stride_beta_head, mask=mask_h, other=0.0).to(gl.float32)
    a_log = 0.0
    bias = 0.0
    if KDA:
        decay = gl.load(g + cols).to(gl.float32)
        if RAW:
            a_log = gl.load(A_log).to(gl.float32)
        if HAS_BIAS:
            bias = gl.load(dt_bias + cols).to(gl.float32)
    else:
        decay = gl.load(g + offs_h * stride_g_head, mask=mask_h, other=0.0).to(gl.float32)
        if RAW:
            a_log = gl.load(A_log + offs_h, mask=mask_h, other=0.0).to(gl.float32)
        if HAS_BIAS:
            bias = gl.load(dt_bias + offs_h, mask=mask_h, other=0.0).to(gl.float32)
    if RAW:
        b = sigmoid(b)
        decay = log_decay(decay, a_log, bias, lower_bound, BOUNDED)
    return decay, b


@gluon.jit
def ring_gates(
    ring_g, cols, inner, age, offs_h, mask_h, since, start, committed, ring_len, stride_rg_head,
    K: gl.constexpr, KDA: gl.constexpr,
):  # fmt: skip
    """Of the ring rows, youngest first, the gate of the next younger; and the oldest's."""
    if KDA:
        rows = gl.expand_dims(row_of_age(start, committed, age - 1, ring_len), 1)
        live = gl.expand_dims((age < committed) & (age > 0), 1)
        gates = gl.load(ring_g + rows * K + inner, mask=live, other=0.0)
        oldest = gl.load(ring_g + start * K + cols, mask=cols < committed * K, other=0.0)
    else:
        rows = row_of_age(start, committed, since - 1, ring_len)
        live = gl.expand_dims(mask_h, 1) & (since < committed) & (since > 0)
        gates = gl.load(ring_g + gl.expand_dims(offs_h, 1) * stride_rg_head + rows, mask=live, other=0.0)
        oldest = gl.load(ring_g + offs_h * stride_rg_head + start, mask=mask_h & (committed > 0), other=0.0)
    return gates, oldest


@gluon.jit
def view_as_3d(weight_at, HEADS: gl.constexpr, ROWS: gl.constexpr):
    SHAPE: gl.constexpr = [HEADS, 8, ROWS]
    return as_shape(weight_at, weight_at.dtype, SHAPE, gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))


@gluon.jit
def read_heads(
    pid, q, k, v, g, beta, A_log, dt_bias, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices, out, words,
    scales, global_scale, num_slots, ring_len, buffer_len, pad_slot_id, scale, lower_bound, stride_q_token,
    stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head, stride_g_token, stride_g_head,
    stride_beta_token, stride_beta_head, stride_out_token, stride_out_head, stride_rk_slot, stride_rk_head,
    chunks_rv_slot, chunks_rv_head, chunks_ru_slot, chunks_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot,
    stride_rb_head, chunks_codes_slot, stride_scales_slot, stride_global_slot,
    HV: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, HEADS: gl.constexpr,
    BLOCK_L: gl.constexpr, READ: gl.constexpr, SPLIT: gl.constexpr, KDA: gl.constexpr, RAW: gl.constexpr,
    HAS_BIAS: gl.constexpr, BOUNDED: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """Outputs and new ring rows of HEADS v-heads of one k-head and row; nothing if the row flushes."""
    WARPS: gl.constexpr = gl.num_warps()
    ACT: gl.constexpr = ring_u.dtype.element_ty
    PAD_HEADS: gl.constexpr = 1 if KDA else (2 if HEADS <= 2 else 4)
    SCORES: gl.constexpr = scores_layout(BLOCK_L, K, WARPS, KDA)
    LH: gl.constexpr = gl.BlockedLayout([1, BLOCK_L // 16], [2, 16], [WARPS, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    LK2: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [WARPS, 1], [1, 0])
    LU2: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [WARPS, 1], [1, 0])
    MMA: gl.constexpr = mma_layout(WARPS)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    ACT_CHUNK: gl.constexpr = 128 // ACT.primitive_bitwidth
    WORDS: gl.constexpr = words_a_row(READ, K)
    SCALES: gl.constexpr = scales_a_row(READ, K)
    SETS: gl.constexpr = operand_sets(READ, SPLIT)
    TYPE: gl.constexpr = gl.bfloat16 if READ == "bf16" else gl.float16
    PARTS: gl.constexpr = HV // HEADS
    part = pid % PARTS
    token = pid // PARTS
    slot = gl.load(slot_indices + token)
    head = part * HEADS
    k_head = head // GROUP
    line = gl.arange(0, HEADS * V, layout=LINE)
    line_head = line // V
    line_col = line % V
    # What does not depend on the slot is loaded while its index is on the way.
    cols = gl.arange(0, K, layout=gl.SliceLayout(0, SCORES))
    inner = gl.expand_dims(cols, 0)
    age = gl.arange(0, BLOCK_L, layout=gl.SliceLayout(1, SCORES))
    offs_h = gl.arange(0, PAD_HEADS, layout=gl.SliceLayout(1, LH))
    mask_h = offs_h < HEADS
    since = gl.expand_dims(gl.arange(0, BLOCK_L, layout=gl.SliceLayout(0, LH)), 0)
    k += token * stride_k_token + k_head * stride_k_head
    q += token * stride_q_token + k_head * stride_q_head
    WHOLE: gl.constexpr = gl.SliceLayout(0, SCORES) if KDA else gl.BlockedLayout([K // 32], [32], [WARPS], [0])
    whole = gl.arange(0, K, layout=WHOLE)
    k_raw = gl.load(k + whole)
    k_whole = k_raw.to(gl.float32)
    q_whole = gl.load(q + whole).to(gl.float32)
    if not KDA:
        # As columns of an operand: k, q, zeros.
        LC: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
        n = gl.arange(0, 8, layout=gl.SliceLayout(0, LC))
        inner_c = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(1, LC)), 1)
        columns = gl.load(gl.expand_dims(gl.where(n == 0, k, q), 0) + inner_c, mask=gl.expand_dims(n < 2, 0), other=0.0)
    beta += token * stride_beta_token + head * stride_beta_head
    v_raw = gl.load(v + (token * stride_v_token + (head + line_head) * stride_v_head + line_col))
    b_line = gl.load(beta + line_head * stride_beta_head).to(gl.float32)
    decay, b = token_gates(g + token * stride_g_token + head * stride_g_head, beta, A_log + head,
                           dt_bias + head * (K if KDA else 1), cols, offs_h, mask_h, lower_bound, stride_g_head,
                           stride_beta_head, KDA, RAW, HAS_BIAS, BOUNDED)
    if RAW:
        b_line = sigmoid(b_line)
    out += token * stride_out_token + (head + line_head) * stride_out_head + line_col
    if (slot == pad_slot_id) | (slot < 0) | (slot >= num_slots):
        gl.store(out, gl.full([HEADS * V], 0.0, out.dtype.element_ty, layout=LINE))
        return
    cursors += slot.to(gl.int64) * 4
    start = gl.load(cursors)
    committed = gl.load(cursors + 1)
    limit = gl.load(cursors + 2)
    # Every load goes out before the first use of one; those of the copy do not wait for the cursors.
    words += far(slot, chunks_codes_slot) * 4 + head * (V * WORDS)
    scales += far(slot, stride_scales_slot) + head * (V * SCALES)
    global_scale += far(slot, stride_global_slot) + head
    tiles = ()
    tile_scales = ()
    units = ()
    for h in gl.static_range(HEADS):
        tiles = tiles + (load_words(words + h * (V * WORDS), V, WORDS),)
        tile_scales = tile_scales + (load_scales(scales + h * (V * SCALES), READ, V, K),)
        if READ == "nvfp4":
            units = units + (gl.load(global_scale + h) * 16384.0,)
    if (committed > 0) & (committed + 1 > gl.minimum(limit, buffer_len)):
        return
    stride_ru_head = chunks_ru_head * ACT_CHUNK
    ring_k += far(slot, stride_rk_slot) + k_head * stride_rk_head
    ring_v += far(slot, chunks_rv_slot) * ACT_CHUNK
    ring_u += far(slot, chunks_ru_slot) * ACT_CHUNK + head * stride_ru_head
    ring_g += far(slot, stride_rg_slot) + head * stride_rg_head
    ring_beta += far(slot, stride_rb_slot) + head * stride_rb_head
    age_u = gl.arange(0, BLOCK_L, layout=gl.SliceLayout(1, LU2))
    u_rows = gl.expand_dims(row_of_age(start, committed, age_u, ring_len) * V, 1)
    u_rows += gl.expand_dims(gl.arange(0, V, layout=gl.SliceLayout(0, LU2)), 0)
    u_mask = gl.expand_dims(age_u < committed, 1)
    key_age = gl.arange(0, BLOCK_L, layout=gl.SliceLayout(1, LK2))
    key_rows = gl.expand_dims(row_of_age(start, committed, key_age, ring_len) * K, 1)
    key_rows += gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, LK2)), 0)
    keys_at = gl.allocate_shared_memory(ACT, [BLOCK_L, K], gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0]))
    copy_to_shared(keys_at, ring_k + key_rows, mask=gl.expand_dims(key_age < committed, 1))
    async_copy.commit_group()
    u_at = gl.allocate_shared_memory(ACT, [HEADS, BLOCK_L, V], gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0]))
    for h in gl.static_range(HEADS):
        copy_to_shared(u_at.index(h), ring_u + (h * stride_ru_head + u_rows), mask=u_mask)
    async_copy.commit_group()
    gates, oldest = ring_gates(ring_g, cols, inner, age, offs_h, mask_h, since, start, committed, ring_len,
                               stride_rg_head, K, KDA)
    async_copy.wait_group(1)
    OPERAND: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[3, 2, 1, 0])
    x_at = gl.allocate_shared_memory(TYPE, [SETS, 2, 2, WORDS * 2], OPERAND)
    weight_at = gl.allocate_shared_memory(ACT, [PAD_HEADS * 8 * BLOCK_L], FLAT)
    factor_at = gl.allocate_shared_memory(gl.float32, [8], FLAT)
    through_at = gl.allocate_shared_memory(gl.float32, [PAD_HEADS], FLAT)
    k_parts = gl.allocate_shared_memory(gl.float32, [HEADS * V], FLAT)
    q_parts = gl.allocate_shared_memory(gl.float32, [HEADS * V], FLAT)
    if KDA:
        kq = read_vector(keys_at, gates, oldest, decay, k_whole, q_whole, committed, scale, x_at, weight_at, factor_at,
                         READ, SPLIT, K, BLOCK_L, SCORES, LH, NORM)
        through_at.store(gl.full([PAD_HEADS], 1.0, gl.float32, layout=gl.SliceLayout(1, LH)))
    else:
        kq, through = read_scalar(keys_at, columns, gates, oldest, decay, k_whole, q_whole, committed, scale, x_at,
                                  weight_at, factor_at, READ, SPLIT, K, BLOCK_L, PAD_HEADS, 8, SCORES, LH, NORM)
        through_at.store(through)
    new = wrap(start + committed, ring_len)
    gl.store(ring_v + ((head + line_head) * (chunks_rv_head * ACT_CHUNK) + new * V + line_col), v_raw)
    gl.store(ring_beta + offs_h * stride_rb_head + new, b, mask=mask_h)
    if KDA:
        gl.store(ring_g + new * K + cols, decay)
    else:
        gl.store(ring_g + offs_h * stride_rg_head + new, decay, mask=mask_h)
    if part % (GROUP // HEADS) == 0:
        gl.store(ring_k + new * K + whole, k_raw)

    x0 = load_operand(x_at, 0, WORDS)
    x1 = x0
    y0 = x0
    y1 = x0
    if SETS > 1:
        x1 = load_operand(x_at, 1, WORDS)
        y0 = x1
    if SETS > 2:
        y0 = load_operand(x_at, 2, WORDS)
        y1 = load_operand(x_at, 3, WORDS)
    async_copy.wait_group(0)
    weights = view_as_3d(weight_at, PAD_HEADS, BLOCK_L)
    for h in gl.static_range(HEADS):
        X = scale_sums(block_sums(tiles[h], x0, x1, y0, y1, READ, SPLIT), tile_scales[h], READ, V, WORDS)
        factor = factor_at.load(gl.SliceLayout(0, MMA))
        factor *= row_of(through_at, h, PAD_HEADS, 1).load(gl.SliceLayout(0, MMA))
        if READ == "nvfp4":
            factor *= units[h]
        X *= gl.expand_dims(factor, 0)
        X = mma_v2(u_at.index(h).permute((1, 0)).load(gl.DotOperandLayout(0, MMA, 2)),
                   weights.index(h).permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 2)), X)
        at_k, at_q = gl.split(gl.sum(gl.reshape(X, [V, 4, 2]), 1))
        k_parts.slice(h * V, V).store(at_k)
        q_parts.slice(h * V, V).store(at_q)
    u = b_line * (v_raw.to(gl.float32) - k_parts.load(LINE))
    o = q_parts.load(LINE) + kq * u
    gl.store(out, o.to(out.dtype.element_ty))
    gl.store(ring_u + (line_head * stride_ru_head + new * V + line_col), u.to(ACT))
