"""Outputs of a window of GDN or KDA from the read copy: some v-heads of one k-head and row.

What the heads share is computed once; then their V rows follow in pieces, by a loop whose code stays in the caches.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from replayssm.ops.delta.gluon_common import sigmoid
from replayssm.ops.delta.gluon_read_scores import power_near
from replayssm.ops.delta.gluon_read_warp import u_shared
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
def part_rows(read, v_dim, warps):
    """V rows whose codes are loaded together: at most 16 registers of a thread (bf16: 32)."""
    return min(v_dim // 2, warps * (32 if read == "nvfp4" else 16))


@gluon.constexpr_function
def columns_layout(rows, columns, warps):
    """[V rows, columns]: a lane has all columns of neighbouring rows."""
    return gl.BlockedLayout([max(1, rows // (32 * warps)), columns], [32, 1], [warps, 1], [1, 0])


@gluon.jit
def fetch_rows(u_at, ring_u, start, live, ring_len, V: gl.constexpr):
    """Start copying some columns of the committed rows' u to shared memory [rows, columns], the oldest first."""
    COLUMNS: gl.constexpr = u_at.shape[1]
    L: gl.constexpr = rows_layout(COLUMNS, gl.num_warps())
    j = gl.expand_dims(gl.arange(0, u_at.shape[0], layout=gl.SliceLayout(1, L)), 1)
    at = wrap(start + j, ring_len) * V + gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L)), 0)
    copy_to_shared(u_at, ring_u + at, mask=j < live)


@gluon.jit
def load_part(codes, scales, part, PART: gl.constexpr, READ: gl.constexpr, K: gl.constexpr):
    """Codes and scales of a part of the heads' V rows."""
    loaded = load_codes(codes + part * (PART * codes_a_row(READ, K)), READ, PART, K, PART)
    return loaded, load_scales(scales + part * (PART * scales_a_row(READ, K)), loaded, READ, PART, K, PART)


@gluon.jit
def load_values(v, stride_v_token, length, TOKENS: gl.constexpr, LT: gl.constexpr):
    """v of the window's tokens in some V rows, as a tuple; 0 for tokens that a row does not have."""
    ITEM: gl.constexpr = LT.size_per_thread[0] * 32 * LT.warps_per_cta[0]
    rows = gl.arange(0, ITEM, layout=gl.SliceLayout(1, LT))
    values = ()
    for i in gl.static_range(TOKENS):
        values = values + (gl.load(v + i * stride_v_token + rows, mask=(rows >= 0) & (i < length), other=0.0),)
    return values


@gluon.jit
def read_part(part, operands, u_at, high, low, factor, scale, x_at, READ: gl.constexpr):
    """Put what the copy and the committed rows (weights: high + low) give for the columns into x_at [rows, columns]."""
    COLUMNS: gl.constexpr = x_at.shape[1]
    X = multiply(part[0], part[1], operands, READ, COLUMNS) * gl.expand_dims(factor, 0)
    u = u_at.permute((1, 0)).load(gl.DotOperandLayout(0, X.type.layout, 2))
    x_at.store(mma_v2(u, high, mma_v2(u, low, X)) * gl.expand_dims(scale, 0))


