"""A row and k-head of the one-token step: what the tiles share, then the tiles, read or flushed.

What the tiles share (scores of the ring rows, gates, norms) is computed once, while the first tiles travel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from replayssm.ops.gluon_window_parts import state_shared

from .gluon_chunk_tiles import flush_chunks
from .gluon_common import barrier, inverse_norm, row_of_age, wrap
from .gluon_layouts import keys_layout, scores_layout, tile_layout, tile_shared, values_layout, values_shared
from .gluon_read16 import read_tiles_16
from .gluon_schedule import leaves_flush, read_cursors
from .gluon_scores import keep_decay, keep_rows, load_gate, load_ring_gates, score, this_token
from .gluon_space import flush_space, late_space, token_space
from .gluon_tiles import append_row, fetch_first, fetch_more, fetch_rows, flush_tiles, read_tiles, write_kept


@gluon.jit
def step_row(
    row, part, begin, end, only_flushes, num_rows,
    q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices, out,
    num_slots, ring_len, buffer_len, pad_slot_id, scale, lower_bound,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, stride_out_token, stride_out_head,
    chunks_state_slot, chunks_state_head, stride_rk_slot, stride_rk_head, chunks_rv_slot, chunks_rv_head,
    chunks_ru_slot, chunks_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head,
    GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr, NUM_TILES: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr, FLUSHERS: gl.constexpr, LATE: gl.constexpr,
    TENSOR_CORES: gl.constexpr, BLOCK_L: gl.constexpr, KDA: gl.constexpr, RAW: gl.constexpr, HAS_BIAS: gl.constexpr,
    BOUNDED: gl.constexpr, NORM: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Part `part` of a row's programs: outputs of its tiles; in a row that flushes, from tile `begin` to `end`."""
    WARPS: gl.constexpr = gl.num_warps()
    BITS: gl.constexpr = state.dtype.element_ty.primitive_bitwidth
    ACT_BITS: gl.constexpr = q.dtype.element_ty.primitive_bitwidth
    ACT_CHUNK: gl.constexpr = 128 // ACT_BITS
    TILE: gl.constexpr = tile_layout(BITS, BLOCK_V, WARPS)
    VALUES: gl.constexpr = values_layout(BLOCK_L, BLOCK_V, WARPS)
    SCORES: gl.constexpr = scores_layout(BLOCK_L, K, WARPS, KDA)
    HEADS: gl.constexpr = gl.BlockedLayout([1, BLOCK_L // 16], [2, 16], [WARPS, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    # Weights through unit keys fit any 16-bit type.
    MMA: gl.constexpr = TENSOR_CORES and BITS == 16 and ACT_BITS == 16 and BLOCK_V == 16 * WARPS and NORM
    PER_HEAD: gl.constexpr = V // BLOCK_V
    CHUNKS: gl.constexpr = GROUP * PER_HEAD // NUM_TILES
    NUM_HEADS: gl.constexpr = (NUM_TILES + PER_HEAD - 1) // PER_HEAD
    PAD_HEADS: gl.constexpr = 2 if NUM_HEADS <= 2 else (4 if NUM_HEADS <= 4 else 8)
    token = row.to(gl.int64)
    slot = gl.load(slot_indices + token).to(gl.int64)
    first_tile = (part % CHUNKS) * NUM_TILES
    k_head = (part // CHUNKS).to(gl.int64)
    head = k_head * GROUP + first_tile // PER_HEAD
    first_col = first_tile % PER_HEAD * BLOCK_V
    line = first_col + gl.arange(0, NUM_TILES * BLOCK_V, layout=LINE)
    line_head = line // V
    line_col = line % V
    out += token * stride_out_token + head * stride_out_head
    # What does not depend on the slot is loaded while its index is on the way.
    cols = gl.arange(0, K, layout=gl.SliceLayout(0, keys_layout(BLOCK_L, K, WARPS)))
    offs_h = gl.arange(0, PAD_HEADS, layout=gl.SliceLayout(1, HEADS))
    mask_h = offs_h < NUM_HEADS
    k_raw = gl.load(k + token * stride_k_token + k_head * stride_k_head + cols)
    q_raw = gl.load(q + token * stride_q_token + k_head * stride_q_head + cols)
    v_raw = gl.load(v + token * stride_v_token + (head + line_head) * stride_v_head + line_col)
    b_raw = gl.load(beta + token * stride_beta_token + (head + offs_h) * stride_beta_head, mask=mask_h, other=0.0)
    decay, a_log, bias = load_gate(g + token * stride_g_token + head * stride_g_head, A_log, dt_bias, head, cols,
                                   offs_h, mask_h, stride_g_head, K, KDA, RAW, HAS_BIAS)
    if (slot == pad_slot_id) | (slot < 0) | (slot >= num_slots):
        gl.store(out + line_head * stride_out_head + line_col,
                 gl.full([NUM_TILES * BLOCK_V], 0.0, out.dtype.element_ty, layout=LINE))
    else:
        SHARED: gl.constexpr = state_shared(BITS) if MMA else tile_shared(BITS, BLOCK_V, WARPS)
        smem = gl.allocate_shared_memory(state.dtype.element_ty, [STAGES, BLOCK_V, K], SHARED)
        u_smem = gl.allocate_shared_memory(ring_u.dtype.element_ty, [STAGES, BLOCK_L, BLOCK_V],
                                           values_shared(ACT_BITS, BLOCK_V, BLOCK_L))
        if not CHUNK:
            keys_at, gates_at, values_at = flush_space(smem, ring_v.dtype.element_ty, K, BLOCK_V, BLOCK_L, STAGES, KDA)
        start, committed, flush = read_cursors(cursors, slot, buffer_len)
        stride_state_head = chunks_state_head * (128 // BITS)
        stride_rv_head = chunks_rv_head * ACT_CHUNK
        stride_ru_head = chunks_ru_head * ACT_CHUNK
        state += slot * chunks_state_slot * (128 // BITS) + head * stride_state_head + first_col * K
        ring_k += slot * stride_rk_slot + k_head * stride_rk_head
        ring_v += slot * chunks_rv_slot * ACT_CHUNK + head * stride_rv_head
        ring_u += slot * chunks_ru_slot * ACT_CHUNK + head * stride_ru_head + first_col
        ring_g += slot * stride_rg_slot + head * stride_rg_head
        ring_beta += slot * stride_rb_slot + head * stride_rb_head
        # Before it is known whether the row flushes, part of a tile: the ring's rows must not queue behind more.
        if EARLY > 0:
            fetch_rows(smem.index(0),
                       state + begin // PER_HEAD * stride_state_head + begin % PER_HEAD * (BLOCK_V * K), 0, EARLY, K)
        # This token, while the cursors are on the way.
        k_now, q_now, kq, decay, b = this_token(k_raw, q_raw, decay, b_raw, a_log, bias, scale, lower_bound, RAW,
                                                BOUNDED, NORM)
        v_at = gl.allocate_shared_memory(v.dtype.element_ty, [NUM_TILES * BLOCK_V], FLAT, v_raw)
        beta_at = gl.allocate_shared_memory(gl.float32, [PAD_HEADS], FLAT, b)
        if leaves_flush(flush, only_flushes, row, slot_indices, cursors, num_rows, num_slots, pad_slot_id, buffer_len,
                        FLUSHERS):
            async_copy.commit_group()
            async_copy.wait_group(0)
            return
        # The committed rows, youngest first: a row that reads weighs them, a flushing row replays them one by one (in
        # chunk form it loads them later).
        rows = gl.where(flush, 0, committed) if CHUNK else committed
        age = gl.arange(0, BLOCK_L, layout=gl.SliceLayout(1, SCORES))
        inner = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, SCORES)), 0)
        keys = gl.load(ring_k + gl.expand_dims(row_of_age(start, committed, age, ring_len), 1) * K + inner,
                       mask=gl.expand_dims(age < rows, 1), other=0.0)
        gates, oldest, betas = load_ring_gates(
            ring_g, ring_beta, cols, inner, age, offs_h, mask_h, start, rows, False if CHUNK else flush, ring_len,
            stride_rg_head, stride_rb_head, BLOCK_L, K, KDA, HEADS)
        fetch_first(smem.index(0), u_smem.index(0), state, gl.where(flush, ring_v + first_col, ring_u), begin, start,
                    committed, ring_len, stride_state_head, gl.where(flush, stride_rv_head, stride_ru_head), K, V,
                    BLOCK_V, BLOCK_L, EARLY, flush if CHUNK else False)
        if not flush:
            fetch_more(smem, u_smem, state, ring_u, start, committed, ring_len, stride_state_head, stride_ru_head, K, V,
                       BLOCK_V, BLOCK_L, NUM_TILES, STAGES)
        k_at, q_at, seen_k_at, seen_q_at, through_at = token_space(K, PAD_HEADS, BLOCK_L)
        keys = keys.to(gl.float32)
        inverse = inverse_norm(keys, 1, NORM)
        if flush:
            keep_decay(decay, k_now, q_now, k_at, q_at, through_at, KDA, HEADS)
            if not CHUNK:
                keep_rows(keys, inverse, gates, betas, keys_at, gates_at, seen_k_at, seen_q_at, K, BLOCK_L, PAD_HEADS,
                          KDA)
        else:
            score(keys, inverse, gates, oldest, decay, k_now, q_now, committed, k_at, q_at, seen_k_at, seen_q_at,
                  through_at, BLOCK_L, PAD_HEADS, KDA, SCORES, HEADS)
        new = wrap(start + committed, ring_len)
        if (begin == 0) & flush if LATE else begin == 0:
            append_row(v_raw, k_raw, decay, b, ring_v, ring_k, ring_g, ring_beta, new, cols, line_head, line_col,
                       offs_h, mask_h, first_tile, stride_rv_head, stride_rg_head, stride_rb_head, K, V, PER_HEAD, KDA)
        barrier()

        out += first_col
        if flush:
            if CHUNK:
                flush_chunks(
                    smem, u_smem.index(0), k_at, q_at, v_at, through_at, beta_at, state, ring_k,
                    ring_v + first_col, ring_g, ring_beta, ring_u, out, kq, start, committed, new, ring_len,
                    stride_state_head, stride_rv_head, stride_ru_head, stride_rg_head, stride_rb_head,
                    stride_out_head, K, V, BLOCK_V, BLOCK_L, NUM_TILES, STAGES, PAD_HEADS, KDA, NORM, begin, end)
            else:
                flush_tiles(
                    smem.index(0), u_smem.index(0), keys_at, values_at, gates_at, seen_k_at, seen_q_at, k_at, q_at,
                    v_at, through_at, beta_at, state, ring_v + first_col, ring_u, out, kq, start, committed, new,
                    ring_len, stride_state_head, stride_rv_head, stride_ru_head, stride_out_head, K, V, BLOCK_V,
                    BLOCK_L, NUM_TILES, PAD_HEADS, KDA, TILE, VALUES, begin, end)
        else:
            kept_u, kept_out = late_space(ring_u, out, NUM_TILES * BLOCK_V, LATE)
            if MMA:
                read_tiles_16(
                    smem, u_smem, k_at, q_at, v_at, seen_k_at, seen_q_at, through_at, beta_at, state, ring_u, out, kq,
                    start, committed, new, ring_len, stride_state_head, stride_ru_head, stride_out_head, K, V, BLOCK_V,
                    BLOCK_L, NUM_TILES, STAGES, PAD_HEADS, kept_u, kept_out, LATE)
            else:
                read_tiles(
                    smem, u_smem, k_at, q_at, v_at, seen_k_at, seen_q_at, through_at, beta_at, state, ring_u, out, kq,
                    start, committed, new, ring_len, stride_state_head, stride_ru_head, stride_out_head, K, V, BLOCK_V,
                    BLOCK_L, NUM_TILES, STAGES, PAD_HEADS, TILE, VALUES, kept_u, kept_out, LATE)
            if LATE:
                write_kept(kept_u, kept_out, ring_u - first_col, out - first_col, line_head, line_col, new,
                           stride_ru_head, stride_out_head, V)
                append_row(
                    v_raw, k_raw, decay, b, ring_v, ring_k, ring_g, ring_beta, new, cols, line_head, line_col, offs_h,
                    mask_h, first_tile, stride_rv_head, stride_rg_head, stride_rb_head, K, V, PER_HEAD, KDA)
