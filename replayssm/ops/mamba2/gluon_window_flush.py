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


@gluon.constexpr_function
def replay_layout(element_bits, heads, block_v, columns):
    """[heads, V, K] of a tile in a replay: a thread has four V-rows, so that a ring row is few loads of shared memory.

    It is the operand's layout of the tensor cores, but for a bit of V and one of K that registers and lanes exchange.
    """
    own = (128 // element_bits).bit_length() - 1
    k = [[0, 0, 1 << i] for i in range(columns.bit_length() - 1)]
    v = [[0, 1 << i, 0] for i in range(block_v.bit_length() - 1)]
    h = [[1 << i, 0, 0] for i in range(heads.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[*k[:own], v[0], v[3], *k[own + 3 :]],
        lane_bases=[*k[own : own + 3], v[1], v[2]],
        warp_bases=[*v[4:], *h],
        block_bases=[],
        shape=[heads, block_v, columns],
    )


@gluon.jit
def stage_x(staged_x, x, staged_dt, block):
    """Put dt x of a tile's rows, [rows, heads, V], into shared memory of that shape, in float32."""
    dt = staged_dt.index(block).load(gl.SliceLayout(2, x.type.layout))
    all_x = view(staged_x, x.shape, gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    all_x.store(gl.expand_dims(dt, 2) * x.to(gl.float32))
    # Before the loop, else the compiler puts a barrier into every iteration.
    barrier()


@gluon.jit
def replay_tile(S, staged_x, staged_B, staged_a, block, count):
    """Replay `count` staged rows into a tile of the checkpoint; the operations are those of `triton_math.update`."""
    L: gl.constexpr = S.type.layout
    ROWS: gl.constexpr = staged_x.shape[0]
    S = S.to(gl.float32)
    for j in range(count):
        x = staged_x.index(j).load(gl.SliceLayout(2, L))
        B = staged_B.index(j).load(gl.SliceLayout(0, gl.SliceLayout(1, L)))
        a = staged_a.index(block * ROWS + j).load(gl.SliceLayout(1, gl.SliceLayout(2, L)))
        added = gl.expand_dims(x, 2) * gl.expand_dims(gl.expand_dims(B, 0), 1)
        S = gl.fma(S, gl.expand_dims(gl.expand_dims(a, 1), 2), added)
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
