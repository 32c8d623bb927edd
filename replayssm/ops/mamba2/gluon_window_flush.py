"""A flush inside the Mamba-2 window kernel: ring rows staged once a program, replayed into every tile."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_window_parts import wrap
from replayssm.ops.mamba2.gluon_names import barrier, view


@gluon.jit
def load_flush_x(ring_x_ptr, start, count, P: gl.constexpr, R: gl.constexpr, BV: gl.constexpr, ROWS: gl.constexpr):
    """x of the `count` oldest committed rows, for a tile's V-rows."""
    L: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [gl.num_warps(), 1], [1, 0])
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    v = gl.expand_dims(gl.arange(0, BV, layout=gl.SliceLayout(0, L)), 0)
    x_ptrs = ring_x_ptr + (gl.expand_dims(wrap(start + r, R) * P, 1) + v)
    return gl.load(x_ptrs, mask=gl.expand_dims(r < count, 1), other=0.0)


@gluon.jit
def stage_flush(
    staged_B, staged_dt, staged_a, ring_B_ptr, ring_dt_ptrs, A, mask_h, start, count,
    N: gl.constexpr, R: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr, LH: gl.constexpr,
):  # fmt: skip
    """Put B, dt and exp(dt A) of the committed rows into shared memory, for all tiles of a flushing program."""
    WARPS: gl.constexpr = gl.num_warps()
    LB: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    j = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LB))
    k = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, LB)), 0)
    B_ptrs = ring_B_ptr + (gl.expand_dims(wrap(start + j, R) * N, 1) + k)
    B = gl.load(B_ptrs, mask=gl.expand_dims(j < count, 1), other=0.0)
    r = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, LH)), 0)
    dt = gl.load(ring_dt_ptrs + wrap(start + r, R), mask=mask_h & (r < count), other=0.0)
    view(staged_dt, [HEADS, ROWS], PLAIN).store(dt)
    view(staged_a, [HEADS, ROWS], PLAIN).store(gl.exp(dt * A))
    view(staged_B, [ROWS, N], PLAIN).store(B.to(gl.float32))


@gluon.jit
def replay_tile(S, x, staged_x, staged_B, staged_dt, staged_a, h, count, ROWS: gl.constexpr, L: gl.constexpr):
    """Replay the staged rows into a tile of the checkpoint; the operations are those of `triton_math.update`."""
    LX: gl.constexpr = x.type.layout
    dt = staged_dt.index(h).load(gl.SliceLayout(1, LX))
    view(staged_x, x.shape, gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(gl.expand_dims(dt, 1) * x.to(gl.float32))
    decays = view(staged_a, [staged_a.shape[0] * ROWS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # Before the loop, else the compiler puts a barrier into every iteration.
    barrier()
    S = S.to(gl.float32)
    for j in range(count):
        B_j = staged_B.index(j).load(gl.SliceLayout(0, L))
        x_j = staged_x.index(j).load(gl.SliceLayout(1, L))
        a_j = decays.index(h * ROWS + j).load(gl.SliceLayout(1, L))
        S = gl.fma(S, gl.expand_dims(a_j, 1), gl.expand_dims(x_j, 1) * gl.expand_dims(B_j, 0))
    return S
