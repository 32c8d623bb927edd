"""GDN's flush of a head in chunk form that waits in shared memory from its first read until its nvfp4 copy is written.

Memory sees the checkpoint once each way, and what a flush of a small batch waits for is short.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from replayssm.ops.delta.gluon_common import barrier
from replayssm.ops.delta.gluon_read_head import prefetch
from replayssm.ops.delta.gluon_read_renew import block_layout
from replayssm.ops.delta.gluon_read_tile import load_rows_v
from replayssm.ops.delta.gluon_read_window_pieces import (
    allocate_kept,
    fetch_kept,
    largest_kept,
    line_ptrs,
    lines_layout,
    piece_operands,
    stage_flush,
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
from replayssm.ops.gluon_formats import encode_nvfp4_numbers, global_scale
from replayssm.ops.gluon_read_window_touch import touch_rows
from replayssm.ops.gluon_window_parts import mma_layout


@gluon.jit
def replay_kept(
    kept, v, seen_at, tables, h, HEADS: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, PIECES: gl.constexpr
):  # fmt: skip
    """Fold the staged rows into a head; returns the largest magnitudes of the rows' parts [V rows, 32].

    seen_at: staged pieces of the keys; tables: those of `stage_flush`, of which this is head h.
    """
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    COUNT: gl.constexpr = kept.shape[0]
    V: gl.constexpr = kept.shape[1]
    L: gl.constexpr = chunk_layout(V, PIECE, gl.num_warps())
    zero = gl.zeros([V, ROWS], gl.float32, layout=MMA)
    W = zero
    for first in tl.range(0, COUNT, PIECES, disable_licm=True):
        for i in gl.static_range(PIECES):
            left = left_parts(to_pieces(kept.index(first + i).load(L), MMA)[0], MMA)
            W += products(left, piece_operands(seen_at, first + i, PARTS, COUNT, True, MMA), zero)
    # Now, as registers are short before.
    through, last, solve = tables_of(tables, h, HEADS, ROWS)
    W *= gl.expand_dims(through, 0)
    u = left_parts(products(left_parts(v.to(gl.float32) - W, MMA), solve, zero), MMA)
    largest = gl.zeros([V, PIECE], gl.float32, layout=L)
    for first in tl.range(0, COUNT, PIECES, disable_licm=True):
        for i in gl.static_range(PIECES):
            x = to_pieces(kept.index(first + i).load(L), MMA)[0].to(gl.float32)
            added = products(u, piece_operands(seen_at, first + i, PARTS, COUNT, False, MMA), gl.zeros_like(x))
            fade, added = gl.broadcast(last, added)
            stored = from_pieces((gl.fma(x, fade, added),), L).to(kept.dtype)
            kept.index(first + i).store(stored)
            largest = larger(largest, gl.abs(stored.to(gl.float32)))
    return largest


@gluon.jit
def write_kept(
    kept, state, codes, scales, power, inverse_power, K: gl.constexpr, EXACT: gl.constexpr, PIECES: gl.constexpr
):  # fmt: skip
    """Write a head and its copy; returns whether `EXACT` (the copy alone) might have chosen otherwise anywhere."""
    WARPS: gl.constexpr = gl.num_warps()
    L: gl.constexpr = block_layout(WARPS)
    LINES: gl.constexpr = lines_layout(kept.dtype.primitive_bitwidth, WARPS)
    V: gl.constexpr = kept.shape[1]
    to = line_ptrs(state, V, K)
    doubts = gl.zeros([V], gl.int32, layout=gl.SliceLayout(1, L))
    for first in tl.range(0, kept.shape[0], PIECES, disable_licm=True):
        for i in gl.static_range(PIECES):
            c = first + i
            if not EXACT:
                gl.store(to + c * PIECE, kept.index(c).load(LINES))
            x = kept.index(c).load(L).to(gl.float32)
            encoded, block_scales, _, _, doubtful = encode_nvfp4_numbers(x, power, inverse_power, EXACT, True)
            store_columns(codes + c * (PIECE // 2), encoded, K // 2)
            store_columns(scales + c * (PIECE // 16), block_scales, K // 16)
            if not EXACT:
                doubts = doubts | gl.convert_layout(gl.max(doubtful.to(gl.int32), 1), doubts.type.layout)
    return gl.max(doubts, 0)


@gluon.jit
def renew_kept(
    kept, v, seen_at, tables, h, state, codes, scales, global_at, K: gl.constexpr, HEADS: gl.constexpr,
    ROWS: gl.constexpr, PARTS: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """Replay a head that is on its way to shared memory; write it and its copy; PIECES: of 32 columns, side by side."""
    async_copy.wait_group(0)
    barrier()
    largest = replay_kept(kept, v, seen_at, tables, h, HEADS, ROWS, PARTS, PIECES)
    # Other threads wrote what a thread encodes.
    barrier()
    power, inverse_power = global_scale(largest_kept(kept, largest))
    gl.store(global_at, power)
    # One head in a hundred: again, with sums that round exactly as the format says.
    if write_kept(kept, state, codes, scales, power, inverse_power, K, False, PIECES) > 0:
        write_kept(kept, state, codes, scales, power, inverse_power, K, True, 1)


@gluon.jit
def flush_kept_heads(
    token, part, begin, end, state, ring_k, ring_v, ring_g, ring_beta, cursors, slot_indices, codes, scales, global_at,
    ring_len, chunks_state_slot, chunks_state_head, stride_rk_slot, stride_rk_head, stride_rv_slot, stride_rv_head,
    stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head, chunks_codes_slot, stride_scales_slot,
    stride_global_slot,
    GROUP: gl.constexpr, HEADS: gl.constexpr, K: gl.constexpr, V: gl.constexpr, ROWS: gl.constexpr, NORM: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    """Flush v-heads `begin` to `end` of HEADS that share a k-head of a row."""
    PARTS: gl.constexpr = num_parts(ring_k.dtype.element_ty)
    CHUNK: gl.constexpr = 128 // state.dtype.element_ty.primitive_bitwidth
    slot = gl.load(slot_indices + token).to(gl.int64)
    start = gl.load(cursors + slot * 4)
    count = gl.load(cursors + slot * 4 + 1)
    head = (part * HEADS + begin).to(gl.int64)
    # What the last item's tables were read for is over.
    barrier()
    state += (slot * chunks_state_slot + head * chunks_state_head) * CHUNK
    kept = allocate_kept(state.dtype.element_ty, V, K)
    fetch_kept(kept, state, K)
    ring_k += slot * stride_rk_slot + part * HEADS // GROUP * stride_rk_head
    ring_v += slot * stride_rv_slot + head * stride_rv_head
    ring_g += slot * stride_rg_slot + part * HEADS * stride_rg_head
    ring_beta += slot * stride_rb_slot + part * HEADS * stride_rb_head
    touch_rows(ring_k, start, count, ring_len, K, ROWS)
    touch_rows(ring_g, start, count, ring_len, 1, ROWS)
    touch_rows(ring_beta, start, count, ring_len, 1, ROWS)
    touch_rows(ring_v, start, count, ring_len, V, ROWS)
    seen_at, tables = stage_flush(
        ring_k, ring_g, ring_beta, start, count, ring_len, stride_rg_head, stride_rb_head, K, HEADS, ROWS, NORM
    )
    codes += slot * chunks_codes_slot * 16 + head * (V * (K // 2))
    scales += slot * stride_scales_slot + head * (V * (K // 16))
    global_at += slot * stride_global_slot + head
    for n in tl.range(begin, end, disable_licm=True):
        # A constant number is more than Triton 3.6 can fold.
        h = opaque(n)
        following = state + chunks_state_head * CHUNK
        if h + 1 < end:
            prefetch(following, kept.shape[0] * V * PIECE * kept.dtype.primitive_bitwidth // 8)
        v = load_rows_v(ring_v, 0, start, count, ring_len, V, V, ROWS)
        renew_kept(kept, v, seen_at, tables, h, state, codes, scales, global_at, K, HEADS, ROWS, PARTS, PIECES)
        barrier()
        if h + 1 < end:
            fetch_kept(kept, following, K)
        state, global_at, ring_v = following, global_at + 1, ring_v + stride_rv_head
        codes += V * (K // 2)
        scales += V * (K // 16)
