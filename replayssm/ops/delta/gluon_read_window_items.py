"""V rows of heads in a window of GDN or KDA from the read copy: from codes to outputs, by a loop that stays small."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from replayssm.ops.delta.gluon_read_warp import u_shared
from replayssm.ops.gluon_formats import scales_a_row
from replayssm.ops.gluon_read_window_codes import codes_a_row, load_codes, load_scales, multiply
from replayssm.ops.gluon_window_parts import copy_to_shared, mma_layout, rows_layout, wrap


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
def load_values(v, stride_v_token, length, ITEM: gl.constexpr, TOKENS: gl.constexpr, LT: gl.constexpr):
    """v of the window's tokens in some V rows, as a tuple; 0 for tokens that a row does not have."""
    rows = gl.arange(0, ITEM, layout=gl.SliceLayout(1, LT))
    values = ()
    for i in gl.static_range(TOKENS):
        values = values + (gl.load(v + i * stride_v_token + rows, mask=(rows >= 0) & (i < length), other=0.0),)
    return values


@gluon.jit
def add_rows(X, u_at, high, low, scale, x_at):
    """Put what the copy (X) and the committed rows (weights: high + low) give for the columns into x_at."""
    u = u_at.permute((1, 0)).load(gl.DotOperandLayout(0, X.type.layout, 2))
    x_at.store(mma_v2(u, high, mma_v2(u, low, X)) * gl.expand_dims(scale, 0))


@gluon.jit
def solve_token(
    X, value, beta_at, coef_at, i: gl.constexpr, h, length, fresh, ring_len, ring_v, ring_u, HEADS: gl.constexpr,
    TOKENS: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """X with what token i's u gives for every column; writes v and u."""
    LT: gl.constexpr = X.type.layout
    LV: gl.constexpr = gl.SliceLayout(1, LT)
    n = gl.expand_dims(gl.arange(0, 2 * TOKENS, layout=gl.SliceLayout(0, LT)), 0)
    rows = gl.arange(0, X.shape[0], layout=LV)
    there = (rows >= 0) & (i < length)
    new = wrap(fresh + i, ring_len) * V + rows
    gl.store(ring_v + new, value, mask=there)
    coef = coef_at.index(i * HEADS + h).load(gl.SliceLayout(0, LT))
    u = beta_at.index(h * TOKENS + i).load(LV) * (value.to(gl.float32) - gl.sum(gl.where(n == i, X, 0.0), 1))
    gl.store(ring_u + new, u.to(ring_u.dtype.element_ty), mask=there)
    return X + gl.expand_dims(u, 1) * gl.expand_dims(coef, 0)


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
        # The longest window has more than half the tokens that there is room for.
        if i <= max(3, TOKENS // 2):
            X = solve_token(
                X, values[i], beta_at, coef_at, i, h, length, fresh, ring_len, ring_v, ring_u, HEADS, TOKENS, V
            )
        else:
            if i < length:
                X = solve_token(
                    X, values[i], beta_at, coef_at, i, h, length, fresh, ring_len, ring_v, ring_u, HEADS, TOKENS, V
                )
    for i in gl.static_range(TOKENS):
        y = gl.sum(gl.where(n == TOKENS + i, X, 0.0), 1)
        gl.store(out + i * stride_out_token + rows, y.to(out.dtype.element_ty), mask=(rows >= 0) & (i < length))


@gluon.jit
def read_items(
    operands, inverse_at, score_at, unit_at, through_at, fade_at, scale_at, beta_at, coef_at, codes, scales, v, ring_v,
    ring_u, out, start, live, length, fresh, ring_len, stride_v_token, stride_v_head, stride_rv_head, stride_ru_head,
    stride_out_token, stride_out_head,
    HEADS: gl.constexpr, K: gl.constexpr, V: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    READ: gl.constexpr, KDA: gl.constexpr,
):  # fmt: skip
    """The heads' V rows, piece by piece: from the copy and the committed rows to u and the outputs."""
    WARPS: gl.constexpr = gl.num_warps()
    ACT: gl.constexpr = ring_u.dtype.element_ty
    COLUMNS: gl.constexpr = 2 * TOKENS
    MMA: gl.constexpr = mma_layout(WARPS)
    IN_N: gl.constexpr = gl.SliceLayout(0, MMA)
    LW: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    PART: gl.constexpr = part_rows(READ, V, WARPS)
    ITEM: gl.constexpr = 2 * PART
    ITEMS: gl.constexpr = V // ITEM
    LT: gl.constexpr = columns_layout(ITEM, COLUMNS, WARPS)
    inverse = inverse_at.load(IN_N)
    u_at = gl.allocate_shared_memory(ACT, [ROWS, ITEM], u_shared(ITEM))
    # Lanes that load whole rows meet in fewer banks.
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(4, 4, 2, order=[1, 0])
    sums_at = gl.allocate_shared_memory(gl.float32, [ITEM, COLUMNS], SUMS)
    for item in tl.range(HEADS * ITEMS, disable_licm=True):
        h = item // ITEMS
        at = item % ITEMS * ITEM
        # Every load goes out before the first is waited for.
        fetch_rows(u_at, ring_u + h * stride_ru_head + at, start, live, ring_len, V)
        async_copy.commit_group()
        part_0 = load_part(codes, scales, 2 * item, PART, READ, K)
        part_1 = load_part(codes, scales, 2 * item + 1, PART, READ, K)
        values = load_values(v + h * stride_v_head + at, stride_v_token, length, ITEM, TOKENS, LT)
        factor = inverse * unit_at.index(h).load(IN_N)
        if not KDA:
            factor *= through_at.index(h).load(IN_N)
        X_0 = multiply(part_0[0], part_0[1], operands, READ, COLUMNS) * gl.expand_dims(factor, 0)
        X_1 = multiply(part_1[0], part_1[1], operands, READ, COLUMNS) * gl.expand_dims(factor, 0)
        async_copy.wait_group(0)
        seen = score_at.load(LW)
        if KDA:
            outer = factor * 0.0 + 1.0
        else:
            seen *= gl.expand_dims(fade_at.index(h).load(gl.SliceLayout(1, LW)), 1)
            outer = scale_at.index(h).load(IN_N)
        high = seen.to(ACT)
        low = (seen - high.to(gl.float32)).to(ACT)
        u_0, u_1 = u_at.slice(0, PART, dim=1), u_at.slice(PART, PART, dim=1)
        add_rows(X_0, u_0, high, low, outer, sums_at.slice(0, PART))
        add_rows(X_1, u_1, high, low, outer, sums_at.slice(PART, PART))
        finish_item(
            sums_at.load(LT), values, beta_at, coef_at, h, length, fresh, ring_len, ring_v + h * stride_rv_head + at,
            ring_u + h * stride_ru_head + at, out + h * stride_out_head + at, stride_out_token, HEADS, TOKENS, V,
        )  # fmt: skip
