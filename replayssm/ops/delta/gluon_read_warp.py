"""A reading program of one warp: outputs of some v-heads of a k-head and row from the read copy, on the tensor cores.

What the heads share is computed once, and by one warp; a program that flushes is in a launch of its own. A head's codes
are read in two halves or more, of which two are on their way at any time.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from replayssm.ops.delta.gluon_common import row_of, row_of_age, wrap
from replayssm.ops.delta.gluon_layouts import scores_layout
from replayssm.ops.delta.gluon_read_codes import block_sums, load_operand, load_words, operand_sets, words_a_row
from replayssm.ops.delta.gluon_read_part import far, ring_gates, token_gates, view_as_3d
from replayssm.ops.delta.gluon_read_scales import load_pairs, scale_pair_sums
from replayssm.ops.delta.gluon_read_scores import read_scalar, read_vector
from replayssm.ops.gluon_chunk import rows_shared
from replayssm.ops.gluon_formats import scales_a_row
from replayssm.ops.gluon_window_parts import copy_to_shared, mma_layout


@gluon.constexpr_function
def part_rows(read):
    """V rows whose codes are 16 registers of a thread (bf16: 32)."""
    return {"nvfp4": 32, "int8": 16, "fp8": 16, "bf16": 16}[read]


@gluon.jit
def zero_heads(out, stride_out_head, HEADS: gl.constexpr, V: gl.constexpr):
    """A padding row's outputs."""
    L: gl.constexpr = gl.BlockedLayout([V // 32], [32], [1], [0])
    v = gl.arange(0, V, layout=L)
    for h in range(HEADS):
        gl.store(out + h * stride_out_head + v, gl.full([V], 0.0, out.dtype.element_ty, layout=L))


@gluon.jit
def read_part(
    words, tile_scales, u_at, weights, x_at, factor, x0, x1, y0, y1,
    READ: gl.constexpr, SPLIT: gl.constexpr, WORDS: gl.constexpr, ROWS: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Put what the copy and the ring rows give for k (even columns) and q (odd ones) into x_at [ROWS, 8]."""
    X = scale_pair_sums(block_sums(words, x0, x1, y0, y1, READ, SPLIT), tile_scales, READ, ROWS, WORDS)
    X *= gl.expand_dims(factor, 0)
    x_at.store(mma_v2(u_at.permute((1, 0)).load(gl.DotOperandLayout(0, MMA, 2)), weights, X))


@gluon.constexpr_function
def u_shared(columns):
    """Shared memory of u rows [rows, columns], read turned."""
    return gl.SwizzledSharedLayout(8, max(1, 64 // columns), min(8, columns // 8), order=[1, 0])


@gluon.jit
def fetch_u(u_at, ring_u, start, committed, ring_len, V: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Start copying COLUMNS of a head's u rows, the youngest first."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [1, 1], [1, 0])
    age = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    rows = gl.expand_dims(row_of_age(start, committed, age, ring_len) * V, 1)
    rows += gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L)), 0)
    copy_to_shared(u_at, ring_u + rows, mask=gl.expand_dims(age < committed, 1))


@gluon.jit
def read_heads_alone(
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
    ACT: gl.constexpr = ring_u.dtype.element_ty
    PAD_HEADS: gl.constexpr = 1 if KDA else (2 if HEADS <= 2 else 4)
    SCORES: gl.constexpr = scores_layout(BLOCK_L, K, 1, KDA)
    LH: gl.constexpr = gl.BlockedLayout([1, BLOCK_L // 16], [2, 16], [1, 1], [1, 0])
    LK2: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [1, 1], [1, 0])
    MMA: gl.constexpr = mma_layout(1)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    ACT_CHUNK: gl.constexpr = 128 // ACT.primitive_bitwidth
    WORDS: gl.constexpr = words_a_row(READ, K)
    SCALES: gl.constexpr = scales_a_row(READ, K)
    SETS: gl.constexpr = operand_sets(READ, SPLIT)
    TYPE: gl.constexpr = gl.bfloat16 if READ == "bf16" else gl.float16
    PARTS: gl.constexpr = HV // HEADS
    PART: gl.constexpr = part_rows(READ)
    ITEM: gl.constexpr = 2 * PART
    ITEMS: gl.constexpr = V // ITEM
    LX: gl.constexpr = gl.BlockedLayout([ITEM // 32, 8], [32, 1], [1, 1], [1, 0])
    IN_V: gl.constexpr = gl.SliceLayout(1, LX)
    part = pid % PARTS
    token = pid // PARTS
    slot = gl.load(slot_indices + token)
    head = part * HEADS
    k_head = head // GROUP
    # What does not depend on the slot is loaded while its index is on the way.
    cols = gl.arange(0, K, layout=gl.SliceLayout(0, SCORES))
    inner = gl.expand_dims(cols, 0)
    age = gl.arange(0, BLOCK_L, layout=gl.SliceLayout(1, SCORES))
    offs_h = gl.arange(0, PAD_HEADS, layout=gl.SliceLayout(1, LH))
    mask_h = offs_h < HEADS
    since = gl.expand_dims(gl.arange(0, BLOCK_L, layout=gl.SliceLayout(0, LH)), 0)
    k += token * stride_k_token + k_head * stride_k_head
    q += token * stride_q_token + k_head * stride_q_head
    WHOLE: gl.constexpr = gl.SliceLayout(0, SCORES) if KDA else gl.BlockedLayout([K // 32], [32], [1], [0])
    whole = gl.arange(0, K, layout=WHOLE)
    k_raw = gl.load(k + whole)
    k_whole = k_raw.to(gl.float32)
    q_whole = gl.load(q + whole).to(gl.float32)
    if not KDA:
        # As columns of an operand: k, q, zeros.
        kq_at = gl.allocate_shared_memory(ACT, [8, K], rows_shared())
        n = gl.arange(0, 8, layout=gl.SliceLayout(1, LK2))
        inner_c = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, LK2)), 0)
        vectors = gl.expand_dims(gl.where(n == 0, k, q), 1)
        kq_at.store(gl.load(vectors + inner_c, mask=gl.expand_dims(n < 2, 1), other=0.0))
    beta += token * stride_beta_token + head * stride_beta_head
    v += token * stride_v_token + head * stride_v_head
    out += token * stride_out_token + head * stride_out_head
    decay, b = token_gates(g + token * stride_g_token + head * stride_g_head, beta, A_log + head,
                           dt_bias + head * (K if KDA else 1), cols, offs_h, mask_h, lower_bound, stride_g_head,
                           stride_beta_head, KDA, RAW, HAS_BIAS, BOUNDED)
    if (slot == pad_slot_id) | (slot < 0) | (slot >= num_slots):
        zero_heads(out, stride_out_head, HEADS, V)
        return
    cursors += slot.to(gl.int64) * 4
    start = gl.load(cursors)
    committed = gl.load(cursors + 1)
    limit = gl.load(cursors + 2)
    # Every load goes out before the first use of one; those of the copy do not wait for the cursors.
    words += far(slot, chunks_codes_slot) * 4 + head * (V * WORDS)
    scales += far(slot, stride_scales_slot) + head * (V * SCALES)
    global_scale += far(slot, stride_global_slot) + head
    words_0 = load_words(words, PART, WORDS)
    scales_0 = load_pairs(scales, READ, PART, K)
    words_1 = load_words(words + PART * WORDS, PART, WORDS)
    scales_1 = load_pairs(scales + PART * SCALES, READ, PART, K)
    unit = 1.0
    if READ == "nvfp4":
        unit = gl.load(global_scale + offs_h, mask=mask_h, other=0.0) * 16384.0
    if (committed > 0) & (committed + 1 > gl.minimum(limit, buffer_len)):
        return
    stride_rv_head = chunks_rv_head * ACT_CHUNK
    stride_ru_head = chunks_ru_head * ACT_CHUNK
    ring_k += far(slot, stride_rk_slot) + k_head * stride_rk_head
    ring_v += far(slot, chunks_rv_slot) * ACT_CHUNK + head * stride_rv_head
    ring_u += far(slot, chunks_ru_slot) * ACT_CHUNK + head * stride_ru_head
    ring_g += far(slot, stride_rg_slot) + head * stride_rg_head
    ring_beta += far(slot, stride_rb_slot) + head * stride_rb_head
    key_age = gl.arange(0, BLOCK_L, layout=gl.SliceLayout(1, LK2))
    key_rows = gl.expand_dims(row_of_age(start, committed, key_age, ring_len) * K, 1)
    key_rows += gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, LK2)), 0)
    u_at = gl.allocate_shared_memory(ACT, [2, BLOCK_L, ITEM], u_shared(ITEM))
    weight_at = gl.allocate_shared_memory(ACT, [PAD_HEADS * 8 * BLOCK_L], FLAT)
    factor_at = gl.allocate_shared_memory(gl.float32, [8], FLAT)
    through_at = gl.allocate_shared_memory(gl.float32, [PAD_HEADS], FLAT)
    beta_at = gl.allocate_shared_memory(gl.float32, [PAD_HEADS], FLAT)
    OPERAND: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[3, 2, 1, 0])
    operand_at = gl.allocate_shared_memory(TYPE, [SETS, 2, 2, WORDS * 2], OPERAND)
    keys_at = gl.allocate_shared_memory(ACT, [BLOCK_L, K], rows_shared())
    copy_to_shared(keys_at, ring_k + key_rows, mask=gl.expand_dims(key_age < committed, 1))
    async_copy.commit_group()
    fetch_u(u_at.index(0), ring_u, start, committed, ring_len, V, BLOCK_L, ITEM)
    async_copy.commit_group()
    gates, oldest = ring_gates(ring_g, cols, inner, age, offs_h, mask_h, since, start, committed, ring_len,
                               stride_rg_head, K, KDA)
    async_copy.wait_group(1)
    beta_at.store(b)
    if KDA:
        kq = read_vector(keys_at, gates, oldest, decay, k_whole, q_whole, committed, scale,
                         operand_at, weight_at, factor_at, READ, SPLIT, K, BLOCK_L, SCORES, LH, NORM)
        through_at.store(unit + gl.zeros([PAD_HEADS], gl.float32, layout=gl.SliceLayout(1, LH)))
    else:
        columns = kq_at.permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 2))
        kq, through = read_scalar(keys_at, columns, gates, oldest, decay, k_whole, q_whole, committed, scale,
                                  operand_at, weight_at, factor_at, READ, SPLIT, K, BLOCK_L, PAD_HEADS, 2, SCORES, LH,
                                  NORM)
        through_at.store(through * unit)
    new = wrap(start + committed, ring_len)
    gl.store(ring_beta + offs_h * stride_rb_head + new, b, mask=mask_h)
    if KDA:
        gl.store(ring_g + new * K + cols, decay)
    else:
        gl.store(ring_g + offs_h * stride_rg_head + new, decay, mask=mask_h)
    if part % (GROUP // HEADS) == 0:
        gl.store(ring_k + new * K + whole, k_raw)

    x0 = load_operand(operand_at, 0, WORDS)
    x1 = x0
    y0 = x0
    y1 = x0
    if SETS > 1:
        x1 = load_operand(operand_at, 1, WORDS)
        y0 = x1
    if SETS > 2:
        y0 = load_operand(operand_at, 2, WORDS)
        y1 = load_operand(operand_at, 3, WORDS)
    column = factor_at.load(gl.SliceLayout(0, MMA))
    x_at = gl.allocate_shared_memory(gl.float32, [ITEM, 8], PLAIN)
    weights_at = view_as_3d(weight_at, PAD_HEADS, BLOCK_L)
    for item in range(HEADS * ITEMS):
        h = item // ITEMS
        first = item % ITEMS * ITEM
        rows = first + gl.arange(0, ITEM, layout=IN_V)
        v_now = gl.load(v + h * stride_v_head + rows)
        weights = weights_at.index(h).permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 2))
        factor = column * row_of(through_at, h, PAD_HEADS, 1).load(gl.SliceLayout(0, MMA))
        # The next item's u travels while this one's is used.
        more = item + 1 < HEADS * ITEMS
        if more:
            following = ring_u + (item + 1) // ITEMS * stride_ru_head + (item + 1) % ITEMS * ITEM
            fetch_u(u_at.index((item + 1) % 2), following, start, committed, ring_len, V, BLOCK_L, ITEM)
        async_copy.commit_group()
        async_copy.wait_group(1)
        u_0 = u_at.index(item % 2).slice(0, PART, dim=1)
        u_1 = u_at.index(item % 2).slice(PART, PART, dim=1)
        read_part(words_0, scales_0, u_0, weights, x_at.slice(0, PART), factor, x0, x1, y0, y1, READ, SPLIT, WORDS,
                  PART, MMA)
        if more:
            words_0 = load_words(words + (item + 1) * (ITEM * WORDS), PART, WORDS)
            scales_0 = load_pairs(scales + (item + 1) * (ITEM * SCALES), READ, PART, K)
        read_part(words_1, scales_1, u_1, weights, x_at.slice(PART, PART), factor, x0, x1, y0, y1, READ, SPLIT, WORDS,
                  PART, MMA)
        if more:
            words_1 = load_words(words + ((item + 1) * ITEM + PART) * WORDS, PART, WORDS)
            scales_1 = load_pairs(scales + ((item + 1) * ITEM + PART) * SCALES, READ, PART, K)
        at_k, at_q = gl.split(gl.sum(gl.reshape(x_at.load(LX), [ITEM, 4, 2]), 1))
        at_k = gl.convert_layout(at_k, IN_V, assert_trivial=True)
        at_q = gl.convert_layout(at_q, IN_V, assert_trivial=True)
        u = row_of(beta_at, h, PAD_HEADS, 1).load(IN_V) * (v_now.to(gl.float32) - at_k)
        gl.store(out + h * stride_out_head + rows, (at_q + kq * u).to(out.dtype.element_ty))
        gl.store(ring_u + h * stride_ru_head + new * V + rows, u.to(ACT))
        gl.store(ring_v + h * stride_rv_head + new * V + rows, v_now)
