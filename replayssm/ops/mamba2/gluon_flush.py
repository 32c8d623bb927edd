"""Device functions of the Mamba-2 Gluon kernels: which rows flush, and replaying a ring into a tile of state."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.mamba2.gluon_names import barrier, view
from replayssm.ops.mamba2.gluon_parts import positions


@gluon.jit
def must_flush(row, slot_indices_ptr, cursors_ptr, num_slots, buffer_len, pad_slot_id):
    """Whether a row of the batch flushes in this step."""
    slot = gl.load(slot_indices_ptr + row)
    valid = (slot != pad_slot_id) & (slot >= 0) & (slot < num_slots)
    cursor = cursors_ptr + gl.where(valid, slot, 0).to(gl.int64) * 4
    committed = gl.load(cursor + 1, mask=valid, other=0)
    limit = gl.load(cursor + 2, mask=valid, other=0)
    return (committed > 0) & (committed + 1 > gl.minimum(limit, buffer_len))


@gluon.jit
def settle_row(
    position, batch, slot_indices_ptr, cursors_ptr, num_slots, buffer_len, pad_slot_id, SETTLE: gl.constexpr
):
    """The row to work on at a place of the grid: in the last 1 / SETTLE of the rows, one that flushes trades places
    with its partner in the first, unless that flushes too. A long flush at the end would leave the GPU idle.
    """
    if SETTLE > 0:
        span = batch // SETTLE
        other = gl.where(position < span, position + batch - span, position)
        other = gl.where(position >= batch - span, position - batch + span, other)
        if other != position:
            late = must_flush(
                gl.maximum(position, other), slot_indices_ptr, cursors_ptr, num_slots, buffer_len, pad_slot_id
            )
            early = must_flush(
                gl.minimum(position, other), slot_indices_ptr, cursors_ptr, num_slots, buffer_len, pad_slot_id
            )
            position = gl.where(late & (not early), other, position)
    return position


@gluon.jit
def stage_flush_rows(
    staged_B, staged_x, staged_a, first, start, committed, first_v, A, ring_x_ptrs, ring_B_ptr, ring_dt_ptrs,
    P: gl.constexpr, N: gl.constexpr, R: gl.constexpr, LX: gl.constexpr, LB: gl.constexpr,
):  # fmt: skip
    """Put B, dt x and exp(dt A) of the rows `first` and on into shared memory, in float32."""
    ROWS: gl.constexpr = staged_x.shape[0]
    HEADS: gl.constexpr = staged_x.shape[1]
    BV: gl.constexpr = staged_x.shape[2]
    LJ: gl.constexpr = gl.SliceLayout(2, LX)
    LH: gl.constexpr = gl.SliceLayout(0, LJ)
    r, position = positions(first, start, ROWS, R, gl.SliceLayout(1, LJ))
    ok = gl.expand_dims(r < committed, 1)
    position = gl.expand_dims(position, 1)
    v = first_v + gl.arange(0, BV, layout=gl.SliceLayout(0, gl.SliceLayout(0, LX)))
    x_ptrs = gl.expand_dims(gl.convert_layout(ring_x_ptrs, LH, assert_trivial=True), 0) + position * P
    x_ptrs = gl.expand_dims(x_ptrs, 2) + gl.expand_dims(gl.expand_dims(v, 0), 0)
    dt_ptrs = gl.expand_dims(gl.convert_layout(ring_dt_ptrs, LH, assert_trivial=True), 0) + position
    r_B, position_B = positions(first, start, ROWS, R, gl.SliceLayout(1, LB))
    k = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, LB)), 0)
    B_ptrs = ring_B_ptr + gl.expand_dims(position_B * N, 1) + k
    dt = gl.load(dt_ptrs, mask=ok, other=0.0)
    x = gl.load(x_ptrs, mask=gl.expand_dims(ok, 2), other=0.0).to(gl.float32)
    B = gl.load(B_ptrs, mask=gl.expand_dims(r_B < committed, 1), other=0.0).to(gl.float32)
    a = gl.exp(dt * gl.expand_dims(gl.convert_layout(A, LH, assert_trivial=True), 0))
    view(staged_x, [ROWS, HEADS, BV], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])).store(gl.expand_dims(dt, 2) * x)
    view(staged_a, [ROWS, HEADS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(a)
    view(staged_B, [ROWS, N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(B)


@gluon.jit
def flush_tile(
    S, state_ptrs, staged_B, staged_x, staged_a, start, committed, first_v, A, ring_x_ptrs, ring_B_ptr, ring_dt_ptrs,
    P: gl.constexpr, N: gl.constexpr, R: gl.constexpr, L: gl.constexpr, LX: gl.constexpr, LB: gl.constexpr,
):  # fmt: skip
    """Replay the committed rows into a tile of the checkpoint, store it, and return what the memory now holds."""
    ROWS: gl.constexpr = staged_x.shape[0]
    S = S.to(gl.float32)
    for first in range(0, committed, ROWS):
        barrier()
        stage_flush_rows(
            staged_B, staged_x, staged_a, first, start, committed, first_v, A, ring_x_ptrs, ring_B_ptr, ring_dt_ptrs,
            P, N, R, LX, LB,
        )  # fmt: skip
        barrier()
        for j in range(gl.minimum(committed - first, ROWS)):
            B = staged_B.index(j).load(gl.SliceLayout(0, gl.SliceLayout(0, L)))
            dtx = staged_x.index(j).load(gl.SliceLayout(2, L))
            a = staged_a.index(j).load(gl.SliceLayout(1, gl.SliceLayout(2, L)))
            added = gl.expand_dims(dtx, 2) * gl.expand_dims(gl.expand_dims(B, 0), 0)
            S = gl.fma(S, gl.expand_dims(gl.expand_dims(a, 1), 2), added)
    folded = S.to(state_ptrs.dtype.element_ty)
    heads = gl.convert_layout(state_ptrs, gl.SliceLayout(1, gl.SliceLayout(2, L)), assert_trivial=True)
    v = first_v + gl.arange(0, S.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    k = gl.arange(0, N, layout=gl.SliceLayout(0, gl.SliceLayout(0, L)))
    ptrs = gl.expand_dims(gl.expand_dims(heads, 1) + gl.expand_dims(v * N, 0), 2)
    gl.store(ptrs + gl.expand_dims(gl.expand_dims(k, 0), 0), folded)
    return folded
