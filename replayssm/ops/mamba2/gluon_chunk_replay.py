"""A flush of a Mamba-2 checkpoint as products on the tensor cores: all rows of the ring at once.

S = e^{G_T} S0 + sum_j (e^{G_T - G_j} dt_j x_j) B_j': the left factors are fp32, their products with B exact but for the
fp32 sums (`gluon_chunk`). Tiles are [heads, V, K] in shared memory, replayed in place.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_chunk import parts_of, products
from replayssm.ops.gluon_window_parts import add
from replayssm.ops.mamba2.gluon_names import view

WIDTH = gl.constexpr(64)  # columns of a tile that are worked on at a time


@gluon.jit
def in_operand_order(x):
    """[rows, K] with the columns of every 32 as an accumulator has them: 8 q + 2 n + i becomes 8 n + 2 q + i."""
    rows: gl.constexpr = x.shape[0]
    blocks: gl.constexpr = x.shape[1] // 32
    return gl.reshape(gl.permute(gl.reshape(x, [rows, blocks, 4, 4, 2]), (0, 1, 3, 2, 4)), x.shape)


@gluon.jit
def reorder(x, LAYOUT: gl.constexpr):
    """A left operand of 16 bits [heads, V, K] as accumulators, or these as an operand: no data moves."""
    shape: gl.constexpr = x.shape
    x = gl.reshape(x, [shape[0], shape[1], shape[2] // 32, 4, 4, 2])
    return gl.convert_layout(gl.reshape(gl.permute(x, (0, 1, 2, 4, 3, 5)), shape), LAYOUT, assert_trivial=True)


@gluon.jit
def stage_chunk(staged_B, staged_weight, staged_decay, B, dt, dt_after, A):
    """Put B of the rows, what they weigh in the checkpoint, and its decay into shared memory.

    Shapes: [parts, K, rows], [blocks, rows, heads of a block], [blocks, heads of a block]; B, dt and dt_after are those
    of `load_replayed`, A is [heads, 1].
    """
    BLOCKS: gl.constexpr = staged_weight.shape[0]
    ROWS: gl.constexpr = staged_weight.shape[1]
    HW: gl.constexpr = staged_weight.shape[2]
    later = gl.associative_scan(dt_after, 1, add, reverse=True)
    weight = gl.permute(gl.reshape(gl.exp(A * later) * dt, [BLOCKS, HW, ROWS]), [0, 2, 1])
    view(staged_weight, [BLOCKS, ROWS, HW], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])).store(weight)
    decay = gl.exp(gl.max(A + 0.0 * dt, 1) * gl.sum(dt, 1))
    view(staged_decay, [BLOCKS * HW], gl.SwizzledSharedLayout(1, 1, 1, [0])).store(decay)
    parts = parts_of(in_operand_order(B))
    for part in gl.static_range(len(parts)):
        staged_B.index(part).permute((1, 0)).store(parts[part])


@gluon.jit
def replay_chunk(
    tile, x, staged_x, staged_B, staged_weight, staged_decay, block, state_ptr, state_head, MMA: gl.constexpr
):
    """Replay the staged rows into a tile of a checkpoint of 16 bits, in shared memory and in memory.

    x: [rows, heads, V] of the staged rows, zero where there are none.
    """
    HW: gl.constexpr = tile.shape[0]
    BV: gl.constexpr = tile.shape[1]
    N: gl.constexpr = tile.shape[2]
    ROWS: gl.constexpr = x.shape[0]
    PARTS: gl.constexpr = staged_B.shape[0]
    LX: gl.constexpr = x.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 4)
    LS: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    LH: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LS))
    weight = staged_weight.index(block).load(gl.SliceLayout(2, LX))
    rows = view(staged_x, [ROWS, HW, BV], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    rows.store(gl.expand_dims(weight, 2) * x.to(gl.float32))
    left = parts_of(rows.permute((1, 2, 0)).load(LEFT))
    decay = staged_decay.index(block).load(gl.SliceLayout(1, gl.SliceLayout(2, MMA)))
    decay = gl.expand_dims(gl.expand_dims(decay, 1), 2)
    h = gl.expand_dims(gl.expand_dims(gl.arange(0, HW, layout=LH), 1), 2)
    v = gl.arange(0, BV, layout=gl.SliceLayout(0, gl.SliceLayout(2, LS)))
    k = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, LS)))
    at = gl.expand_dims(gl.expand_dims(v * N, 0), 2) + gl.expand_dims(gl.expand_dims(k, 0), 1)
    ptrs = state_ptr + (h * state_head + at)
    for c in gl.static_range(N // WIDTH):
        right = ()
        for part in gl.static_range(PARTS):
            B = staged_B.index(part).slice(c * WIDTH, WIDTH).permute((1, 0)).load(gl.SliceLayout(0, RIGHT))
            B, _ = gl.broadcast(gl.expand_dims(B, 0), gl.zeros([HW, 1, 1], gl.bfloat16, layout=RIGHT))
            right = right + (B,)
        added = products(left, right, gl.zeros([HW, BV, WIDTH], gl.float32, layout=MMA))
        piece = tile.slice(c * WIDTH, WIDTH, 2)
        S = reorder(piece.load(LS), MMA).to(gl.float32)
        S, scale = gl.broadcast(S, decay)
        S = reorder(gl.fma(S, scale, added).to(tile.dtype), LS)
        gl.store(ptrs + c * WIDTH, S)
        piece.store(S)
