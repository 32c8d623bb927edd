"""The chunk form of a flush in the Mamba-2 kernels with read copies: the rows' outer products as one product.

S = e^{G} S_0 + sum_j (e^{G - G_j} dt_j x_j) B_j': the left factor is fp32 and goes in as three bf16 parts, B as it is.
A band is 16 V-rows of a head, its columns divided among the warps. The accumulators' columns stand for K in an order in
which a thread owns neighbours; rows of the ring are named by age, and any order of them will do.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_chunk import parts_of, products
from replayssm.ops.gluon_window_parts import wrap
from replayssm.ops.mamba2.gluon_names import barrier
from replayssm.ops.mamba2.gluon_read_flush import vectors_layout

PIECE = gl.constexpr(16)  # rows of the ring in one step of the tensor cores


@gluon.constexpr_function
def chunk_band_layout(d_state, warps):
    """[16, K]: a thread holds K / warps / 4 neighbours of two V-rows, as the accumulators of `columns_mma` do."""
    width = d_state // warps
    return gl.DistributedLinearLayout(
        reg_bases=[*([0, 1 << i] for i in range((width // 4).bit_length() - 1)), [8, 0]],
        lane_bases=[[0, width // 4], [0, width // 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, width << i] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[16, d_state],
    )


@gluon.constexpr_function
def columns_mma(warps):
    """Accumulators [16, K], the warps side by side along K."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, warps], instr_shape=[16, 8])


@gluon.jit
def in_column_order(x):
    """[rows, K] in the order of the accumulators' columns."""
    ROWS: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    x = gl.reshape(x, [ROWS, WARPS, 4, N // (8 * WARPS), 2])
    return gl.reshape(gl.permute(x, (0, 3, 1, 2, 4)), [ROWS, N])


@gluon.jit
def from_column_order(x, LAYOUT: gl.constexpr):
    """What `in_column_order` undoes; no data moves."""
    ROWS: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    x = gl.reshape(x, [ROWS, N // (8 * WARPS), WARPS, 4, 2])
    return gl.convert_layout(gl.reshape(gl.permute(x, (0, 2, 3, 1, 4)), [ROWS, N]), LAYOUT, assert_trivial=True)


@gluon.jit
def weigh_piece(committed, first, start, A, before, ring_dt_ptr, R: gl.constexpr):
    """e^{G - G_j} dt_j of 16 rows from age `first` on, and the sum of dt up to them; of younger ones it is `before`.

    Sums over the younger rows, never differences.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    age = gl.expand_dims(gl.arange(0, PIECE, layout=gl.SliceLayout(1, L)), 1)
    other = gl.expand_dims(gl.arange(0, PIECE, layout=gl.SliceLayout(0, L)), 0)
    time = committed - 1 - first - other
    dt = gl.load(ring_dt_ptr + wrap(start + time, R), mask=time >= 0, other=0.0)
    later = before + gl.sum(gl.where(other < age, dt, 0.0), 1)
    own = gl.sum(gl.where(other == age, dt, 0.0), 1)
    return gl.exp(A * later) * own, gl.max(later + own, 0)


@gluon.jit
def stage_piece(
    staged_U, staged_B, piece, weight, committed, start, ring_x_ptr, ring_B_ptr,
    P: gl.constexpr, N: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """Put the parts of the left factor and of B into shared memory [pieces parts, rows, ...]."""
    WIDTH: gl.constexpr = staged_U.shape[2]
    LX: gl.constexpr = vectors_layout(WIDTH, 16, gl.num_warps())
    LB: gl.constexpr = vectors_layout(N, 16, gl.num_warps())
    time = committed - 1 - piece * PIECE - gl.arange(0, PIECE, layout=gl.SliceLayout(1, LX))
    v = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LX)), 0)
    time_B = committed - 1 - piece * PIECE - gl.arange(0, PIECE, layout=gl.SliceLayout(1, LB))
    k = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, LB)), 0)
    x_ptrs = ring_x_ptr + gl.expand_dims(wrap(time + start, R) * P, 1) + v
    x = gl.load(x_ptrs, mask=gl.expand_dims(time >= 0, 1) & (v < P), other=0.0)
    B_ptrs = ring_B_ptr + gl.expand_dims(wrap(time_B + start, R) * N, 1) + k
    B = gl.load(B_ptrs, mask=gl.expand_dims(time_B >= 0, 1), other=0.0)
    weight = gl.expand_dims(gl.convert_layout(weight, gl.SliceLayout(1, LX)), 1)
    left, right = parts_of(weight * x.to(gl.float32)), parts_of(B)
    for i in gl.static_range(len(left)):
        staged_U.index(piece * len(left) + i).store(left[i])
    for i in gl.static_range(len(right)):
        staged_B.index(piece * len(right) + i).store(in_column_order(right[i]))


@gluon.jit
def stage_chunk(
    staged_U, staged_B, start, committed, A, ring_x_ptr, ring_B_ptr, ring_dt_ptr,
    P: gl.constexpr, N: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """Stage all committed rows; returns the checkpoint's decay."""
    total = A * 0.0
    for piece in range((committed + PIECE - 1) // PIECE):
        weight, total = weigh_piece(committed, piece * PIECE, start, A, total, ring_dt_ptr, R)
        stage_piece(staged_U, staged_B, piece, weight, committed, start, ring_x_ptr, ring_B_ptr, P, N, R)
    barrier()
    return gl.exp(A * total)


@gluon.jit
def replay_band(
    S, number: gl.constexpr, staged_U, staged_B, pieces, decay, PARTS_U: gl.constexpr, PARTS_B: gl.constexpr
):
    """A band of the checkpoint in fp32 with all committed rows in it."""
    MMA: gl.constexpr = columns_mma(gl.num_warps())
    L: gl.constexpr = S.type.layout
    added = gl.zeros(S.shape, gl.float32, layout=MMA)
    for piece in range(pieces):
        left, right = (), ()
        for part in gl.static_range(PARTS_U):
            rows = staged_U.index(piece * PARTS_U + part).slice(number * 16, 16, dim=1).permute((1, 0))
            left = left + (rows.load(gl.DotOperandLayout(0, MMA, 2)),)
        for part in gl.static_range(PARTS_B):
            right = right + (staged_B.index(piece * PARTS_B + part).load(gl.DotOperandLayout(1, MMA, 2)),)
        added = products(left, right, added)
    return gl.fma(S, decay, from_column_order(added, L))
