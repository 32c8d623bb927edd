"""Flushes in chunk form with a copy in blocks, in small loops, whose code stays in the nearest instruction caches.

A piece of the checkpoint is read three times, from memory and then from the caches.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_chunk_gdn import solve_operands
from replayssm.ops.delta.gluon_chunk_kda import kda_chunk_rows
from replayssm.ops.delta.gluon_common import barrier, row_of
from replayssm.ops.delta.gluon_read_head import largest_of, prefetch
from replayssm.ops.delta.gluon_read_lean import encode_int8
from replayssm.ops.delta.gluon_read_tile import load_rows_v
from replayssm.ops.delta.gluon_read_window_pieces import (
    piece_operands,
    pieces_shared,
    stage_flush,
    stage_pieces,
    store_columns,
    tables_of,
)
from replayssm.ops.gluon_chunk import (
    PIECE,
    chunk_layout,
    from_pieces,
    left_parts,
    num_parts,
    products,
    to_pieces,
)
from replayssm.ops.gluon_encode import larger
from replayssm.ops.gluon_flushers import opaque
from replayssm.ops.gluon_formats import encode_nvfp4_numbers, global_scale, scales_a_row
from replayssm.ops.gluon_read_window_codes import codes_a_row
from replayssm.ops.gluon_window_parts import mma_layout


@gluon.jit
def piece_at(state, first, c, K: gl.constexpr, BLOCK_V: gl.constexpr):
    """Pointers to columns 32 c on of the rows from `first` on."""
    L: gl.constexpr = chunk_layout(BLOCK_V, PIECE, gl.num_warps())
    rows = gl.expand_dims(gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, L)) * K, 1)
    columns = gl.expand_dims(gl.arange(0, PIECE, layout=gl.SliceLayout(0, L)), 0)
    return state + (first * K + c * PIECE) + (rows + columns)


@gluon.jit
def replay_head(
    state, codes, scales, ring_v, start, count, ring_len, seen_at, left_at, tables, h, HEADS: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr, ROWS: gl.constexpr, READ: gl.constexpr,
    KDA: gl.constexpr,
):  # fmt: skip
    """Fold the staged rows into a head in memory and write its copy, but for nvfp4.

    seen_at, left_at: staged pieces that S and u are multiplied by; tables: those of `stage_flush`, of which this is
    head h (KDA: last_at [K], what S fades by, and solve_at). Returns the largest magnitudes of the rows' parts
    [BLOCK_V, 32].
    """
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    L: gl.constexpr = chunk_layout(BLOCK_V, PIECE, gl.num_warps())
    COUNT: gl.constexpr = K // PIECE
    PARTS: gl.constexpr = 3 if KDA else num_parts(ring_v.dtype.element_ty)
    zero = gl.zeros([BLOCK_V, ROWS], gl.float32, layout=MMA)
    largest = gl.zeros([BLOCK_V, PIECE], gl.float32, layout=L)
    for t in tl.range(V // BLOCK_V, disable_licm=True):
        first = opaque(t) * BLOCK_V
        v = load_rows_v(ring_v, first, start, count, ring_len, V, BLOCK_V, ROWS)
        W = zero
        S = gl.load(piece_at(state, first, 0, K, BLOCK_V))
        for c in tl.range(COUNT, disable_licm=True):
            following = gl.load(piece_at(state, first, gl.minimum(c + 1, COUNT - 1), K, BLOCK_V))
            left = left_parts(to_pieces(S, MMA)[0], MMA)
            W += products(left, piece_operands(seen_at, c, PARTS, COUNT, True, MMA), zero)
            S = following
        # Now, as registers are short before.
        if KDA:
            solve = solve_operands(tables[1], h, HEADS, ROWS)
        else:
            through, last, solve = tables_of(tables, h, HEADS, ROWS)
            W *= gl.expand_dims(through, 0)
        u = left_parts(products(left_parts(v.to(gl.float32) - W, MMA), solve, zero), MMA)
        S = gl.load(piece_at(state, first, 0, K, BLOCK_V))
        for c in tl.range(COUNT, disable_licm=True):
            following = gl.load(piece_at(state, first, gl.minimum(c + 1, COUNT - 1), K, BLOCK_V))
            x = to_pieces(S, MMA)[0].to(gl.float32)
            added = products(u, piece_operands(left_at, c, PARTS, COUNT, False, MMA), gl.zeros_like(x))
            if KDA:
                fade = gl.expand_dims(row_of(tables[0], c, COUNT, PIECE).load(gl.SliceLayout(0, MMA)), 0)
            else:
                fade = last
            fade, added = gl.broadcast(fade, added)
            stored = from_pieces((gl.fma(x, fade, added),), L).to(state.dtype.element_ty)
            gl.store(piece_at(state, first, c, K, BLOCK_V), stored)
            if READ == "nvfp4":
                largest = larger(largest, gl.abs(stored.to(gl.float32)))
            elif READ == "int8":
                encoded, block_scales, _ = encode_int8(stored.to(gl.float32))
                gl.store(piece_at(codes, first, c, K, BLOCK_V), encoded)
                rows = first + gl.arange(0, BLOCK_V, layout=block_scales.type.layout)
                gl.store(scales + rows * COUNT + c, block_scales)
            else:
                gl.store(piece_at(codes, first, c, K, BLOCK_V), stored.to(gl.bfloat16))
            S = following
    return largest


@gluon.jit
def encode_head(state, codes, scales, power, inverse_power, K: gl.constexpr, V: gl.constexpr, EXACT: gl.constexpr):
    """Write a head's nvfp4 copy; returns whether `EXACT` might have chosen otherwise anywhere."""
    WARPS: gl.constexpr = gl.num_warps()
    # A thread has a block of 16.
    L: gl.constexpr = gl.BlockedLayout([1, 16], [256 // K * 4, K // 32], [WARPS, 1], [1, 0])
    HEIGHT: gl.constexpr = 4 * (256 // K) * WARPS
    WIDTH: gl.constexpr = K // 2
    COUNT: gl.constexpr = V // HEIGHT * 2
    rows = gl.expand_dims(gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, L)) * K, 1)
    at = state + (rows + gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L)), 0))
    doubts = gl.zeros([HEIGHT], gl.int32, layout=gl.SliceLayout(1, L))
    for i in tl.range(COUNT, disable_licm=True):
        x = gl.load(at + (i // 2 * (HEIGHT * K) + i % 2 * WIDTH))
        encoded, block_scales, _, _, doubtful = encode_nvfp4_numbers(
            x.to(gl.float32), power, inverse_power, EXACT, True
        )
        store_columns(codes + (i // 2 * (HEIGHT * K // 2) + i % 2 * (WIDTH // 2)), encoded, K // 2)
        store_columns(scales + (i // 2 * (HEIGHT * K // 16) + i % 2 * (WIDTH // 16)), block_scales, K // 16)
        if not EXACT:
            doubts = doubts | gl.convert_layout(gl.max(doubtful.to(gl.int32), 1), doubts.type.layout)
    return gl.max(doubts, 0)


@gluon.jit
def flush_in_loops(
    token, part, begin, end, state, ring_k, ring_v, ring_g, ring_beta, cursors, slot_indices, codes, scales, global_at,
    ring_len, chunks_state_slot, chunks_state_head, stride_rk_slot, stride_rk_head, stride_rv_slot, stride_rv_head,
    stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head, chunks_codes_slot, stride_scales_slot,
    stride_global_slot,
    GROUP: gl.constexpr, HEADS: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr,
    ROWS: gl.constexpr, NORM: gl.constexpr, READ: gl.constexpr, KDA: gl.constexpr,
):  # fmt: skip
    """Flush v-heads `begin` to `end` of HEADS that share a k-head of a row: the checkpoint and its copy."""
    STATE_CHUNK: gl.constexpr = 128 // state.dtype.element_ty.primitive_bitwidth
    CODE_CHUNK: gl.constexpr = 128 // codes.dtype.element_ty.primitive_bitwidth
    STATE_BYTES: gl.constexpr = V * K * state.dtype.element_ty.primitive_bitwidth // 8
    slot = gl.load(slot_indices + token)
    start = gl.load(cursors + slot.to(gl.int64) * 4)
    count = gl.load(cursors + slot.to(gl.int64) * 4 + 1)
    at_k = ring_k + slot.to(gl.int64) * stride_rk_slot + part * HEADS // GROUP * stride_rk_head
    first_head = slot.to(gl.int64) * chunks_state_slot + (part * HEADS + begin).to(gl.int64) * chunks_state_head
    prefetch(state + first_head * STATE_CHUNK, STATE_BYTES)
    # What the last item's tables were read for is over.
    barrier()
    gates_of = ring_g + slot.to(gl.int64) * stride_rg_slot + part * HEADS * stride_rg_head
    beta_of = ring_beta + slot.to(gl.int64) * stride_rb_slot + part * HEADS * stride_rb_head
    COUNT: gl.constexpr = K // PIECE
    if KDA:
        fresh, left, solve_at, last_at = kda_chunk_rows(
            at_k, gates_of, beta_of, start, count, ring_len, K, ROWS, NORM, PIECE
        )
        tables = (last_at, solve_at)
        # Room for three parts in a power of two.
        seen_at = gl.allocate_shared_memory(gl.bfloat16, [4 * COUNT, ROWS, PIECE], pieces_shared(2))
        left_at = gl.allocate_shared_memory(gl.bfloat16, [4 * COUNT, ROWS, PIECE], pieces_shared(2))
        stage_pieces(seen_at, fresh)
        stage_pieces(left_at, left)
    else:
        seen_at, tables = stage_flush(
            at_k, gates_of, beta_of, start, count, ring_len, stride_rg_head, stride_rb_head, K, HEADS, ROWS, NORM
        )
        left_at = seen_at
    for h in tl.range(begin, end, disable_licm=True):
        head = (opaque(part * HEADS) + h).to(gl.int64)
        s = opaque(slot).to(gl.int64)
        at_state = state + (s * chunks_state_slot + head * chunks_state_head) * STATE_CHUNK
        if h + 1 < end:
            prefetch(at_state + chunks_state_head * STATE_CHUNK, STATE_BYTES)
        at_codes = codes + s * chunks_codes_slot * CODE_CHUNK + head * (V * codes_a_row(READ, K))
        at_scales = scales + s * stride_scales_slot + head * (V * scales_a_row(READ, K))
        largest = replay_head(
            at_state, at_codes, at_scales, ring_v + s * stride_rv_slot + head * stride_rv_head, start, count, ring_len,
            seen_at, left_at, tables, h, HEADS, K, V, BLOCK_V, ROWS, READ, KDA,
        )  # fmt: skip
        if READ == "nvfp4":
            bits = largest_of(at_state, at_state, gl.reduce(largest, 1, larger), K, V, BLOCK_V, 64)
            power, inverse_power = global_scale(bits)
            gl.store(global_at + s * stride_global_slot + head, power)
            # Other threads wrote what a thread encodes.
            barrier()
            # One head in a hundred: again, with sums that round exactly as the format says.
            if encode_head(at_state, at_codes, at_scales, power, inverse_power, K, V, False) > 0:
                encode_head(at_state, at_codes, at_scales, power, inverse_power, K, V, True)
