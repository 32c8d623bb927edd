"""Outputs of a window of GDN or KDA from the read copy: some v-heads of one k-head and row, on the tensor cores."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from replayssm.ops.delta.gluon_common import sigmoid
from replayssm.ops.delta.gluon_read_scores import power_near
from replayssm.ops.delta.gluon_window_gdn import decays, gdn_tables, load_new_gates, load_old_gates
from replayssm.ops.delta.gluon_window_kda import (
    append_vector,
    kda_tables,
    load_new_vector,
    load_old_vector,
    vector_decays,
)
from replayssm.ops.delta.gluon_window_rows import append_keys, gates_layout, load_columns, load_keys, stage_rows
from replayssm.ops.gluon_formats import E2M1_UNIT, scales_a_row
from replayssm.ops.gluon_read_window_codes import (
    allocate_columns,
    codes_a_row,
    load_codes,
    load_operands,
    load_scales,
    multiply,
    stage_columns,
    staging_layout,
)
from replayssm.ops.gluon_window_parts import columns_shared, copy_to_shared, mma_layout, rows_layout, wrap
from replayssm.ops.mamba2.gluon_names import view


@gluon.constexpr_function
def tokens_layout(v_dim, columns, warps):
    """[V, columns]: a V-row's columns in one lane, or in neighbouring ones if there are more lanes than V-rows."""
    lanes = max(1, 32 * warps // v_dim)
    return gl.BlockedLayout([1, columns // lanes], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def add_rows(X, u_at, weight):
    """X plus u of the ring's rows [rows, V] times their weights, which go in as two 16-bit numbers each."""
    u = u_at.permute((1, 0)).load(gl.DotOperandLayout(0, X.type.layout, 2))
    high = weight.to(u.dtype)
    X = mma_v2(u, (weight - high.to(gl.float32)).to(u.dtype), X)
    return mma_v2(u, high, X)


@gluon.jit
def read_window(
    slot, head, first, length, start, committed, live, q, k, v, g, beta, A_log, dt_bias, ring_k, ring_v, ring_u, ring_g,
    ring_beta, parents, out, codes, scales, global_scale, ring_len, scale, lower_bound, stride_q_token, stride_q_head,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head, stride_g_token, stride_g_head, stride_beta_token,
    stride_beta_head, stride_out_token, stride_out_head, stride_rk_slot, stride_rk_head, stride_rv_slot, stride_rv_head,
    stride_ru_slot, stride_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head, chunks_codes_slot,
    stride_scales_slot, stride_global_slot,
    HEADS: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, ROWS: gl.constexpr,
    TOKENS: gl.constexpr, READ: gl.constexpr, TREE: gl.constexpr, KDA: gl.constexpr, RAW: gl.constexpr,
    HAS_BIAS: gl.constexpr, BOUNDED: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """Outputs and ring rows of `length` tokens from token `first` on, of HEADS v-heads from `head` on.

    live: committed rows that are read beside the copy (none after a flush); new rows follow all `committed` ones.
    """
    WARPS: gl.constexpr = gl.num_warps()
    ACT: gl.constexpr = ring_u.dtype.element_ty
    COLUMNS: gl.constexpr = 2 * TOKENS
    CODE_CHUNK: gl.constexpr = 128 // codes.dtype.element_ty.primitive_bitwidth
    # Raw 16-bit k and q times a power of two are exact in fp16; KDA's decayed ones have tf32's bits.
    EXACT: gl.constexpr = ACT == gl.bfloat16 and not KDA
    MMA: gl.constexpr = mma_layout(WARPS)
    IN_N: gl.constexpr = gl.SliceLayout(0, MMA)
    LW: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    L2: gl.constexpr = rows_layout(V, WARPS)
    LB: gl.constexpr = gates_layout(WARPS)
    LQ: gl.constexpr = staging_layout(K, WARPS)
    LT: gl.constexpr = tokens_layout(V, COLUMNS, WARPS)
    LV: gl.constexpr = gl.SliceLayout(1, LT)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
    HEAD_CODES: gl.constexpr = V * codes_a_row(READ, K)
    HEAD_SCALES: gl.constexpr = V * scales_a_row(READ, K)
    k_head = head // GROUP
    codes += slot * chunks_codes_slot * CODE_CHUNK + head * HEAD_CODES
    scales += slot * stride_scales_slot + head * HEAD_SCALES
    global_scale += slot * stride_global_slot + head
    tiles = ()
    tile_scales = ()
    units = ()
    for h in gl.static_range(HEADS):
        tile = load_codes(codes + h * HEAD_CODES, READ, V, K, V)
        tiles = tiles + (tile,)
        tile_scales = tile_scales + (load_scales(scales + h * HEAD_SCALES, tile, READ, V, K, V),)
        units = units + (gl.load(global_scale + h) * E2M1_UNIT if READ == "nvfp4" else 1.0,)
    q += first * stride_q_token + k_head * stride_q_head
    k += first * stride_k_token + k_head * stride_k_head
    v += first * stride_v_token + head * stride_v_head
    g += first * stride_g_token + head * stride_g_head
    beta += first * stride_beta_token + head * stride_beta_head
    out += first * stride_out_token + head * stride_out_head
    ring_k += slot * stride_rk_slot + k_head * stride_rk_head
    ring_v += slot * stride_rv_slot + head * stride_rv_head
    ring_u += slot * stride_ru_slot + head * stride_ru_head
    ring_g += slot * stride_rg_slot + head * stride_rg_head
    ring_beta += slot * stride_rb_slot + head * stride_rb_head
    parents += first
    fresh = start + committed

    keys = load_keys(ring_k, start, live, ring_len, K, ROWS)
    j = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, L2)), 1)
    cols = gl.expand_dims(gl.arange(0, V, layout=gl.SliceLayout(0, L2)), 0)
    u_rows = wrap(start + j, ring_len) * V + cols
    u_at = gl.allocate_shared_memory(ACT, [HEADS, ROWS, V], SWIZZLED)
    for h in gl.static_range(HEADS):
        copy_to_shared(u_at.index(h), ring_u + (h * stride_ru_head + u_rows), mask=j < live)
    async_copy.commit_group()
    columns = load_columns(q, k, length, stride_q_token, stride_k_token, K, TOKENS)
    # v, u and outputs of all heads: [heads * tokens, V].
    line = gl.expand_dims(gl.arange(0, HEADS * TOKENS, layout=gl.SliceLayout(1, L2)), 1)
    token, line_head = line % TOKENS, line // TOKENS
    is_token = token < length
    new_rows = wrap(fresh + token, ring_len) * V + cols
    values = gl.load(v + (line_head * stride_v_head + token * stride_v_token + cols), mask=is_token, other=0.0)
    b_head = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, LB)), 1)
    b_token = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, LB)), 0)
    b = gl.load(beta + b_head * stride_beta_head + b_token * stride_beta_token, mask=b_token < length, other=0.0)
    if KDA:
        new, a_log, bias = load_new_vector(
            g, A_log + head, dt_bias + head * K, length, stride_g_token, K, TOKENS, RAW, HAS_BIAS
        )
        own, younger = load_old_vector(ring_g, start, live, ring_len, K, ROWS)
    else:
        new, a_log, bias = load_new_gates(
            g, A_log + head, dt_bias + head, length, stride_g_token, stride_g_head, HEADS, TOKENS, RAW, HAS_BIAS
        )
        own, younger = load_old_gates(ring_g, start, live, ring_len, stride_rg_head, HEADS, ROWS)

    x_at = allocate_columns(READ, EXACT, COLUMNS, K)
    inverse_at = gl.allocate_shared_memory(gl.float32, [COLUMNS], FLAT)
    keys_at = gl.allocate_shared_memory(ACT, [ROWS, K], SWIZZLED)
    raw_at = gl.allocate_shared_memory(ACT, [16, K], SWIZZLED)
    norm_at = gl.allocate_shared_memory(gl.float32, [ROWS + 16], FLAT)
    score_at = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], PLAIN)
    coef_at = gl.allocate_shared_memory(gl.float32, [TOKENS * HEADS, COLUMNS], FLAT)
    scale_at = gl.allocate_shared_memory(gl.float32, [HEADS, COLUMNS], FLAT)
    fade_at = gl.allocate_shared_memory(gl.float32, [HEADS, ROWS], FLAT)
    through_at = gl.allocate_shared_memory(gl.float32, [HEADS, 1], FLAT)
    beta_at = gl.allocate_shared_memory(gl.float32, [HEADS * TOKENS, 1], FLAT)
    v_at = gl.allocate_shared_memory(ACT, [HEADS * TOKENS, V], FLAT)
    results_at = gl.allocate_shared_memory(ACT, [HEADS, COLUMNS, V], PLAIN)
    view(v_at, [HEADS * TOKENS, V], PLAIN).store(values)
    gl.store(ring_v + (line_head * stride_rv_head + new_rows), values, mask=is_token)
    stage_rows(keys_at, raw_at, norm_at, keys, columns, scale, ROWS, TOKENS, NORM)
    # What the v-heads of a k-head share is appended once.
    if head % GROUP == 0:
        append_keys(ring_k, columns, fresh, length, ring_len, K, TOKENS)
    b = b.to(gl.float32)
    if RAW:
        b = gl.where(b_token < length, sigmoid(b), 0.0)
    view(beta_at, [HEADS, TOKENS], PLAIN).store(b)
    gl.store(ring_beta + b_head * stride_rb_head + wrap(fresh + b_token, ring_len), b, mask=b_token < length)
    if KDA:
        new = vector_decays(new, a_log, bias, length, lower_bound, RAW, BOUNDED)
        append_vector(ring_g, new, fresh, length, ring_len)
        read_at = gl.allocate_shared_memory(gl.float32, [COLUMNS, K], columns_shared(4))
        kda_tables(
            keys_at, raw_at, norm_at, read_at, score_at, coef_at, own, younger, new, parents, length, K, ROWS, TOKENS,
            TREE,
        )  # fmt: skip
        x = (read_at.load(LQ).to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)
    else:
        new = decays(new, a_log, bias, length, lower_bound, TOKENS, RAW, BOUNDED)
        to = ring_g + b_head * stride_rg_head + wrap(fresh + b_token, ring_len)
        gl.store(to, new, mask=b_token < length)
        gdn_tables(
            keys_at, raw_at, norm_at, score_at, coef_at, scale_at, fade_at, through_at, own, younger, new,
            parents, length, HEADS, ROWS, TOKENS, TREE,
        )  # fmt: skip
        x = columns.to(gl.float32)
    if READ == "bf16":
        inverse_at.store(gl.full([COLUMNS], 1.0, gl.float32, layout=gl.SliceLayout(1, LQ)))
    else:
        power, inverse = power_near(gl.sum(x * x, 1))
        x *= gl.expand_dims(power, 1)
        inverse_at.store(inverse)
    stage_columns(x_at, x, READ, EXACT)

    operands = load_operands(x_at, READ, EXACT, COLUMNS, K)
    n = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LT)), 0)
    inverse = inverse_at.load(IN_N)
    weight = score_at.load(LW)
    async_copy.wait_group(0)
    for h in gl.static_range(HEADS):
        X = multiply(tiles[h], tile_scales[h], operands, READ, COLUMNS)
        if KDA:
            X = add_rows(X * gl.expand_dims(inverse * units[h], 0), u_at.index(h), weight)
        else:
            through = through_at.index(h).load(gl.SliceLayout(1, MMA)) * units[h]
            fade = gl.expand_dims(fade_at.index(h).load(gl.SliceLayout(1, LW)), 1)
            X = X * gl.expand_dims(inverse, 0) * gl.expand_dims(through, 1)
            X = add_rows(X, u_at.index(h), weight * fade) * gl.expand_dims(scale_at.index(h).load(IN_N), 0)
        X = gl.convert_layout(X, LT)
        value = ()
        for i in gl.static_range(TOKENS):
            value = value + (v_at.index(h * TOKENS + i).load(LV).to(gl.float32),)
        for i in gl.static_range(TOKENS):
            coef = coef_at.index(i * HEADS + h).load(gl.SliceLayout(0, LT))
            u = beta_at.index(h * TOKENS + i).load(LV) * (value[i] - gl.sum(gl.where(n == i, X, 0.0), 1))
            u = gl.expand_dims(u, 1)
            X = gl.where(n == i, u, X + u * gl.expand_dims(coef, 0))
        results_at.index(h).permute((1, 0)).store(X.to(ACT))
    line = gl.expand_dims(gl.arange(0, HEADS * COLUMNS, layout=gl.SliceLayout(1, L2)), 1)
    line_head, token = line // COLUMNS, line % TOKENS
    to_u = ring_u + (line_head * stride_ru_head + wrap(fresh + token, ring_len) * V)
    to_out = out + (line_head * stride_out_head + token * stride_out_token)
    to = gl.where(line % COLUMNS < TOKENS, to_u, to_out) + cols
    gl.store(to, view(results_at, [HEADS * COLUMNS, V], PLAIN).load(L2), mask=token < length)
