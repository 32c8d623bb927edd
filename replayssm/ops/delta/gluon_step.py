"""One-token step for NVIDIA GPUs: a program streams the state tiles of one row and k-head through shared memory.

What the tiles share (scores of the ring rows, gates, norms) is computed once, while the first tiles travel.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.ops.gluon_flushers import is_taken, share_of_work
from replayssm.ops.gluon_window_parts import state_shared

from .gluon_common import barrier, inverse_norm, log_decay, row_of_age, sigmoid, table, wrap
from .gluon_early import give_hints
from .gluon_layouts import keys_layout, scores_layout, tile_layout, tile_shared, values_layout, values_shared
from .gluon_read16 import read_tiles_16
from .gluon_schedule import place
from .gluon_scores import (
    keep_flush,
    load_scalar,
    load_scalar_gate,
    load_vector,
    load_vector_gate,
    score_scalar,
    score_vector,
)
from .gluon_space import flush_space
from .gluon_tiles import append_row, fetch, fetch_rows, flush_tiles, read_tiles


@gluon.jit(do_not_specialize=["num_slots", "ring_len", "buffer_len", "pad_slot_id"])
def delta_step_kernel(
    q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices, out,
    num_slots, ring_len, buffer_len, pad_slot_id, scale, lower_bound,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, stride_out_token, stride_out_head,
    chunks_state_slot, chunks_state_head, stride_rk_slot, stride_rk_head, chunks_rv_slot, chunks_rv_head,
    chunks_ru_slot, chunks_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head,
    HV: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr,
    NUM_TILES: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, SETTLE: gl.constexpr,
    INTERLEAVE: gl.constexpr, HINT: gl.constexpr, FLUSHERS: gl.constexpr, TENSOR_CORES: gl.constexpr,
    BLOCK_L: gl.constexpr, KDA: gl.constexpr, RAW: gl.constexpr, HAS_BIAS: gl.constexpr, BOUNDED: gl.constexpr,
    NORM: gl.constexpr,
):
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

    A_ROW: gl.constexpr = CHUNKS * (HV // GROUP)
    if HINT > 0:
        # Without `settle` a program knows its row from its place in the grid alone.
        row, part = place(A_ROW, slot_indices, cursors, num_slots, pad_slot_id, buffer_len, INTERLEAVE, 0)
        give_hints(state, ring_k, ring_u, cursors, slot_indices + row, num_slots, ring_len, part % CHUNKS * NUM_TILES,
                   part // CHUNKS, chunks_state_slot, chunks_state_head, stride_rk_slot, stride_rk_head,
                   chunks_ru_slot * ACT_CHUNK, chunks_ru_head * ACT_CHUNK, GROUP, K, V, BLOCK_V, NUM_TILES, PER_HEAD,
                   NUM_HEADS, HINT)
    gdc_wait()
    gdc_launch_dependents()
    begin = 0
    end = NUM_TILES
    if FLUSHERS > 0:
        num_rows = gl.num_programs(0) // A_ROW - FLUSHERS * NUM_TILES
        row, part, begin, end, flushes_only = share_of_work(
            slot_indices, slot_indices, cursors, num_rows, num_slots, pad_slot_id, buffer_len, A_ROW, NUM_TILES,
            FLUSHERS, False)
        if row >= num_rows:
            return
    else:
        row, part = place(A_ROW, slot_indices, cursors, num_slots, pad_slot_id, buffer_len, INTERLEAVE, SETTLE)
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
    g += token * stride_g_token + head * stride_g_head
    if KDA:
        decay, a_log, bias = load_vector_gate(g, A_log + head, dt_bias + head * K, cols, RAW, HAS_BIAS)
    else:
        decay, a_log, bias = load_scalar_gate(g, A_log + head, dt_bias + head, offs_h, mask_h, stride_g_head, RAW,
                                              HAS_BIAS)
    if (slot == pad_slot_id) | (slot < 0) | (slot >= num_slots):
        gl.store(out + line_head * stride_out_head + line_col,
                 gl.full([NUM_TILES * BLOCK_V], 0.0, out.dtype.element_ty, layout=LINE))
    else:
        SHARED: gl.constexpr = state_shared(BITS) if MMA else tile_shared(BITS, BLOCK_V, WARPS)
        smem = gl.allocate_shared_memory(state.dtype.element_ty, [STAGES, BLOCK_V, K], SHARED)
        u_smem = gl.allocate_shared_memory(ring_u.dtype.element_ty, [STAGES, BLOCK_L, BLOCK_V],
                                           values_shared(ACT_BITS, BLOCK_V, BLOCK_L))
        keys_at, gates_at, values_at = flush_space(smem, ring_v.dtype.element_ty, K, BLOCK_V, BLOCK_L, STAGES, KDA)
        start = gl.load(cursors + slot * 4)
        committed = gl.load(cursors + slot * 4 + 1)
        limit = gl.load(cursors + slot * 4 + 2)
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
        first_state = state + begin // PER_HEAD * stride_state_head + begin % PER_HEAD * (BLOCK_V * K)
        if EARLY > 0:
            fetch_rows(smem.index(0), first_state, 0, EARLY, K)
        # This token, while the cursors are on the way.
        b = b_raw.to(gl.float32)
        if RAW:
            b = sigmoid(b)
            decay = log_decay(decay, a_log, bias, lower_bound, BOUNDED)
        k_now = k_raw.to(gl.float32)
        q_now = q_raw.to(gl.float32)
        k_now = k_now * inverse_norm(k_now, 0, NORM)
        q_now = q_now * (inverse_norm(q_now, 0, NORM) * scale)
        kq = gl.sum(k_now * q_now, axis=0)
        v_at = gl.allocate_shared_memory(v.dtype.element_ty, [NUM_TILES * BLOCK_V], FLAT, v_raw)
        beta_at = gl.allocate_shared_memory(gl.float32, [PAD_HEADS], FLAT, b)
        flush = (committed > 0) & (committed + 1 > gl.minimum(limit, buffer_len))
        if FLUSHERS > 0:
            if flush & (not flushes_only):
                if is_taken(row, slot_indices, slot_indices, cursors, num_rows, num_slots, pad_slot_id, buffer_len,
                            FLUSHERS, False):
                    async_copy.commit_group()
                    async_copy.wait_group(0)
                    return
        # The committed rows, youngest first: a row that reads weighs them, a flushing row replays them.
        age = gl.arange(0, BLOCK_L, layout=gl.SliceLayout(1, SCORES))
        inner = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, SCORES)), 0)
        keys = gl.load(ring_k + gl.expand_dims(row_of_age(start, committed, age, ring_len), 1) * K + inner,
                       mask=gl.expand_dims(age < committed, 1), other=0.0)
        if KDA:
            gates, oldest, betas = load_vector(ring_g, ring_beta, cols, inner, age, start, committed, flush, ring_len,
                                               K)
        else:
            gates, oldest, betas = load_scalar(
                ring_g, ring_beta, offs_h, mask_h,
                gl.expand_dims(gl.arange(0, BLOCK_L, layout=gl.SliceLayout(0, HEADS)), 0), start, committed, flush,
                ring_len, stride_rg_head, stride_rb_head)
        fetch(smem.index(0), u_smem.index(0), state, gl.where(flush, ring_v + first_col, ring_u), begin, start,
              committed, ring_len, stride_state_head, stride_ru_head, K, V, BLOCK_V, BLOCK_L, False, True)
        PIECE: gl.constexpr = EARLY if EARLY > 0 else BLOCK_V
        for first in gl.static_range(EARLY, BLOCK_V, PIECE):
            fetch_rows(smem.index(0), first_state, first, PIECE, K)
        async_copy.commit_group()
        if not flush:
            for t in gl.static_range(1, STAGES):
                if t < NUM_TILES:
                    fetch(smem.index(t), u_smem.index(t), state, ring_u, t, start, committed, ring_len,
                          stride_state_head, stride_ru_head, K, V, BLOCK_V, BLOCK_L, True, True)
                async_copy.commit_group()

        k_at = gl.allocate_shared_memory(gl.float32, [K], FLAT)
        q_at = gl.allocate_shared_memory(gl.float32, [K], FLAT)
        seen_k_at = gl.allocate_shared_memory(gl.float32, [PAD_HEADS * BLOCK_L], FLAT)
        seen_q_at = gl.allocate_shared_memory(gl.float32, [PAD_HEADS * BLOCK_L], FLAT)
        through_at = gl.allocate_shared_memory(gl.float32, [PAD_HEADS], FLAT)
        if not KDA:
            k_at.store(k_now)
            q_at.store(q_now)
        keys = keys.to(gl.float32)
        inverse = inverse_norm(keys, 1, NORM)
        if flush:
            table(keys_at, BLOCK_L, K).store(keys * gl.expand_dims(inverse, 1))
            keep_flush(gates, betas, decay, k_now, q_now, k_at, q_at, gates_at, seen_k_at, seen_q_at, through_at, K,
                       BLOCK_L, PAD_HEADS, KDA)
        elif KDA:
            score_vector(keys, inverse, gates, oldest, decay, k_now, q_now, committed, k_at, q_at, seen_k_at, seen_q_at,
                         BLOCK_L, SCORES)
        else:
            score_scalar(keys, inverse, gates, oldest, decay, committed, k_at, q_at, seen_k_at, seen_q_at, through_at,
                         BLOCK_L, PAD_HEADS, SCORES, HEADS)
        if KDA:
            # Its decay is inside k_at and q_at.
            through_at.store(gl.full([PAD_HEADS], 1.0, gl.float32, layout=gl.SliceLayout(1, HEADS)))

        new = wrap(start + committed, ring_len)
        if begin == 0:
            append_row(v_raw, k_raw, decay, b, ring_v, ring_k, ring_g, ring_beta, new, cols, line_head, line_col,
                       offs_h, mask_h, first_tile, stride_rv_head, stride_rg_head, stride_rb_head, K, V, PER_HEAD, KDA)
        barrier()

        out += first_col
        if flush:
            flush_tiles(smem.index(0), u_smem.index(0), keys_at, values_at, gates_at, seen_k_at, seen_q_at, k_at, q_at,
                        v_at, through_at, beta_at, state, ring_v + first_col, ring_u, out, kq, start, committed, new,
                        ring_len, stride_state_head, stride_rv_head, stride_ru_head, stride_out_head, K, V, BLOCK_V,
                        BLOCK_L, NUM_TILES, PAD_HEADS, KDA, TILE, VALUES, begin, end)
        elif MMA:
            read_tiles_16(smem, u_smem, k_at, q_at, v_at, seen_k_at, seen_q_at, through_at, beta_at, state, ring_u, out,
                          kq, start, committed, new, ring_len, stride_state_head, stride_ru_head, stride_out_head, K, V,
                          BLOCK_V, BLOCK_L, NUM_TILES, STAGES, PAD_HEADS)
        else:
            read_tiles(smem, u_smem, k_at, q_at, v_at, seen_k_at, seen_q_at, through_at, beta_at, state, ring_u, out,
                       kq, start, committed, new, ring_len, stride_state_head, stride_ru_head, stride_out_head, K, V,
                       BLOCK_V, BLOCK_L, NUM_TILES, STAGES, PAD_HEADS, TILE, VALUES)
