"""A head of a flush in chunk form: its tiles one after the other, then, for nvfp4, the copy with the head's scale."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_common import wrap
from replayssm.ops.delta.gluon_read_blocks import COLUMNS, add_products, encode_nvfp4_chunk, row_most
from replayssm.ops.delta.gluon_read_renew import most
from replayssm.ops.delta.gluon_read_tile import (
    chunk_of,
    load_pieces,
    load_rows_v,
    load_tile,
    load_unit,
    load_values,
    renew_chunk,
    renew_rows,
    replay_pieces,
    solve_rows,
    store_pieces,
    store_tile,
)
from replayssm.ops.gluon_encode import larger
from replayssm.ops.gluon_flushers import opaque
from replayssm.ops.gluon_formats import global_scale, largest_finite


@gluon.jit
def prefetch(at, nbytes):
    """Bring `nbytes` (a multiple of 16) to the L2 cache."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r", [at, gl.to_tensor(nbytes)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def largest_of(state, state_scales, most_at_row, K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr,
               WIDTH: gl.constexpr):  # fmt: skip
    """The largest magnitude of a stored head among blocks without NaN and infinity, as bits, from its rows' largest."""
    bits = gl.reduce(most_at_row, 0, larger).to(gl.int32, bitcast=True)
    if bits >= 0x7F800000:
        bits = 0
        for t in range(V // BLOCK_V):
            for c in gl.static_range(K // WIDTH):
                x = load_values(state, state_scales, t * BLOCK_V, c, K, BLOCK_V, WIDTH)
                bits = gl.maximum(bits, gl.reduce(largest_finite(x), 0, most))
    return bits


@gluon.jit
def finish_rows(
    X, v, ring_v, ring_u, out, first_row, start, count, ring_len, kq, through, b, V: gl.constexpr,
    BLOCK_V: gl.constexpr, MMA: gl.constexpr
):  # fmt: skip
    """v's ring row, u and the output of a tile's rows from what the copy gives for k and q."""
    n = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, MMA)), 0)
    rows = first_row + gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, MMA))
    at_k = gl.sum(gl.where(n < 3, X, 0.0), 1)
    at_q = gl.sum(gl.where(n < 3, 0.0, X), 1)
    v_now = gl.load(v + rows)
    u = b * (v_now.to(gl.float32) - at_k * through)
    gl.store(out + rows, (at_q * through + kq * u).to(out.dtype.element_ty))
    gl.store(ring_u + rows, u.to(ring_u.dtype.element_ty))
    gl.store(ring_v + wrap(start + count, ring_len) * V + rows, v_now)


@gluon.jit
def flush_tiles(
    state, state_scales, codes, scales, global_at, ring_v, v, ring_u, out, seen_at, left_at, last_at,
    columns_at, through, last, solve, start, count, ring_len, kq, fade, b,
    K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr, ROWS: gl.constexpr, READ: gl.constexpr,
    SCALES: gl.constexpr, WIDTH: gl.constexpr, MMA: gl.constexpr, KDA: gl.constexpr, OUTPUTS: gl.constexpr,
):  # fmt: skip
    """Replay, store, encode and read a head; the pointers are of the head.

    A chunk of the checkpoint is loaded twice rather than kept; where fp8 needs whole rows, a tile is kept.
    """
    TILES: gl.constexpr = V // BLOCK_V
    CODES_ROW: gl.constexpr = K // 2 if READ == "nvfp4" else K
    BITS: gl.constexpr = state.dtype.element_ty.primitive_bitwidth
    FP8: gl.constexpr = BITS == 8
    WHOLE: gl.constexpr = FP8 or READ == "fp8"
    largest = gl.zeros([BLOCK_V], gl.float32, layout=gl.SliceLayout(1, MMA))
    for t in tl.range(TILES, disable_licm=True):
        first = opaque(t) * BLOCK_V
        unit = load_unit(state, state_scales, first, BLOCK_V)
        rows_v = load_rows_v(ring_v, first, start, count, ring_len, V, BLOCK_V, ROWS)
        old = load_tile(state, first, K, BLOCK_V, WIDTH)
        if t + 1 < TILES:
            prefetch(state + (first + BLOCK_V) * K, BLOCK_V * K * BITS // 8)
        left = solve_rows(old, rows_v, unit, seen_at, through, solve, KDA)
        X = gl.zeros([BLOCK_V, COLUMNS], gl.float32, layout=MMA)
        again = opaque(first)
        S = ()
        for c in gl.static_range(K // WIDTH):
            x = load_pieces(state, again, c, K, BLOCK_V, WIDTH)
            x = replay_pieces(x, unit, left, left_at, last_at, last, c, KDA)
            if not FP8:
                x = store_pieces(x, state, first, c, K, WIDTH)
            if WHOLE:
                S = S + x
            elif READ == "nvfp4":
                largest = larger(largest, row_most(x))
            else:
                X = renew_chunk(
                    x, X, codes + first * CODES_ROW, scales + first * SCALES, columns_at, c, READ, K, WIDTH, OUTPUTS
                )
        if FP8:
            S = store_tile(S, state, state_scales, first, K, WIDTH)
        if WHOLE:
            if READ == "nvfp4":
                largest = larger(largest, row_most(S))
            elif READ == "fp8" or READ == "none":
                X = renew_rows(
                    S, X, codes + first * CODES_ROW, scales + first * SCALES, columns_at, READ, K, WIDTH, OUTPUTS
                )
            else:
                for c in gl.static_range(K // WIDTH):
                    X = renew_chunk(
                        chunk_of(S, c, WIDTH),
                        X,
                        codes + first * CODES_ROW,
                        scales + first * SCALES,
                        columns_at,
                        c,
                        READ,
                        K,
                        WIDTH,
                        OUTPUTS,
                    )
        if READ != "nvfp4":
            if OUTPUTS:
                finish_rows(X, v, ring_v, ring_u, out, first, start, count, ring_len, kq, fade, b, V, BLOCK_V, MMA)
    if READ == "nvfp4":
        bits = largest_of(state, state_scales, largest, K, V, BLOCK_V, WIDTH)
        power, inverse_power = global_scale(bits)
        gl.store(global_at, power)
        for i in tl.range(TILES, disable_licm=True):
            # In the order opposite to that in which they were written.
            first = (TILES - 1 - opaque(i)) * BLOCK_V
            X = gl.zeros([BLOCK_V, COLUMNS], gl.float32, layout=MMA)
            for c in tl.range(K // WIDTH, disable_licm=True):
                x = load_values(state, state_scales, first, c, K, BLOCK_V, WIDTH)
                pieces = encode_nvfp4_chunk(
                    x, power, inverse_power, codes + first * CODES_ROW, scales + first * SCALES, c, K // WIDTH, MMA
                )
                if OUTPUTS:
                    X = add_products(X, pieces, columns_at, 2 * c, MMA)
            if OUTPUTS:
                finish_rows(X, v, ring_v, ring_u, out, first, start, count, ring_len, kq, fade, b, V, BLOCK_V, MMA)
