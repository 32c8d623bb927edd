"""The rows that a flush of a Mamba-2 checkpoint replays, as loaded from the ring."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_window_parts import wrap


@gluon.jit
def load_replayed(
    ring_B_ptr, ring_dt_ptrs, mask_h, start, count,
    N: gl.constexpr, R: gl.constexpr, ROWS: gl.constexpr, LH: gl.constexpr,
):  # fmt: skip
    """B [rows, K], dt and the dt of the row after [heads, rows] of the `count` oldest committed rows; zero after them.

    `ring_dt_ptrs` and `mask_h` are of all heads, [heads, 1] in layout LH.
    """
    LB: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    j = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LB))
    k = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, LB)), 0)
    B_ptrs = ring_B_ptr + (gl.expand_dims(wrap(start + j, R) * N, 1) + k)
    B = gl.load(B_ptrs, mask=gl.expand_dims(j < count, 1), other=0.0)
    r = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, LH)), 0)
    dt = gl.load(ring_dt_ptrs + wrap(start + r, R), mask=mask_h & (r < count), other=0.0)
    dt_after = gl.load(ring_dt_ptrs + wrap(start + r + 1, R), mask=mask_h & (r + 1 < count), other=0.0)
    return B, dt, dt_after


@gluon.constexpr_function
def own_rows(chunked):
    """V-rows of x that a thread loads for a flush: chunks keep them in few, serial replays in one 16-byte access."""
    return 2 if chunked else 8


@gluon.jit
def load_replayed_x(
    ring_x_ptr, ring_x_head, start, count, P: gl.constexpr, R: gl.constexpr, ROWS: gl.constexpr, HW: gl.constexpr,
    BV: gl.constexpr, OWN: gl.constexpr = 2,
):  # fmt: skip
    """x of the `count` oldest committed rows for a tile, [rows, heads, V]; zero after them.

    A thread loads OWN neighbouring V-rows.
    """
    LANES: gl.constexpr = min(8, BV // OWN)
    L: gl.constexpr = gl.BlockedLayout([1, 1, OWN], [32 // LANES, 1, LANES], [gl.num_warps() // HW, HW, 1], [2, 1, 0])
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    r = gl.expand_dims(gl.expand_dims(r, 1), 2)
    h = gl.arange(0, HW, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    v = gl.arange(0, BV, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    in_row = gl.expand_dims(gl.expand_dims(h, 0), 2) * ring_x_head + gl.expand_dims(gl.expand_dims(v, 0), 1)
    return gl.load(ring_x_ptr + (wrap(start + r, R) * P + in_row), mask=r < count, other=0.0)