@gluon.jit
def finish_item(
    X, values, beta_at, coef_at, h, length, fresh, ring_len, ring_v, ring_u, out, stride_out_token,
    HEADS: gl.constexpr, TOKENS: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Solve for u of the window's tokens; write v, u and the outputs. X: [V rows, columns]; the pointers are theirs."""
    LT: gl.constexpr = X.type.layout
    LV: gl.constexpr = gl.SliceLayout(1, LT)
    n = gl.expand_dims(gl.arange(0, 2 * TOKENS, layout=gl.SliceLayout(0, LT)), 0)
    rows = gl.arange(0, X.shape[0], layout=LV)
    for i in gl.static_range(TOKENS):
        there = (rows >= 0) & (i < length)
        new = wrap(fresh + i, ring_len) * V + rows
        gl.store(ring_v + new, values[i], mask=there)
        coef = coef_at.index(i * HEADS + h).load(gl.SliceLayout(0, LT))
        u = beta_at.index(h * TOKENS + i).load(LV) * (values[i].to(gl.float32) - gl.sum(gl.where(n == i, X, 0.0), 1))
        X += gl.expand_dims(u, 1) * gl.expand_dims(coef, 0)
        gl.store(ring_u + new, u.to(ring_u.dtype.element_ty), mask=there)
    for i in gl.static_range(TOKENS):
        y = gl.sum(gl.where(n == TOKENS + i, X, 0.0), 1)
        gl.store(out + i * stride_out_token + rows, y.to(out.dtype.element_ty), mask=(rows >= 0) & (i < length))


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
    LB: gl.constexpr = gates_layout(WARPS)
    LQ: gl.constexpr = staging_layout(K, WARPS)
    PART: gl.constexpr = part_rows(READ, V, WARPS)
    ITEM: gl.constexpr = 2 * PART
    ITEMS: gl.constexpr = V // ITEM
    LT: gl.constexpr = columns_layout(ITEM, COLUMNS, WARPS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
    CODES_ROW: gl.constexpr = codes_a_row(READ, K)
    SCALES_ROW: gl.constexpr = scales_a_row(READ, K)
    k_head = head // GROUP
    codes += slot * chunks_codes_slot * CODE_CHUNK + head * (V * CODES_ROW)
    scales += slot * stride_scales_slot + head * (V * SCALES_ROW)
    global_scale += slot * stride_global_slot + head
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
    columns = load_columns(q, k, length, stride_q_token, stride_k_token, K, TOKENS)
    b_head = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, LB)), 1)
    b_token = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, LB)), 0)
    b = gl.load(beta + b_head * stride_beta_head + b_token * stride_beta_token, mask=b_token < length, other=0.0)
    unit = 1.0 + gl.zeros([HEADS, 1], gl.float32, layout=LB)
    if READ == "nvfp4":
        # Past the L1 cache, which may hold what lay beside another slot's scale before a flush.
        unit = gl.load(global_scale + b_head, cache_modifier=".cg") * E2M1_UNIT
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
    unit_at = gl.allocate_shared_memory(gl.float32, [HEADS, 1], FLAT)
    beta_at = gl.allocate_shared_memory(gl.float32, [HEADS * TOKENS, 1], FLAT)
    stage_rows(keys_at, raw_at, norm_at, keys, columns, scale, ROWS, TOKENS, NORM)
    # What the v-heads of a k-head share is appended once.
    if head % GROUP == 0:
        append_keys(ring_k, columns, fresh, length, ring_len, K, TOKENS)
    b = b.to(gl.float32)
    if RAW:
        b = gl.where(b_token < length, sigmoid(b), 0.0)
    view(beta_at, [HEADS, TOKENS], PLAIN).store(b)
    view(unit_at, [HEADS, 1], PLAIN).store(unit)
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
        gates_to = ring_g + b_head * stride_rg_head + wrap(fresh + b_token, ring_len)
        gl.store(gates_to, new, mask=b_token < length)
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
    inverse = inverse_at.load(IN_N)
    weight = score_at.load(LW)
    u_at = gl.allocate_shared_memory(ACT, [ROWS, ITEM], u_shared(ITEM))
    sums_at = gl.allocate_shared_memory(gl.float32, [ITEM, COLUMNS], PLAIN)
    for item in tl.range(HEADS * ITEMS, disable_licm=True):
        h = item // ITEMS
        at = item % ITEMS * ITEM
        # Every load goes out before the first is waited for.
        fetch_rows(u_at, ring_u + h * stride_ru_head + at, start, live, ring_len, V)
        async_copy.commit_group()
        part_0 = load_part(codes, scales, 2 * item, PART, READ, K)
        part_1 = load_part(codes, scales, 2 * item + 1, PART, READ, K)
        values = load_values(v + h * stride_v_head + at, stride_v_token, length, TOKENS, LT)
        factor = inverse * unit_at.index(h).load(IN_N)
        if KDA:
            seen = weight
            outer = factor * 0.0 + 1.0
        else:
            factor *= through_at.index(h).load(IN_N)
            seen = weight * gl.expand_dims(fade_at.index(h).load(gl.SliceLayout(1, LW)), 1)
            outer = scale_at.index(h).load(IN_N)
        high = seen.to(ACT)
        low = (seen - high.to(gl.float32)).to(ACT)
        async_copy.wait_group(0)
        u_0, u_1 = u_at.slice(0, PART, dim=1), u_at.slice(PART, PART, dim=1)
        read_part(part_0, operands, u_0, high, low, factor, outer, sums_at.slice(0, PART), READ)
        read_part(part_1, operands, u_1, high, low, factor, outer, sums_at.slice(PART, PART), READ)
        finish_item(
            sums_at.load(LT), values, beta_at, coef_at, h, length, fresh, ring_len, ring_v + h * stride_rv_head + at,
            ring_u + h * stride_ru_head + at, out + h * stride_out_head + at, stride_out_token, HEADS, TOKENS, V,
        )  # fmt: skip
