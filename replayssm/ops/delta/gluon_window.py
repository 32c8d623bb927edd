"""GDN and KDA, a window of tokens of every row in one launch, for NVIDIA GPUs.

A program streams tiles of the checkpoint through shared memory and multiplies each by the k and q of all tokens at
once on the tensor cores; the window's triangular system is solved by forward substitution in registers. Columns are the
tokens' k, then their q. Whatever can be is asked of memory before anything waits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.ops.delta.gluon_common import sigmoid
from replayssm.ops.delta.gluon_early import give_hints
from replayssm.ops.delta.gluon_window_channels import (
    append_channels,
    channel_decays,
    channel_space,
    load_gates,
    load_new_channels,
    stage_channels,
)
from replayssm.ops.delta.gluon_window_fold import chunk_width
from replayssm.ops.delta.gluon_window_gdn import (
    decays,
    load_new_gates,
    load_old_beta,
    load_old_gates,
    weigh_ring,
    weigh_window,
)
from replayssm.ops.delta.gluon_window_kda_tables import channel_tables
from replayssm.ops.delta.gluon_window_loop import run_tiles
from replayssm.ops.delta.gluon_window_place import is_elsewhere, take_place
from replayssm.ops.delta.gluon_window_prepare import prepare_channel_fold, prepare_fold, prepare_replay
from replayssm.ops.delta.gluon_window_rows import append_keys, gates_layout, load_columns, load_keys
from replayssm.ops.delta.gluon_window_solve import solution_shared, stage_solution
from replayssm.ops.delta.gluon_window_tile import fetch_rows, raw_columns_shared, start_tiles, tile_of
from replayssm.ops.gluon_chunk import rows_shared
from replayssm.ops.gluon_window_parts import columns_shared, mma_layout, state_shared, wrap, zero_rows
from replayssm.ops.mamba2.gluon_names import view


@gluon.jit(do_not_specialize=["num_slots", "ring_len", "buffer_len", "pad_slot_id"])
def delta_window_kernel(
    q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices,
    query_start_loc, parents, out,
    num_slots, ring_len, buffer_len, pad_slot_id, scale, lower_bound,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, stride_out_token, stride_out_head,
    chunks_state_slot, chunks_state_head, stride_rk_slot, stride_rk_head, stride_rv_slot, stride_rv_head,
    stride_ru_slot, stride_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head,
    HV: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    BLOCK_V: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr, SETTLE: gl.constexpr, HINT: gl.constexpr,
    EARLY: gl.constexpr, FLUSHERS: gl.constexpr, CHUNK: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    WINDOW: gl.constexpr, TREE: gl.constexpr, KDA: gl.constexpr, RAW: gl.constexpr, HAS_BIAS: gl.constexpr,
    BOUNDED: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """One program: TILES tiles of BLOCK_V rows of the v-heads of one batch row and k-head."""
    WARPS: gl.constexpr = gl.num_warps()
    ACT: gl.constexpr = q.dtype.element_ty
    STATE: gl.constexpr = state.dtype.element_ty
    BITS: gl.constexpr = STATE.primitive_bitwidth
    PER_HEAD: gl.constexpr = V // BLOCK_V
    CHUNKS: gl.constexpr = GROUP * PER_HEAD // TILES
    HEADS: gl.constexpr = (TILES + PER_HEAD - 1) // PER_HEAD
    HK: gl.constexpr = HV // GROUP
    COLUMNS: gl.constexpr = 2 * TOKENS
    MMA: gl.constexpr = mma_layout(WARPS)
    READ: gl.constexpr = gl.float32 if KDA else ACT
    LB: gl.constexpr = gates_layout(WARPS)
    # KDA folds a tile chunk by chunk.
    WIDTH: gl.constexpr = chunk_width(BITS) if KDA and CHUNK else K
    NC: gl.constexpr = K // WIDTH
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if HINT > 0:
        place = gl.program_id(0) - FLUSHERS * TILES * CHUNKS * HK
        if place >= 0:
            give_hints(
                state, ring_k, ring_u, cursors, slot_indices + place // (CHUNKS * HK), num_slots, ring_len,
                place % CHUNKS * TILES, place % (CHUNKS * HK) // CHUNKS, chunks_state_slot, chunks_state_head,
                stride_rk_slot, stride_rk_head, stride_ru_slot, stride_ru_head, GROUP, K, V, BLOCK_V, TILES, PER_HEAD,
                HEADS, HINT,
            )  # fmt: skip
    gdc_wait()
    row, part, begin, end, flushes_only, num_rows = take_place(
        slot_indices, query_start_loc, cursors, num_slots, pad_slot_id, buffer_len, CHUNKS * HK, TILES, FLUSHERS, SETTLE
    )
    if FLUSHERS > 0:
        if row >= num_rows:
            return
    chunk = part % CHUNKS
    k_head = (part // CHUNKS).to(gl.int64)
    slot = gl.load(slot_indices + row).to(gl.int64)
    first = gl.load(query_start_loc + row)
    length = gl.load(query_start_loc + row + 1) - first
    first = first.to(gl.int64)
    head = k_head * GROUP + chunk * TILES // PER_HEAD
    first_v = chunk * TILES % PER_HEAD * BLOCK_V
    out += first * stride_out_token + head * stride_out_head
    if (slot == pad_slot_id) | (slot < 0) | (slot >= num_slots):
        zero_rows(out, length, chunk * TILES, stride_out_token, stride_out_head, BLOCK_V, TILES, PER_HEAD)
        return
    start = gl.load(cursors + slot * 4)
    committed = gl.load(cursors + slot * 4 + 1)
    limit = gl.load(cursors + slot * 4 + 2)
    tiles = gl.allocate_shared_memory(STATE, [STAGES * NC, BLOCK_V, WIDTH], state_shared(BITS))
    VALUES: gl.constexpr = gl.SwizzledSharedLayout(8, 1, min(8, BLOCK_V // 8), order=[1, 0])
    values_at = gl.allocate_shared_memory(ACT, [STAGES + 1, ROWS, BLOCK_V], VALUES)
    # Of twice as many rows as there are tokens, since as many columns are read.
    NEW: gl.constexpr = gl.SwizzledSharedLayout(8, 1, min(TOKENS, BLOCK_V // 8), order=[1, 0])
    v_at = gl.allocate_shared_memory(ACT, [STAGES + 1, 2 * TOKENS, BLOCK_V], NEW)
    kept_at = gl.allocate_shared_memory(ACT, [2 * TOKENS, BLOCK_V], VALUES)
    # Strides of the state come in 16-byte chunks, which proves its alignment.
    stride_state_head = chunks_state_head * (128 // BITS)
    state += (slot * chunks_state_slot + head * chunks_state_head) * (128 // BITS) + first_v * K
    # The ring's rows must not queue behind more than this before the cursors are known.
    first_state = state + (begin // PER_HEAD * stride_state_head + begin % PER_HEAD * (BLOCK_V * K))
    if EARLY > 0:
        fetch_rows(tile_of(tiles, 0, NC), first_state, 0, EARLY, K)
    v += first * stride_v_token + head * stride_v_head + first_v
    columns = load_columns(
        q + first * stride_q_token + k_head * stride_q_head, k + first * stride_k_token + k_head * stride_k_head,
        length, stride_q_token, stride_k_token, K, TOKENS,
    )  # fmt: skip
    b_head = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, LB)), 1)
    b_token = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, LB)), 0)
    beta += first * stride_beta_token + head * stride_beta_head
    b = gl.load(beta + b_head * stride_beta_head + b_token * stride_beta_token, mask=b_token < length, other=0.0)
    g += first * stride_g_token + head * stride_g_head
    if KDA:
        new, a_log, bias = load_new_channels(
            g, A_log + head, dt_bias + head * K, length, stride_g_token, K, TOKENS, RAW, HAS_BIAS
        )
    else:
        new, a_log, bias = load_new_gates(
            g, A_log + head, dt_bias + head, length, stride_g_token, stride_g_head, HEADS, TOKENS, RAW, HAS_BIAS
        )

    flush = (committed > 0) & (committed + length > gl.minimum(limit, buffer_len))
    # The ring's rows too before anything branches or waits: behind it the compiler would let them wait for each other.
    fresh = start + committed
    ring_k += slot * stride_rk_slot + k_head * stride_rk_head
    ring_v += slot * stride_rv_slot + head * stride_rv_head + first_v
    ring_u += slot * stride_ru_slot + head * stride_ru_head + first_v
    ring_g += slot * stride_rg_slot + head * stride_rg_head
    ring_beta += slot * stride_rb_slot + head * stride_rb_head
    keys = load_keys(ring_k, start, committed, ring_len, K, ROWS)
    # The rows' u where they are read, their v where they are replayed.
    old = gl.where(flush, ring_v, ring_u)
    stride_old_head = gl.where(flush, stride_rv_head, stride_ru_head)
    if KDA:
        gates = load_gates(ring_g, start, committed, ring_len, K, ROWS)
    else:
        own, younger = load_old_gates(ring_g, start, committed, ring_len, stride_rg_head, HEADS, ROWS)
    b_old = load_old_beta(ring_beta, start, committed, ring_len, stride_rb_head, HEADS, ROWS)
    idle = (length == 0) & (not flush)
    if is_elsewhere(
        row, num_rows, flush, flushes_only, slot_indices, query_start_loc, cursors, num_slots, pad_slot_id, buffer_len,
        FLUSHERS,
    ):  # fmt: skip
        idle = True
    if idle:
        async_copy.commit_group()
        async_copy.wait_group(0)
        return
    start_tiles(
        (tiles, values_at, v_at), (state, old, v), first_state, begin, end, start, committed, length, ring_len,
        stride_state_head, stride_old_head, stride_v_token, stride_v_head, EARLY, K, V,
    )  # fmt: skip

    score_at = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], PLAIN)
    coef_at = gl.allocate_shared_memory(gl.float32, [TOKENS * HEADS, COLUMNS], FLAT)
    beta_at = gl.allocate_shared_memory(gl.float32, [TOKENS, HEADS], FLAT)
    scale_at = gl.allocate_shared_memory(gl.float32, [HEADS, COLUMNS], FLAT)
    fade_at = gl.allocate_shared_memory(gl.float32, [HEADS, ROWS], FLAT)
    grown_at = gl.allocate_shared_memory(gl.float32, [HEADS, ROWS], FLAT)
    through_at = gl.allocate_shared_memory(gl.float32, [HEADS, 1], FLAT)
    solution_at = gl.allocate_shared_memory(gl.bfloat16, [2 * HEADS, 4 * TOKENS, COLUMNS], solution_shared(COLUMNS))
    if KDA:
        space = channel_space(ROWS, K)
        plain_at = gl.allocate_shared_memory(gl.float32, [COLUMNS * K], FLAT)
        stage_channels(space, plain_at, keys, gates, columns, NORM)
    b = b.to(gl.float32)
    if RAW:
        b = gl.where(b_token < length, sigmoid(b), 0.0)
    view(beta_at, [TOKENS, HEADS], PLAIN).permute((1, 0)).store(b)
    # Of the window's rows, those that all V-rows share are appended once; u and v go with the tiles.
    skipped = gl.where(begin == 0, gl.where(first_v == 0, 0, 1), HEADS)
    mine = (b_head >= skipped) & (b_token < length)
    gl.store(ring_beta + b_head * stride_rb_head + wrap(fresh + b_token, ring_len), b, mask=mine)
    if (chunk == 0) & (begin == 0):
        append_keys(ring_k, columns, fresh, length, ring_len, K, TOKENS)
    if KDA:
        new = channel_decays(new, a_log, bias, length, lower_bound, RAW, BOUNDED)
        if skipped == 0:
            append_channels(ring_g, new, fresh, length, ring_len)
        columns_at = gl.allocate_shared_memory(READ, [NC, COLUMNS, WIDTH], columns_shared(128 // BITS))
        channel_tables(
            space, plain_at, columns_at, score_at, coef_at, new, parents + first, length, flush, scale, ROWS, TOKENS,
            TREE, NORM,
        )  # fmt: skip
    else:
        new = decays(new, a_log, bias, length, lower_bound, TOKENS, RAW, BOUNDED)
        gl.store(ring_g + b_head * stride_rg_head + wrap(fresh + b_token, ring_len), new, mask=mine)
        raw_columns_at = gl.allocate_shared_memory(ACT, [16, K], rows_shared())
        norm_at = gl.allocate_shared_memory(gl.float32, [ROWS + 16], FLAT)
        weigh_window(
            columns, raw_columns_at, norm_at, coef_at, scale_at, new, parents + first, length, scale, HEADS, ROWS,
            TOKENS, TREE, WINDOW, NORM, 128 // BITS,
        )  # fmt: skip
        columns_at = gl.allocate_shared_memory(READ, [NC, COLUMNS, WIDTH], raw_columns_shared(BITS))
        columns_at.index(0).store(columns)
    stage_solution(coef_at, beta_at, scale_at, solution_at, HEADS, TOKENS, WINDOW, not KDA)
    if not KDA:
        raw_at = gl.allocate_shared_memory(ACT, [ROWS, K], rows_shared())
        weigh_ring(
            keys, raw_at, raw_columns_at, norm_at, score_at, fade_at, through_at, own, younger, committed, HEADS,
            TOKENS, NORM, 128 // BITS,
        )  # fmt: skip
    gdc_launch_dependents()
    rings = (ring_k, ring_g, ring_beta, start, committed, ring_len, stride_rg_head, stride_rb_head)
    if not CHUNK:
        folding = prepare_replay(rings, flush, HEADS, K, ROWS, KDA, NORM)
    elif KDA:
        folding = prepare_channel_fold(space, b_old, flush, committed, ROWS, K, 128 // BITS)
    else:
        folding = prepare_fold((raw_at, norm_at, keys, own, b_old), grown_at, flush, HEADS, 128 // BITS)
    tables = (columns_at, solution_at, fade_at, through_at)
    weight = score_at.load(gl.DotOperandLayout(1, MMA, 2))
    memory = (tiles, values_at, v_at, kept_at)
    places = (state, old, v, ring_v, ring_u, out + first_v)
    strides = (
        stride_state_head, stride_old_head, stride_v_token, stride_v_head, stride_rv_head, stride_ru_head,
        stride_out_token, stride_out_head,
    )  # fmt: skip
    # Two loops, so that what a flush needs takes no registers from those who read.
    if flush:
        run_tiles(
            memory, weight, tables, folding, places, strides, begin, end, start, committed, length, ring_len, HEADS, K,
            V, ROWS, TOKENS, True, CHUNK, KDA,
        )  # fmt: skip
    else:
        run_tiles(
            memory, weight, tables, folding, places, strides, begin, end, start, committed, length, ring_len, HEADS, K,
            V, ROWS, TOKENS, False, CHUNK, KDA,
        )  # fmt: skip
