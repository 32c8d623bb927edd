"""Mamba-2, a window of tokens of every row in one launch, for NVIDIA GPUs: the tensor cores serve what is only read.

A program streams tiles of the checkpoint through shared memory and multiplies each by the C of all tokens at once. The
recurrence touches the tensor cores only beside a 16-bit checkpoint, in products that are accurate to fp32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.ops.gluon_chunk import num_parts
from replayssm.ops.gluon_flushers import is_taken
from replayssm.ops.gluon_window_parts import columns_shared, mma_layout, product, row_ptrs, state_shared, wrap
from replayssm.ops.mamba2.gluon_append import append_window
from replayssm.ops.mamba2.gluon_chunk_replay import replay_chunk, stage_chunk
from replayssm.ops.mamba2.gluon_early import give_hints
from replayssm.ops.mamba2.gluon_layouts import heads_by_row_layout, tile_mma_layout, tile_shared
from replayssm.ops.mamba2.gluon_names import view
from replayssm.ops.mamba2.gluon_replayed import load_replayed, load_replayed_x
from replayssm.ops.mamba2.gluon_window_flush import replay_tile, stage_rows, store_tile
from replayssm.ops.mamba2.gluon_window_grid import place_in_grid, share_of_window
from replayssm.ops.mamba2.gluon_window_tiles import (
    append_x,
    blocks_of,
    fetch_rows,
    for_all_heads,
    load_x,
    store_outputs,
    tile_at,
    tile_outputs_layout,
    tile_rows_layout,
    zero_outputs,
)
from replayssm.ops.mamba2.gluon_window_weights import fill_tables, row_dt


@gluon.jit(do_not_specialize=["num_rows", "num_slots", "buffer_len", "pad_slot_id"])
def mamba2_window_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, state_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr,
    cursors_ptr, slot_indices_ptr, query_start_loc_ptr, parents_ptr, out_ptr,
    num_rows, num_slots, buffer_len, pad_slot_id,
    x_token, x_head, dt_token, dt_head, B_token, B_group, C_token, C_group, z_token, z_head, out_token, out_head,
    chunks_state_slot, chunks_state_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot,
    ring_dt_head,
    H: gl.constexpr, G: gl.constexpr, P: gl.constexpr, N: gl.constexpr, R: gl.constexpr,
    HW: gl.constexpr, BV: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr, SETTLE: gl.constexpr,
    HINT: gl.constexpr, EARLY: gl.constexpr, FLUSHERS: gl.constexpr, APPENDERS: gl.constexpr,
    CHUNKED: gl.constexpr, ROWS: gl.constexpr, FLUSH_ROWS: gl.constexpr, TOKENS: gl.constexpr, TREE: gl.constexpr,
    HAS_D: gl.constexpr, HAS_Z: gl.constexpr, HAS_BIAS: gl.constexpr, SOFTPLUS: gl.constexpr,
):  # fmt: skip
    """One program: TILES tiles, of HW heads of BV V-rows, of one batch row and group; or a share of that."""
    WARPS: gl.constexpr = gl.num_warps()
    ACT: gl.constexpr = x_ptr.dtype.element_ty
    STATE: gl.constexpr = state_ptr.dtype.element_ty
    CHUNK: gl.constexpr = 128 // STATE.primitive_bitwidth
    # Tiles run over the V-rows of a block of HW heads, then over the blocks of a group.
    PER_BLOCK: gl.constexpr = P // BV
    CHUNKS: gl.constexpr = H // G // HW * PER_BLOCK // TILES
    BLOCKS: gl.constexpr = blocks_of(TILES, PER_BLOCK)
    HEADS: gl.constexpr = BLOCKS * HW
    PER_ROW: gl.constexpr = CHUNKS * G
    MMA: gl.constexpr = tile_mma_layout(HW, WARPS)
    SCORE: gl.constexpr = mma_layout(WARPS)
    # k_width: 16-byte accesses along K; both operands of a product permute K alike.
    LS: gl.constexpr = gl.DotOperandLayout(0, MMA, CHUNK)
    LC: gl.constexpr = gl.DotOperandLayout(1, MMA, CHUNK)
    LX: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    LW: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    LB: gl.constexpr = gl.DotOperandLayout(0, SCORE, CHUNK)
    LC1: gl.constexpr = gl.DotOperandLayout(1, SCORE, CHUNK)
    LH: gl.constexpr = heads_by_row_layout(WARPS)
    L3: gl.constexpr = tile_rows_layout(BV, HW, WARPS)
    LOUT: gl.constexpr = tile_outputs_layout(TOKENS, HW, WARPS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    row, part = place_in_grid(PER_ROW, TILES, FLUSHERS)
    if HINT > 0:
        if (row >= 0) & (row < num_rows):
            hint_g = (part // CHUNKS).to(gl.int64)
            _, hint_h, hint_v = tile_at(part % CHUNKS * TILES, PER_BLOCK, HW, BV)
            give_hints(
                state_ptr, ring_x_ptr, ring_B_ptr, cursors_ptr, slot_indices_ptr + row, num_slots,
                hint_g * (H // G) + hint_h, hint_v, hint_g, gl.to_tensor(chunks_state_slot).to(gl.int64) * CHUNK,
                gl.to_tensor(chunks_state_head).to(gl.int64) * CHUNK, ring_x_slot, ring_x_head, ring_B_slot,
                ring_B_group, P, N, R, HW, TILES * BV, HINT,
            )  # fmt: skip
    gdc_wait()
    if APPENDERS > 0:
        if row >= num_rows:
            gdc_launch_dependents()
            item = gl.program_id(0) - (FLUSHERS * TILES + num_rows) * PER_ROW
            append_window(
                item // APPENDERS, item % APPENDERS, x_ptr, dt_ptr, B_ptr, dt_bias_ptr, ring_x_ptr, ring_B_ptr,
                ring_dt_ptr, cursors_ptr, slot_indices_ptr, query_start_loc_ptr, num_slots, pad_slot_id, x_token,
                x_head, dt_token, dt_head, B_token, B_group, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group,
                ring_dt_slot, ring_dt_head, H, G, P, N, R, H // APPENDERS, TOKENS, HAS_BIAS, SOFTPLUS,
            )  # fmt: skip
            return
    row, part, begin, end, flushes_only = share_of_window(
        row, part, slot_indices_ptr, query_start_loc_ptr, cursors_ptr, num_rows, num_slots, pad_slot_id, buffer_len,
        PER_ROW, TILES, FLUSHERS, SETTLE,
    )  # fmt: skip
    if row >= num_rows:
        return
    g = (part // CHUNKS).to(gl.int64)
    slot = gl.load(slot_indices_ptr + row)
    first = gl.load(query_start_loc_ptr + row)
    length = gl.load(query_start_loc_ptr + row + 1) - first
    first = first.to(gl.int64)
    # Tiles, heads and V-rows count from the first block of heads that the program touches.
    first_block, first_h, skipped = part % CHUNKS * TILES // PER_BLOCK, g * (H // G), part % CHUNKS * TILES % PER_BLOCK
    first_h += first_block * HW
    begin += skipped
    end += skipped
    out_ptr += first * out_token + first_h * out_head
    if (slot == pad_slot_id) | (slot < 0) | (slot >= num_slots):
        zero_outputs(out_ptr, length, begin, end, out_token, out_head, PER_BLOCK, HW, BV)
        return
    base = slot.to(gl.int64)
    start = gl.load(cursors_ptr + base * 4)
    committed = gl.load(cursors_ptr + base * 4 + 1)
    limit = gl.load(cursors_ptr + base * 4 + 2)
    tiles = gl.allocate_shared_memory(STATE, [STAGES, HW * BV, N], state_shared(STATE.primitive_bitwidth))
    state_head = gl.to_tensor(chunks_state_head).to(gl.int64) * CHUNK
    state_ptr += (base * chunks_state_slot + first_h * chunks_state_head) * CHUNK
    # The ring's rows must not queue behind more than this before the cursors are known.
    _, h, v = tile_at(begin, PER_BLOCK, HW, BV)
    if EARLY > 0:
        fetch_rows(tiles.index(0).slice(0, EARLY), state_ptr + h * state_head + v * N, state_head, N, BV, 0, EARLY)

    # Everything the tiles share.
    k = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(1, LC1)), 1)
    t = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, LC1)), 0)
    C = gl.load(C_ptr + first * C_token + g * C_group + t * C_token + k, mask=t < length, other=0.0)
    flush = (committed > 0) & (committed + length > gl.minimum(limit, buffer_len))
    idle = (length == 0) & (not flush)
    if FLUSHERS > 0:
        if flush & (not flushes_only):
            idle = is_taken(
                row, slot_indices_ptr, query_start_loc_ptr, cursors_ptr, num_rows, num_slots, pad_slot_id, buffer_len,
                FLUSHERS, True,
            )  # fmt: skip
    if idle:
        async_copy.commit_group()
        async_copy.wait_group(0)
        return
    count = gl.where(flush, 0, committed) + length
    replayed = gl.where(flush, committed, 0)
    last = start + committed + length - 1
    ring_x_ptr += base * ring_x_slot + first_h * ring_x_head
    ring_B_ptr += base * ring_B_slot + g * ring_B_group
    ring_dt_ptr += base * ring_dt_slot + first_h * ring_dt_head
    x_ptr += first * x_token + first_h * x_head
    B_ptr += first * B_token + g * B_group
    dt_ptr += first * dt_token + first_h * dt_head
    age = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LB))
    kb = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, LB)), 0)
    B_rows = row_ptrs(B_ptr, ring_B_ptr, age, length, count, start, B_token, N, R)
    B = gl.load(gl.expand_dims(B_rows, 1) + kb, mask=gl.expand_dims(age < count, 1), other=0.0)
    x_new, x_old = x_ptr + (h * x_head + v), ring_x_ptr + (h * ring_x_head + v)
    x = load_x(x_new, x_old, x_token, x_head, ring_x_head, start, length, count, P, R, ROWS, HW, BV, L3)
    age_h = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LH))
    h_of = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, LH)), 1)
    # Heads in blocks that the program touches; it appends those of whose tiles it has the first.
    num_heads = (TILES + skipped + PER_BLOCK - 1) // PER_BLOCK * HW
    mask_of = h_of < num_heads
    bias = gl.load(dt_bias_ptr + first_h + h_of, mask=mask_of, other=0.0).to(gl.float32) if HAS_BIAS else 0.0
    dt_ptrs, ring_dt_ptrs = dt_ptr + h_of * dt_head, ring_dt_ptr + h_of * ring_dt_head
    dt = row_dt(dt_ptrs, ring_dt_ptrs, bias, age_h, length, count, start, dt_token, mask_of, R, SOFTPLUS)
    dt_before = row_dt(dt_ptrs, ring_dt_ptrs, bias, age_h - 1, length, count, start, dt_token, mask_of, R, SOFTPLUS)
    x_f = load_replayed_x(x_old, ring_x_head, start, replayed, P, R, FLUSH_ROWS, HW, BV)
    for s in gl.static_range(STAGES):
        if s == 0:
            if EARLY < HW * BV:
                fetch_rows(tiles.index(0), state_ptr + h * state_head + v * N, state_head, N, BV, EARLY, HW * BV)
        elif begin + s < end:
            _, h, v = tile_at(begin + s, PER_BLOCK, HW, BV)
            fetch_rows(tiles.index(s), state_ptr + h * state_head + v * N, state_head, N, BV, 0, HW * BV)
        async_copy.commit_group()
    if CHUNKED:
        staged_B = gl.allocate_shared_memory(gl.bfloat16, [num_parts(ACT), N, FLUSH_ROWS], PLAIN)
        staged_a = gl.allocate_shared_memory(gl.float32, [BLOCKS, HW], FLAT)
    else:
        staged_B = gl.allocate_shared_memory(gl.float32, [FLUSH_ROWS, N], FLAT)
        staged_a = gl.allocate_shared_memory(gl.float32, [BLOCKS * FLUSH_ROWS, HW], FLAT)
    staged_dt = gl.allocate_shared_memory(gl.float32, [BLOCKS, FLUSH_ROWS, HW], PLAIN)
    if flush:
        B_old, dt_old, dt_after = load_replayed(
            ring_B_ptr, ring_dt_ptrs, mask_of, start, committed, N, R, FLUSH_ROWS, LH
        )
        A_old = gl.load(A_ptr + first_h + h_of, mask=mask_of, other=0.0)
        if CHUNKED:
            stage_chunk(staged_B, staged_dt, staged_a, B_old, dt_old, dt_after, A_old)
        else:
            stage_rows(staged_B, staged_dt, staged_a, B_old, dt_old, A_old)

    # Scores of all rows and tokens, once for all heads of the group.
    x_at = gl.allocate_shared_memory(ACT, [HW, ROWS, BV], gl.SwizzledSharedLayout(8, 1, min(8, BV // 8), [2, 1, 0]))
    score_at = gl.allocate_shared_memory(gl.float32, [ROWS, TOKENS], PLAIN)
    weight_at = gl.allocate_shared_memory(gl.float32, [HEADS, TOKENS, ROWS], PLAIN)
    scale_at = gl.allocate_shared_memory(gl.float32, [HEADS, TOKENS], FLAT)
    dt_at = gl.allocate_shared_memory(gl.float32, [2, HEADS, ROWS], PLAIN)
    C_at = gl.allocate_shared_memory(ACT, [TOKENS, N], columns_shared(CHUNK))
    C_at.permute((1, 0)).store(C)
    dt_at.index(0).store(dt)
    dt_at.index(1).store(dt_before)
    score_at.store(mma_v2(B, C, gl.zeros([ROWS, TOKENS], gl.float32, layout=SCORE)))
    fill_tables(
        weight_at, scale_at, score_at, dt_at, A_ptr + first_h, D_ptr + first_h, parents_ptr + first, length, count,
        num_heads, 1, HEADS, ROWS, TOKENS, TREE, HAS_D,
    )  # fmt: skip
    if APPENDERS == 0:
        # x follows tile by tile.
        mine = mask_of & (h_of // HW * PER_BLOCK >= skipped) & (begin == skipped)
        gl.store(
            ring_dt_ptrs + gl.expand_dims(wrap(last - age_h, R), 0), dt, mask=mine & gl.expand_dims(age_h < length, 0)
        )
        if (part % CHUNKS == 0) & (begin == 0):
            B_end = ring_B_ptr + (gl.expand_dims(wrap(last - age, R) * N, 1) + kb)
            gl.store(B_end, B, mask=gl.expand_dims(age < length, 1))
    gdc_launch_dependents()

    staged_x = gl.allocate_shared_memory(gl.float32, [FLUSH_ROWS, HW, BV], PLAIN)
    z_ptr += first * z_token + first_h * z_head
    weights = view(weight_at, [BLOCKS, HW, TOKENS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    scales = view(scale_at, [BLOCKS, HW, TOKENS], PLAIN)
    for i in range(begin, end):
        block, h, v = tile_at(i, PER_BLOCK, HW, BV)
        _, next_h, next_v = tile_at(i + 1, PER_BLOCK, HW, BV)
        x_at.store(x)
        if APPENDERS == 0:
            append_x(x, ring_x_ptr + (h * ring_x_head + v), ring_x_head, last, length, P, R, HW, BV)
        x_f_now = x_f
        if i + 1 < end:
            x_new, x_old = x_ptr + (next_h * x_head + next_v), ring_x_ptr + (next_h * ring_x_head + next_v)
            x = load_x(x_new, x_old, x_token, x_head, ring_x_head, start, length, count, P, R, ROWS, HW, BV, L3)
            x_f = load_replayed_x(x_old, ring_x_head, start, replayed, P, R, FLUSH_ROWS, HW, BV)
        rows = tiles.index((i - begin) % STAGES)
        tile = view(rows, [HW, BV, N], tile_shared(STATE.primitive_bitwidth))
        tile_ptr = state_ptr + h * state_head + v * N
        async_copy.wait_group(STAGES - 1)
        if CHUNKED:
            if flush:
                replay_chunk(tile, x_f_now, staged_x, staged_B, staged_dt, staged_a, block, tile_ptr, state_head, MMA)
        S = tile.load(LS)
        if TILES > STAGES:
            if i + STAGES < end:
                _, to_h, to_v = tile_at(i + STAGES, PER_BLOCK, HW, BV)
                fetch_rows(rows, state_ptr + to_h * state_head + to_v * N, state_head, N, BV, 0, HW * BV)
        async_copy.commit_group()
        if not CHUNKED:
            if flush:
                S = replay_tile(S, x_f_now, staged_x, staged_B, staged_dt, staged_a, block, committed).to(STATE)
                store_tile(S, tile_ptr, state_head)
        C_t = for_all_heads(C_at.permute((1, 0)).load(gl.SliceLayout(0, LC)), HW, LC)
        y = product(S, C_t, gl.zeros([HW, BV, TOKENS], gl.float32, layout=MMA), ACT)
        y *= gl.expand_dims(scales.index(block).load(gl.SliceLayout(1, MMA)), 1)
        x_t = x_at.permute((0, 2, 1)).load(LX).to(gl.float32)
        y = mma_v2(x_t, weights.index(block).permute((0, 2, 1)).load(LW), y, input_precision="tf32")
        store_outputs(
            gl.convert_layout(y, LOUT), out_ptr + (h * out_head + v), z_ptr + (h * z_head + v), out_token, out_head,
            z_token, z_head, length, HAS_Z,
        )  # fmt: skip
