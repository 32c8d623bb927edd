"""Mamba-2, one token of every row in one launch, for small batches on NVIDIA GPUs: one tile a program."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.ops.mamba2.gluon_append import append_B, append_token, append_x
from replayssm.ops.mamba2.gluon_early import give_hints
from replayssm.ops.mamba2.gluon_flush import flush_tile, settle_row
from replayssm.ops.mamba2.gluon_layouts import ring_B_layout, ring_x_layout, state_layout, weight_layout
from replayssm.ops.mamba2.gluon_parts import (
    heads_of,
    load_ring_B,
    load_ring_dt,
    load_ring_x,
    load_timestep,
    output,
    ring_output,
    tile_ptrs,
    weigh,
)


@gluon.jit(do_not_specialize=["num_items", "num_slots", "buffer_len", "pad_slot_id"])
def mamba2_tile_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, state_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr,
    cursors_ptr, slot_indices_ptr, out_ptr,
    num_items, num_slots, buffer_len, pad_slot_id,
    x_token, x_head, dt_token, B_token, B_group, C_token, C_group, z_token, z_head, out_token, out_head,
    state_slot, state_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head,
    H: gl.constexpr, G: gl.constexpr, P: gl.constexpr, N: gl.constexpr, R: gl.constexpr,
    BV: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr, APPENDERS: gl.constexpr, SETTLE: gl.constexpr,
    HINT: gl.constexpr, HINT_ROWS: gl.constexpr, HINT_FIRST: gl.constexpr,
    HAS_D: gl.constexpr, HAS_Z: gl.constexpr, HAS_BIAS: gl.constexpr, SOFTPLUS: gl.constexpr, PDL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """One program: BV rows of HEADS heads of one batch row and group."""
    TILES: gl.constexpr = P // BV
    ITEMS: gl.constexpr = H // HEADS * TILES
    L: gl.constexpr = state_layout(BV, state_ptr.dtype.element_ty.primitive_bitwidth, HEADS, num_warps // HEADS)
    LX: gl.constexpr = ring_x_layout(ROWS, BV, HEADS, num_warps // HEADS)
    LW: gl.constexpr = weight_layout(ROWS, HEADS, num_warps // HEADS)
    LB: gl.constexpr = ring_B_layout(N, num_warps)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if HINT:
        # A program knows its row from its place in the grid alone, unless it trades places.
        guess = gl.program_id(0)
        if guess < (gl.minimum(num_items, HINT_FIRST) if HINT_FIRST > 0 else num_items):
            hint_h = ((guess % ITEMS) // TILES * HEADS).to(gl.int64)
            give_hints(
                state_ptr, cursors_ptr, slot_indices_ptr + guess // ITEMS, num_slots, hint_h, guess % TILES * BV,
                state_slot, state_head, N, HEADS, HINT_ROWS if HINT_ROWS > 0 else BV,
            )  # fmt: skip
    if PDL:
        # Everything below may depend on the kernel before; the kernel after may come on as soon as there is room.
        gdc_wait()
        gdc_launch_dependents()
    item = gl.program_id(0)
    if APPENDERS > 0:
        if item >= num_items:
            row = ((item - num_items) // APPENDERS).to(gl.int64)
            append_token(
                row, (item - num_items) % APPENDERS, x_ptr + row * x_token, dt_ptr + row * dt_token,
                B_ptr + row * B_token, dt_bias_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr, cursors_ptr, slot_indices_ptr,
                num_slots, pad_slot_id, x_head, B_group, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group,
                ring_dt_slot, ring_dt_head, H, G, P, N, R, H // APPENDERS, HAS_BIAS, SOFTPLUS, num_warps,
            )  # fmt: skip
            return
    row = settle_row(
        item // ITEMS, num_items // ITEMS, slot_indices_ptr, cursors_ptr, num_slots, buffer_len, pad_slot_id, SETTLE
    ).to(gl.int64)
    first_h = ((item % ITEMS) // TILES * HEADS).to(gl.int64)
    first_v = (item % TILES) * BV
    g = first_h // (H // G)
    h = heads_of(first_h, HEADS, LW)
    slot = gl.load(slot_indices_ptr + row)
    x_new = x_ptr + row * x_token + h * x_head
    B_new = B_ptr + row * B_token + g * B_group
    C_new = C_ptr + row * C_token + g * C_group
    k = gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(0, L)))
    C_tile = gl.load(C_new + gl.arange(0, N, layout=gl.SliceLayout(0, LB))).to(gl.float32)
    C = gl.load(C_new + k).to(gl.float32)
    A = gl.load(A_ptr + h)
    D = gl.load(D_ptr + h).to(gl.float32) if HAS_D else A * 0.0
    dt = load_timestep(dt_ptr + row * dt_token, dt_bias_ptr, h, HAS_BIAS, SOFTPLUS)
    z = gl.load(tile_ptrs(z_ptr + row * z_token + h * z_head, first_v, BV, L)) if HAS_Z else 0.0
    out = tile_ptrs(out_ptr + row * out_token + h * out_head, first_v, BV, L)
    if (slot == pad_slot_id) | (slot < 0) | (slot >= num_slots):
        gl.store(out, gl.zeros([HEADS, BV], out_ptr.dtype.element_ty, layout=gl.SliceLayout(2, L)))
        return
    base = slot.to(gl.int64)
    cursor = cursors_ptr + base * 4
    start = gl.load(cursor)
    committed = gl.load(cursor + 1)
    limit = gl.load(cursor + 2)
    ring_B = ring_B_ptr + base * ring_B_slot + g * ring_B_group
    ring_x = ring_x_ptr + base * ring_x_slot + h * ring_x_head
    ring_dt = ring_dt_ptr + base * ring_dt_slot + h * ring_dt_head
    state = state_ptr + base * state_slot + h * state_head
    v = (first_v + gl.arange(0, BV, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))) * N
    heads = gl.convert_layout(state, gl.SliceLayout(1, gl.SliceLayout(2, L)), assert_trivial=True)
    at = gl.expand_dims(gl.expand_dims(heads, 1) + gl.expand_dims(v, 0), 2) + gl.expand_dims(gl.expand_dims(k, 0), 0)
    S = gl.load(at)
    flush = (committed > 0) & (committed + 1 > gl.minimum(limit, buffer_len))
    live = gl.where(flush, 0, committed)
    end = gl.where(start + committed >= R, start + committed - R, start + committed)
    dt_j, dt_i = load_ring_dt(ring_dt, start, live, ROWS, R, LW)
    B_tile = load_ring_B(B_new, ring_B, start, live, ROWS, N, R, LB)
    x = load_ring_x(x_new, ring_x, start, live, first_v, ROWS, P, R, BV, LX)
    score = gl.sum(B_tile.to(gl.float32) * gl.expand_dims(C_tile, 0), 1)
    score = gl.convert_layout(score, gl.SliceLayout(1, gl.SliceLayout(2, LW)))
    weight, decay = weigh(score, dt_j, dt_i, dt, A, D, live, ROWS, LW)
    if flush:
        staged_B = gl.allocate_shared_memory(gl.float32, [ROWS, N], LINE)
        staged_x = gl.allocate_shared_memory(gl.float32, [ROWS, HEADS, BV], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        staged_a = gl.allocate_shared_memory(gl.float32, [ROWS, HEADS], LINE)
        S = flush_tile(
            S, state, staged_B, staged_x, staged_a, start, committed, first_v, A, ring_x, ring_B, ring_dt,
            P, N, R, L, LX, LB,
        )  # fmt: skip
    y = output(ring_output(x, weight, L, LX), S, C, decay, z, L, HAS_Z)
    gl.store(out, y.to(out_ptr.dtype.element_ty))
    if APPENDERS == 0:
        append_x(x, ring_x, live, end, first_v, P, LX)
        if first_v == 0:
            gl.store(ring_dt + end, dt)
            if first_h % (H // G) == 0:
                append_B(B_tile, ring_B, live, end, ROWS, N, LB)
