"""Mamba-2, a window of tokens of every row in one launch, for NVIDIA GPUs: the tensor cores serve what is only read.

A program streams tiles of the checkpoint through shared memory and multiplies each by the C of all tokens at once. The
recurrence touches the tensor cores only beside a 16-bit checkpoint, in products that are accurate to fp32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.ops.gluon_window_parts import row_ptrs, state_shared, wrap
from replayssm.ops.mamba2.gluon_append import append_window
from replayssm.ops.mamba2.gluon_early import give_hints
from replayssm.ops.mamba2.gluon_layouts import heads_by_row_layout, ring_B_layout
from replayssm.ops.mamba2.gluon_replayed import load_replayed, load_replayed_x, own_rows
from replayssm.ops.mamba2.gluon_window_grid import duties_of, place_in_grid, share_of_window
from replayssm.ops.mamba2.gluon_window_loop import run_tiles
from replayssm.ops.mamba2.gluon_window_prepare import stage_replay, weigh_rows
from replayssm.ops.mamba2.gluon_window_tiles import (
    blocks_of,
    fetch_first,
    fetch_rows,
    load_x,
    tile_at,
    tile_rows_layout,
    zero_outputs,
)
from replayssm.ops.mamba2.gluon_window_weights import load_dt, load_terms, process_dt


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
    STATE: gl.constexpr = state_ptr.dtype.element_ty
    CHUNK: gl.constexpr = 128 // STATE.primitive_bitwidth
    # Tiles run over the V-rows of a block of HW heads, then over the blocks of a group.
    PER_BLOCK: gl.constexpr = P // BV
    CHUNKS: gl.constexpr = H // G // HW * PER_BLOCK // TILES
    BLOCKS: gl.constexpr = blocks_of(TILES, PER_BLOCK)
    HEADS: gl.constexpr = BLOCKS * HW
    PER_ROW: gl.constexpr = CHUNKS * G
    LR: gl.constexpr = ring_B_layout(N, WARPS)
    LH: gl.constexpr = heads_by_row_layout(WARPS)
    L3: gl.constexpr = tile_rows_layout(BV, HW, WARPS)
    row, part = place_in_grid(PER_ROW, TILES, FLUSHERS)
    if HINT > 0:
        if (row >= 0) & (row < num_rows):
            hint_g = (part // CHUNKS).to(gl.int64)
            _, hint_h, hint_v = tile_at(part % CHUNKS * TILES, PER_BLOCK, HW, BV)
            give_hints(
                state_ptr, cursors_ptr, slot_indices_ptr + row, num_slots, hint_g * (H // G) + hint_h, hint_v,
                gl.to_tensor(chunks_state_slot).to(gl.int64) * CHUNK,
                gl.to_tensor(chunks_state_head).to(gl.int64) * CHUNK, N, HW, TILES * BV,
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

    # Everything is asked of the memory before anything is computed: first what does not depend on the cursors.
    k = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, LR)), 0)
    t = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(1, LR)), 1)
    C = gl.load(C_ptr + first * C_token + g * C_group + t * C_token + k, mask=t < length, other=0.0)
    # Heads in blocks that the program touches; it appends those of whose tiles it has the first.
    num_heads = (TILES + skipped + PER_BLOCK - 1) // PER_BLOCK * HW
    A, D, bits = load_terms(
        A_ptr + first_h, D_ptr + first_h, parents_ptr + first, length, num_heads, HEADS, ROWS, TOKENS, TREE, HAS_D
    )
    # dt of every row and, below it, of the row after it.
    twice = gl.arange(0, 2 * HEADS, layout=gl.SliceLayout(1, LH))
    h_of, after = gl.expand_dims(twice % HEADS, 1), gl.expand_dims(twice // HEADS, 1)
    h_old = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, LH)), 1)
    mask_of, mask_old = h_of < num_heads, h_old < num_heads
    bias = gl.load(dt_bias_ptr + first_h + h_of, mask=mask_of, other=0.0).to(gl.float32) if HAS_BIAS else 0.0
    A_old = gl.load(A_ptr + first_h + h_old, mask=mask_old, other=0.0)
    flush, idle = duties_of(
        row, committed, limit, length, flushes_only, slot_indices_ptr, query_start_loc_ptr, cursors_ptr, num_rows,
        num_slots, pad_slot_id, buffer_len, FLUSHERS,
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
    age_h = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, LH)), 0) - after
    dt_ptrs, ring_dt_ptrs = dt_ptr + h_of * dt_head, ring_dt_ptr + h_of * ring_dt_head
    new, fresh, kept = load_dt(dt_ptrs, ring_dt_ptrs, age_h, length, count, start, dt_token, mask_of, R)
    age = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LR))
    B_rows = row_ptrs(B_ptr, ring_B_ptr, age, length, count, start, B_token, N, R)
    B = gl.load(gl.expand_dims(B_rows, 1) + k, mask=gl.expand_dims(age < count, 1), other=0.0)
    B_old, dt_old, dt_after = load_replayed(
        ring_B_ptr, ring_dt_ptr + h_old * ring_dt_head, mask_old, start, replayed, N, R, FLUSH_ROWS, LH
    )
    x_new, x_old = x_ptr + (h * x_head + v), ring_x_ptr + (h * ring_x_head + v)
    x = load_x(x_new, x_old, x_token, x_head, ring_x_head, start, length, count, P, R, ROWS, HW, BV, L3)
    x_f = load_replayed_x(x_old, ring_x_head, start, replayed, P, R, FLUSH_ROWS, HW, BV, own_rows(CHUNKED))
    fetch_first(tiles, state_ptr, state_head, begin, end, PER_BLOCK, HW, BV, EARLY)
    staged_B, staged_dt, staged_a = stage_replay(flush, B_old, dt_old, dt_after, A_old, BLOCKS, HW, CHUNKED)
    dt = process_dt(new, fresh, kept, bias, SOFTPLUS)
    C_at, weight_at, scale_at = weigh_rows(B, C, dt, A, D, bits, length, count, STATE.primitive_bitwidth)
    if APPENDERS == 0:
        # x follows tile by tile.
        mine = mask_of & (after == 0) & (h_of // HW * PER_BLOCK >= skipped) & (begin == skipped)
        gl.store(ring_dt_ptrs + wrap(last - age_h, R), dt, mask=mine & (age_h < length))
        if (part % CHUNKS == 0) & (begin == 0):
            B_end = ring_B_ptr + (gl.expand_dims(wrap(last - age, R) * N, 1) + k)
            gl.store(B_end, B, mask=gl.expand_dims(age < length, 1))
    gdc_launch_dependents()
    run_tiles(
        begin, end, x, x_f, flush, start, committed, length, count, tiles, C_at, weight_at, scale_at, staged_B,
        staged_dt, staged_a, state_ptr, x_ptr, ring_x_ptr, z_ptr + (first * z_token + first_h * z_head), out_ptr,
        state_head, x_token, x_head, ring_x_head, z_token, z_head, out_token, out_head, P, R, HW, TILES,
        APPENDERS == 0, CHUNKED, HAS_Z,
    )  # fmt: skip
