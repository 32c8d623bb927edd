"""A serial flush inside the Mamba-2 window kernel: ring rows staged once a program, replayed into every tile."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.mamba2.gluon_names import barrier, view


@gluon.jit
def stage_rows(staged_B, staged_dt, staged_a, B, dt, A):
    """Put B, dt and exp(dt A) of rows into shared memory, in float32.

    Shapes: [rows, K], [blocks, rows, heads of a block], [blocks * rows, heads of a block]; B and dt are those of
    `load_replayed`, A is [heads, 1].
    """
    BLOCKS: gl.constexpr = staged_dt.shape[0]
    ROWS: gl.constexpr = staged_dt.shape[1]
    HW: gl.constexpr = staged_dt.shape[2]
    N: gl.constexpr = staged_B.shape[1]
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    dt_by_row = gl.permute(gl.reshape(dt, [BLOCKS, HW, ROWS]), [0, 2, 1])
    a_by_row = gl.permute(gl.reshape(gl.exp(dt * A), [BLOCKS, HW, ROWS]), [0, 2, 1])
    view(staged_dt, [BLOCKS, ROWS, HW], CUBE).store(dt_by_row)
    view(staged_a, [BLOCKS, ROWS, HW], CUBE).store(a_by_row)
    view(staged_B, [ROWS, N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(B.to(gl.float32))


@gluon.jit
def replay_tile(S, x, staged_x, staged_B, staged_dt, staged_a, block, count):
    """Replay `count` staged rows into a tile of the checkpoint; the operations are those of `triton_math.update`.

    x: [rows, heads, V] of the rows. `staged_x` has its shape.
    """
    L: gl.constexpr = S.type.layout
    ROWS: gl.constexpr = x.shape[0]
    dt = staged_dt.index(block).load(gl.SliceLayout(2, x.type.layout))
    all_x = view(staged_x, x.shape, gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    all_x.store(gl.expand_dims(dt, 2) * x.to(gl.float32))
    # Before the loop, else the compiler puts a barrier into every iteration.
    barrier()
    S = S.to(gl.float32)
    for j in range(count):
        B_j = staged_B.index(j).load(gl.SliceLayout(0, gl.SliceLayout(1, L)))
        x_j = staged_x.index(j).load(gl.SliceLayout(2, L))
        a_j = staged_a.index(block * ROWS + j).load(gl.SliceLayout(1, gl.SliceLayout(2, L)))
        added = gl.expand_dims(x_j, 2) * gl.expand_dims(gl.expand_dims(B_j, 0), 1)
        S = gl.fma(S, gl.expand_dims(gl.expand_dims(a_j, 1), 2), added)
    return S


@gluon.jit
def store_tile(S, state_ptr, state_head):
    """Write a tile [heads, V, K] of the checkpoint; the pointer is that of its first head and V-row."""
    L: gl.constexpr = S.type.layout
    h = gl.arange(0, S.shape[0], layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    v = gl.arange(0, S.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    k = gl.arange(0, S.shape[2], layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    at = gl.expand_dims(gl.expand_dims(v, 0), 2) * S.shape[2] + gl.expand_dims(gl.expand_dims(k, 0), 1)
    gl.store(state_ptr + (gl.expand_dims(gl.expand_dims(h, 1), 2) * state_head + at), S)
