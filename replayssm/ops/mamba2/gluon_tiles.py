"""Mamba-2, one token of every row in one launch, for NVIDIA GPUs with TMA: a few heads a program, tile after tile.

While a program waits for its ring, computes, or replays the ring of a full row, the next tiles of its checkpoint are on
their way into shared memory, and the other programs of the multiprocessor read on.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.ops.gluon_chunk import num_parts
from replayssm.ops.gluon_flushers import is_taken, share_of_work
from replayssm.ops.mamba2.gluon_append import append_token
from replayssm.ops.mamba2.gluon_chunk_replay import replay_chunk, stage_chunk
from replayssm.ops.mamba2.gluon_early import give_hints
from replayssm.ops.mamba2.gluon_flush import flush_tile, settle_row
from replayssm.ops.mamba2.gluon_layouts import (
    heads_by_row_layout,
    pieces,
    ring_B_layout,
    ring_x_layout,
    rows_replayed,
    state_layout,
    tile_mma_layout,
    weight_layout,
    wide_ring_x_layout,
)
from replayssm.ops.mamba2.gluon_names import load_tile, view
from replayssm.ops.mamba2.gluon_parts import (
    heads_of,
    keep_ring_output,
    load_ring_B,
    load_ring_dt,
    load_ring_x,
    load_timestep,
    output,
    tile_ptrs,
    weigh,
)
from replayssm.ops.mamba2.gluon_replayed import load_replayed, load_replayed_x


@gluon.jit(do_not_specialize=["num_items", "num_slots", "buffer_len", "pad_slot_id"])
def mamba2_tiles_kernel(
    state_desc,
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, state_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr,
    cursors_ptr, slot_indices_ptr, out_ptr,
    num_items, num_slots, buffer_len, pad_slot_id,
    x_token, x_head, dt_token, B_token, B_group, C_token, C_group, z_token, z_head, out_token, out_head,
    state_slot, state_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head,
    H: gl.constexpr, G: gl.constexpr, P: gl.constexpr, N: gl.constexpr, R: gl.constexpr,
    BV: gl.constexpr, TURNS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
    APPENDERS: gl.constexpr, SETTLE: gl.constexpr,
    HINT: gl.constexpr, HINT_ROWS: gl.constexpr, HINT_FIRST: gl.constexpr,
    RING_FIRST: gl.constexpr, FLUSHERS: gl.constexpr, CHUNKED: gl.constexpr,
    HAS_D: gl.constexpr, HAS_Z: gl.constexpr, HAS_BIAS: gl.constexpr, SOFTPLUS: gl.constexpr, PDL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """One program: an item, num_warps heads of one batch row and group, a warp each, and TURNS tiles of BV V-rows of
    them; what the tiles share is computed once, STAGES tiles of the checkpoint are in flight. The programs after the
    items append the new tokens, APPENDERS a row: small writes scattered among the reads cost the
    memory far more than their bytes, in one burst they do not.
    """
    PARTS: gl.constexpr = P // (BV * TURNS)
    ITEMS: gl.constexpr = H // num_warps * PARTS
    L: gl.constexpr = state_layout(BV, state_ptr.dtype.element_ty.primitive_bitwidth, num_warps, 1)
    LX: gl.constexpr = ring_x_layout(ROWS, BV, num_warps, 1)
    WIDTHS: gl.constexpr = pieces(TURNS * BV)
    LX0: gl.constexpr = wide_ring_x_layout(ROWS, WIDTHS[0], num_warps)
    LX1: gl.constexpr = wide_ring_x_layout(ROWS, max(WIDTHS[1], 4), num_warps)
    LW: gl.constexpr = weight_layout(ROWS, num_warps, 1)
    LB: gl.constexpr = ring_B_layout(N, num_warps)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    BYTES: gl.constexpr = state_desc.block_type.nbytes
    if HINT:
        # A program knows its row from its place in the grid alone, unless it trades places.
        guess = gl.program_id(0) - FLUSHERS * ITEMS * TURNS
        if (guess >= 0) & (guess < (gl.minimum(num_items, HINT_FIRST) if HINT_FIRST > 0 else num_items)):
            hint_h = ((guess % ITEMS) // PARTS * num_warps).to(gl.int64)
            give_hints(
                state_ptr, cursors_ptr, slot_indices_ptr + guess // ITEMS, num_slots, hint_h,
                guess % PARTS * (TURNS * BV), state_slot, state_head,
                N, num_warps, HINT_ROWS if HINT_ROWS > 0 else TURNS * BV,
            )  # fmt: skip
    if PDL:
        # Everything below may depend on the kernel before; the kernel after may come on as soon as there is room.
        gdc_wait()
        gdc_launch_dependents()
    item = gl.program_id(0) - FLUSHERS * ITEMS * TURNS
    if item >= num_items:
        row = ((item - num_items) // APPENDERS).to(gl.int64)
        append_token(
            row, (item - num_items) % APPENDERS, x_ptr + row * x_token, dt_ptr + row * dt_token,
            B_ptr + row * B_token, dt_bias_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr, cursors_ptr, slot_indices_ptr,
            num_slots, pad_slot_id, x_head, B_group, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group,
            ring_dt_slot, ring_dt_head, H, G, P, N, R, H // APPENDERS, HAS_BIAS, SOFTPLUS, num_warps,
        )  # fmt: skip
        return
    begin = 0
    end = TURNS
    if FLUSHERS > 0:
        num_rows = num_items // ITEMS
        row, item, begin, end, flushes_only = share_of_work(
            slot_indices_ptr, slot_indices_ptr, cursors_ptr, num_rows, num_slots, pad_slot_id, buffer_len, ITEMS, TURNS,
            FLUSHERS, False,
        )  # fmt: skip
        if row >= num_rows:
            return
    else:
        row = settle_row(
            item // ITEMS, num_items // ITEMS, slot_indices_ptr, cursors_ptr, num_slots, buffer_len, pad_slot_id, SETTLE
        )
    row = row.to(gl.int64)
    part = item % PARTS
    first_h = (item % ITEMS) // PARTS * num_warps
    g = (first_h // (H // G)).to(gl.int64)
    h = heads_of(first_h, num_warps, LW)
    slot = gl.load(slot_indices_ptr + row)
    C_new = C_ptr + row * C_token + g * C_group
    C_tile = gl.load(C_new + gl.arange(0, N, layout=gl.SliceLayout(0, LB))).to(gl.float32)
    A = gl.load(A_ptr + h)
    D = gl.load(D_ptr + h).to(gl.float32) if HAS_D else A * 0.0
    dt = load_timestep(dt_ptr + row * dt_token, dt_bias_ptr, h, HAS_BIAS, SOFTPLUS)
    x_new = x_ptr + row * x_token + h * x_head
    z_new = z_ptr + row * z_token + h * z_head
    out_new = out_ptr + row * out_token + h * out_head
    if (slot == pad_slot_id) | (slot < 0) | (slot >= num_slots):
        for turn in range(TURNS):
            zero = gl.zeros([num_warps, BV], out_ptr.dtype.element_ty, layout=gl.SliceLayout(2, L))
            gl.store(tile_ptrs(out_new, (part * TURNS + turn) * BV, BV, L), zero)
        return
    tiles = gl.allocate_shared_memory(state_desc.dtype, [STAGES, 1, num_warps, BV, N], state_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    C_row = gl.allocate_shared_memory(gl.float32, [N], LINE)
    kept = gl.allocate_shared_memory(gl.float32, [1 << (TURNS - 1).bit_length(), num_warps, BV], PLAIN)
    FLUSHED: gl.constexpr = rows_replayed(R) if CHUNKED else ROWS
    staged_x = gl.allocate_shared_memory(gl.float32, [FLUSHED, num_warps, BV], PLAIN)
    if CHUNKED:
        staged_B = gl.allocate_shared_memory(gl.bfloat16, [num_parts(x_ptr.dtype.element_ty), N, FLUSHED], PLAIN)
        staged_dt = gl.allocate_shared_memory(gl.float32, [1, FLUSHED, num_warps], PLAIN)
        staged_a = gl.allocate_shared_memory(gl.float32, [1, num_warps], LINE)
    else:
        staged_B = gl.allocate_shared_memory(gl.float32, [ROWS, N], LINE)
        staged_a = gl.allocate_shared_memory(gl.float32, [ROWS, num_warps], LINE)
    base = slot.to(gl.int64)
    cursor = cursors_ptr + base * 4
    start = gl.load(cursor)
    committed = gl.load(cursor + 1)
    limit = gl.load(cursor + 2)
    for i in gl.static_range(STAGES):
        mbarrier.init(arrived.index(i), count=1)
    # With RING_FIRST only one tile is requested before the ring's rows, which else queue behind all of them.
    AT_ONCE: gl.constexpr = 1 if RING_FIRST else STAGES
    for i in gl.static_range(AT_ONCE):
        mbarrier.expect(arrived.index(i), BYTES, pred=begin + i < end)
        where = [slot, first_h, (part * TURNS + begin + i) * BV, 0]
        load_tile(state_desc, where, arrived.index(i), tiles.index(i), pred=begin + i < end)
    flush = (committed > 0) & (committed + 1 > gl.minimum(limit, buffer_len))
    if FLUSHERS > 0:
        if flush & (not flushes_only):
            if is_taken(
                row, slot_indices_ptr, slot_indices_ptr, cursors_ptr, num_rows, num_slots, pad_slot_id, buffer_len,
                FLUSHERS, False,
            ):  # fmt: skip
                # Nothing may be on its way to the shared memory of a program that is gone.
                for i in gl.static_range(AT_ONCE):
                    mbarrier.wait(arrived.index(i), 0)
                return
    live = gl.where(flush, 0, committed)
    ring_B = ring_B_ptr + base * ring_B_slot + g * ring_B_group
    ring_x = ring_x_ptr + base * ring_x_slot + h * ring_x_head
    ring_dt = ring_dt_ptr + base * ring_dt_slot + h * ring_dt_head
    dt_j, dt_i = load_ring_dt(ring_dt, start, live, ROWS, R, LW)
    B_tile = load_ring_B(B_ptr + row * B_token + g * B_group, ring_B, start, live, ROWS, N, R, LB)
    first_v = part * TURNS * BV
    x0 = load_ring_x(x_new, ring_x, start, live, first_v, ROWS, P, R, WIDTHS[0], LX0)
    if WIDTHS[1] > 0:
        x1 = load_ring_x(x_new, ring_x, start, live, first_v + WIDTHS[0], ROWS, P, R, WIDTHS[1], LX1)
    if CHUNKED:
        # Asked for before anything waits for the ring, and by rows that do not flush with a mask that is all off.
        head = first_h.to(gl.int64)
        heads_x = ring_x_ptr + base * ring_x_slot + head * ring_x_head
        replayed = gl.where(flush, committed, 0)
        LH: gl.constexpr = heads_by_row_layout(num_warps)
        h_of = head + gl.expand_dims(gl.arange(0, num_warps, layout=gl.SliceLayout(1, LH)), 1)
        dt_ptrs = ring_dt_ptr + base * ring_dt_slot + h_of * ring_dt_head
        B_old, dt_old, dt_after = load_replayed(ring_B, dt_ptrs, True, start, replayed, N, R, FLUSHED, LH)
        first_x = heads_x + (part * TURNS + begin) * BV
        x_next = load_replayed_x(first_x, ring_x_head, start, replayed, P, R, FLUSHED, num_warps, BV)
        A_old = gl.load(A_ptr + h_of)
    for i in gl.static_range(AT_ONCE, STAGES):
        mbarrier.expect(arrived.index(i), BYTES, pred=begin + i < end)
        where = [slot, first_h, (part * TURNS + begin + i) * BV, 0]
        load_tile(state_desc, where, arrived.index(i), tiles.index(i), pred=begin + i < end)
    C_row.store(C_tile)
    score = gl.sum(B_tile.to(gl.float32) * gl.expand_dims(C_tile, 0), 1)
    score = gl.convert_layout(score, gl.SliceLayout(1, gl.SliceLayout(2, LW)))
    weight, decay = weigh(score, dt_j, dt_i, dt, A, D, live, ROWS, LW)
    keep_ring_output(x0, weight, kept, 0, BV, LX0)
    if WIDTHS[1] > 0:
        keep_ring_output(x1, weight, kept, WIDTHS[0] // BV, BV, LX1)
    if CHUNKED:
        if flush:
            stage_chunk(staged_B, staged_dt, staged_a, B_old, dt_old, dt_after, A_old)
    for turn in range(begin, end):
        stage = (turn - begin) % STAGES
        first_v = (part * TURNS + turn) * BV
        mbarrier.wait(arrived.index(stage), ((turn - begin) // STAGES) & 1)
        has_next = turn + STAGES < end
        mbarrier.expect(arrived.index(stage), BYTES, pred=has_next)
        where = [slot, first_h, first_v + STAGES * BV, 0]
        z = gl.load(tile_ptrs(z_new, first_v, BV, L)) if HAS_Z else 0.0
        cube = view(tiles.index(stage), [num_warps, BV, N], CUBE)
        if CHUNKED:
            x_now = x_next
            if flush:
                x_next = load_replayed_x(
                    heads_x + (first_v + BV), ring_x_head, start, gl.where(turn + 1 < end, committed, 0),
                    P, R, FLUSHED, num_warps, BV,
                )  # fmt: skip
                tile_ptr = state_ptr + base * state_slot + head * state_head + first_v * N
                MMA: gl.constexpr = tile_mma_layout(num_warps, num_warps)
                replay_chunk(cube, x_now, staged_x, staged_B, staged_dt, staged_a, 0, tile_ptr, state_head, MMA)
                fence_async_shared()
        S = cube.load(L)
        load_tile(state_desc, where, arrived.index(stage), tiles.index(stage), pred=has_next)
        if not CHUNKED:
            if flush:
                S = flush_tile(
                    S, state_ptr + base * state_slot + h * state_head, staged_B, staged_x, staged_a,
                    start, committed, first_v, A, ring_x, ring_B, ring_dt, P, N, R, L, LX, LB,
                )  # fmt: skip
        C = C_row.load(gl.SliceLayout(0, gl.SliceLayout(0, L)))
        y = output(kept.index(turn).load(gl.SliceLayout(2, L)), S, C, decay, z, L, HAS_Z)
        gl.store(tile_ptrs(out_new, first_v, BV, L), y.to(out_ptr.dtype.element_ty))


def describe(state: torch.Tensor, heads: int, block_v: int) -> TensorDescriptor:
    """The TMA view of a checkpoint [slots, heads, V, K] in tiles of `heads` x `block_v` rows."""
    layout = gl.NVMMASharedLayout(0, state.element_size() * 8, rank=4)
    return TensorDescriptor(state, list(state.shape), list(state.stride()), [1, heads, block_v, state.shape[3]], layout)
