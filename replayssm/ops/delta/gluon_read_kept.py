"""GDN's flush of a row's v-heads in chunk form with an nvfp4 copy, and their outputs of one token.

A head waits in shared memory from its first read until its copy is written: beside programs that read, every access of
memory takes long, and this makes one each way, of whole lines. It is worked on in tiles, so that registers are left for
those programs.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from replayssm.ops.delta.gluon_common import barrier, inverse_norm, row_of, wrap
from replayssm.ops.delta.gluon_read_chunk import append_gates
from replayssm.ops.delta.gluon_read_head import prefetch
from replayssm.ops.delta.gluon_read_renew import block_layout, block_sums, blocks_layout, same_layout
from replayssm.ops.delta.gluon_read_tile import load_rows_v
from replayssm.ops.delta.gluon_read_window_pieces import (
    kept_shared,
    largest_kept,
    line_ptrs,
    lines_layout,
    piece_operands,
    stage_flush,
    store_columns,
    tables_of,
)
from replayssm.ops.gluon_chunk import PIECE, chunk_layout, from_pieces, left_parts, num_parts, products, to_pieces
from replayssm.ops.gluon_encode import larger
from replayssm.ops.gluon_flushers import opaque
from replayssm.ops.gluon_formats import encode_nvfp4_numbers, global_scale
from replayssm.ops.gluon_read_window_touch import touch_rows
from replayssm.ops.gluon_window_parts import copy_to_shared, mma_layout


@gluon.jit
def fetch_tile(kept, state, t, K: gl.constexpr):
    """Start copying tile t of a head to shared memory [tiles * pieces, rows, 32]."""
    COUNT: gl.constexpr = K // PIECE
    V: gl.constexpr = kept.shape[1]
    ptrs = line_ptrs(state, V, K) + t * (V * K)
    for c in gl.static_range(COUNT):
        copy_to_shared(kept.index(t * COUNT + c), ptrs + c * PIECE)
    async_copy.commit_group()


@gluon.jit
def replay_tile(
    kept, v, seen_at, tables, h, t, largest, HEADS: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr,
    COUNT: gl.constexpr,
):  # fmt: skip
    """Fold the staged rows into tile t of a head; returns `largest`, with what its pieces hold.

    seen_at: staged pieces of the keys; tables: those of `stage_flush`, of which this is head h.
    """
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    V: gl.constexpr = kept.shape[1]
    L: gl.constexpr = chunk_layout(V, PIECE, gl.num_warps())
    W = gl.zeros([V, ROWS], gl.float32, layout=MMA)
    zero = W
    for c in tl.range(COUNT, disable_licm=True):
        left = left_parts(to_pieces(kept.index(t * COUNT + c).load(L), MMA)[0], MMA)
        W += products(left, piece_operands(seen_at, c, PARTS, COUNT, True, MMA), zero)
    through, last, solve = tables_of(tables, h, HEADS, ROWS)
    W *= gl.expand_dims(through, 0)
    u = left_parts(products(left_parts(v.to(gl.float32) - W, MMA), solve, zero), MMA)
    for c in tl.range(COUNT, disable_licm=True):
        x = to_pieces(kept.index(t * COUNT + c).load(L), MMA)[0].to(gl.float32)
        added = products(u, piece_operands(seen_at, c, PARTS, COUNT, False, MMA), gl.zeros_like(x))
        fade, added = gl.broadcast(last, added)
        stored = from_pieces((gl.fma(x, fade, added),), L).to(kept.dtype)
        kept.index(t * COUNT + c).store(stored)
        largest = larger(largest, gl.abs(stored.to(gl.float32)))
    return largest


@gluon.jit
def write_and_read(
    kept, state, codes, scales, t, head_scale, vectors, K: gl.constexpr, EXACT: gl.constexpr
):  # fmt: skip
    """Write tile t of a head and its copy; returns what that gives for k and q [rows], and whether `EXACT` (the copy
    alone) might have chosen otherwise anywhere.

    head_scale: and its reciprocal; vectors: k and q in shared memory. The pointers are of the head.
    """
    WARPS: gl.constexpr = gl.num_warps()
    L: gl.constexpr = block_layout(WARPS)
    IN_V: gl.constexpr = gl.SliceLayout(1, L)
    IN_K: gl.constexpr = gl.SliceLayout(0, L)
    LINES: gl.constexpr = lines_layout(kept.dtype.primitive_bitwidth, WARPS)
    COUNT: gl.constexpr = K // PIECE
    V: gl.constexpr = kept.shape[1]
    power, inverse_power = head_scale
    k_at, q_at = vectors
    to = line_ptrs(state, V, K) + t * (V * K)
    codes += t * (V * (K // 2))
    scales += t * (V * (K // 16))
    doubts = gl.zeros([V], gl.int32, layout=IN_V)
    at_k = gl.full([V, PIECE // 16], 0.0, gl.float32, layout=gl.SliceLayout(2, blocks_layout(WARPS)))
    at_q = at_k
    for c in tl.range(COUNT, disable_licm=True):
        if not EXACT:
            gl.store(to + c * PIECE, kept.index(t * COUNT + c).load(LINES))
        x = kept.index(t * COUNT + c).load(L).to(gl.float32)
        encoded, block_scales, numbers, read, doubtful = encode_nvfp4_numbers(x, power, inverse_power, EXACT, True)
        store_columns(codes + c * (PIECE // 2), encoded, K // 2)
        store_columns(scales + c * (PIECE // 16), block_scales, K // 16)
        k = gl.expand_dims(row_of(k_at, c, COUNT, PIECE).load(IN_K), 0)
        q = gl.expand_dims(row_of(q_at, c, COUNT, PIECE).load(IN_K), 0)
        at_k += same_layout(block_sums(numbers, k) * read, at_k)
        at_q += same_layout(block_sums(numbers, q) * read, at_k)
        if not EXACT:
            doubts = doubts | gl.convert_layout(gl.max(doubtful.to(gl.int32), 1), IN_V)
    at_k = gl.convert_layout(gl.sum(at_k, 1), IN_V, assert_trivial=True)
    return at_k, gl.convert_layout(gl.sum(at_q, 1), IN_V, assert_trivial=True), gl.max(doubts, 0)


@gluon.jit
def flush_kept(
    token, part, q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors,
    slot_indices, out, codes, scales, global_at, ring_len, scale, lower_bound, stride_q_token, stride_q_head,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head, stride_g_token, stride_g_head, stride_beta_token,
    stride_beta_head, stride_out_token, stride_out_head, chunks_state_slot, chunks_state_head, stride_rk_slot,
    stride_rk_head, stride_rv_slot, stride_rv_head, stride_ru_slot, stride_ru_head, stride_rg_slot, stride_rg_head,
    stride_rb_slot, stride_rb_head, chunks_codes_slot, stride_scales_slot, stride_global_slot,
    GROUP: gl.constexpr, HEADS: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr,
    ROWS: gl.constexpr, RAW: gl.constexpr, HAS_BIAS: gl.constexpr, BOUNDED: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """Flush HEADS v-heads of one k-head of a row, append this token and compute its outputs from the new copy."""
    WARPS: gl.constexpr = gl.num_warps()
    PARTS: gl.constexpr = num_parts(ring_k.dtype.element_ty)
    CHUNK: gl.constexpr = 128 // state.dtype.element_ty.primitive_bitwidth
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    LK: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    IN_V: gl.constexpr = gl.SliceLayout(1, block_layout(WARPS))
    slot = gl.load(slot_indices + token).to(gl.int64)
    start = gl.load(cursors + slot * 4)
    count = gl.load(cursors + slot * 4 + 1)
    head = (part * HEADS).to(gl.int64)
    k_head = part * HEADS // GROUP
    new = wrap(start + count, ring_len)
    # What the last item's tables were read for is over.
    barrier()
    state += (slot * chunks_state_slot + head * chunks_state_head) * CHUNK
    TILES: gl.constexpr = V // BLOCK_V
    COUNT: gl.constexpr = K // PIECE
    SHARED: gl.constexpr = kept_shared(state.dtype.element_ty.primitive_bitwidth)
    kept = gl.allocate_shared_memory(state.dtype.element_ty, [TILES * COUNT, BLOCK_V, PIECE], SHARED)
    for t in range(TILES):
        fetch_tile(kept, state, t, K)
    ring_k += slot * stride_rk_slot + k_head * stride_rk_head
    ring_v += slot * stride_rv_slot + head * stride_rv_head
    ring_u += slot * stride_ru_slot + head * stride_ru_head
    ring_g += slot * stride_rg_slot + head * stride_rg_head
    ring_beta += slot * stride_rb_slot + head * stride_rb_head
    touch_rows(ring_g, start, count, ring_len, 1, ROWS)
    touch_rows(ring_beta, start, count, ring_len, 1, ROWS)
    touch_rows(ring_v, start, count, ring_len, V, ROWS)
    cols = gl.arange(0, K, layout=LK)
    k_raw = gl.load(k + token * stride_k_token + k_head * stride_k_head + cols)
    q_now = gl.load(q + token * stride_q_token + k_head * stride_q_head + cols).to(gl.float32)
    beta_at = gl.allocate_shared_memory(gl.float32, [HEADS], FLAT)
    fade_at = gl.allocate_shared_memory(gl.float32, [HEADS], FLAT)
    k_at = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    q_at = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    append_gates(
        beta_at, fade_at, beta + token * stride_beta_token + head * stride_beta_head,
        g + token * stride_g_token + head * stride_g_head, A_log + head, dt_bias + head, ring_beta + new, ring_g + new,
        lower_bound, stride_beta_head, stride_g_head, stride_rb_head, stride_rg_head, HEADS, False, RAW, HAS_BIAS,
        BOUNDED,
    )  # fmt: skip
    k_now = k_raw.to(gl.float32)
    k_now *= inverse_norm(k_now, 0, NORM)
    q_now *= inverse_norm(q_now, 0, NORM) * scale
    kq = gl.sum(k_now * q_now, axis=0)
    k_at.store(k_now)
    q_at.store(q_now)
    vectors = (k_at, q_at)
    seen_at, tables = stage_flush(
        ring_k, ring_g, ring_beta, start, count, ring_len, stride_rg_head, stride_rb_head, K, HEADS, ROWS, NORM
    )
    if part * HEADS % GROUP == 0:
        gl.store(ring_k + new * K + cols, k_raw)
    codes += slot * chunks_codes_slot * 16 + head * (V * (K // 2))
    scales += slot * stride_scales_slot + head * (V * (K // 16))
    global_at += slot * stride_global_slot + head
    rows = gl.arange(0, BLOCK_V, layout=IN_V)
    v += token * stride_v_token + head * stride_v_head
    out += token * stride_out_token + head * stride_out_head
    for n in tl.range(HEADS, disable_licm=True):
        # A constant number is more than Triton 3.6 can fold.
        h = opaque(n)
        following = state + chunks_state_head * CHUNK
        if h + 1 < HEADS:
            prefetch(following, V * K * kept.dtype.primitive_bitwidth // 8)
        async_copy.wait_group(0)
        barrier()
        largest = gl.zeros([BLOCK_V, PIECE], gl.float32, layout=chunk_layout(BLOCK_V, PIECE, WARPS))
        for t in tl.range(TILES, disable_licm=True):
            rows_v = load_rows_v(ring_v, opaque(t) * BLOCK_V, start, count, ring_len, V, BLOCK_V, ROWS)
            largest = replay_tile(kept, rows_v, seen_at, tables, h, t, largest, HEADS, ROWS, PARTS, COUNT)
        # Other threads wrote what a thread encodes.
        barrier()
        head_scale = global_scale(largest_kept(kept, largest))
        gl.store(global_at, head_scale[0])
        through = row_of(fade_at, h, HEADS, 1).load(IN_V)
        b = row_of(beta_at, h, HEADS, 1).load(IN_V)
        for n_t in tl.range(TILES, disable_licm=True):
            t = opaque(n_t)
            v_now = gl.load(v + t * BLOCK_V + rows)
            at_k, at_q, doubts = write_and_read(kept, state, codes, scales, t, head_scale, vectors, K, False)
            # One head in a hundred: again, with sums that round exactly as the format says.
            if doubts > 0:
                at_k, at_q, _ = write_and_read(kept, state, codes, scales, t, head_scale, vectors, K, True)
            # The next head's tile travels while this one's others are encoded.
            barrier()
            if h + 1 < HEADS:
                fetch_tile(kept, following, t, K)
            u = b * (v_now.to(gl.float32) - at_k * through)
            gl.store(out + t * BLOCK_V + rows, (at_q * through + kq * u).to(out.dtype.element_ty))
            gl.store(ring_u + (new * V + t * BLOCK_V + rows), u.to(ring_u.dtype.element_ty))
            gl.store(ring_v + (new * V + t * BLOCK_V + rows), v_now)
        state, global_at, ring_v, ring_u = following, global_at + 1, ring_v + stride_rv_head, ring_u + stride_ru_head
        v, out = v + stride_v_head, out + stride_out_head
        codes += V * (K // 2)
        scales += V * (K // 16)
