"""The chunk form of a flush in the Mamba-2 kernels with read copies: the rows' outer products as one product.

S = e^{G} S_0 + sum_j (e^{G - G_j} dt_j x_j) B_j': the left factor is fp32 and goes in as three bf16 parts, B as it is.
A band is 16 V-rows of a head, its columns divided among the warps. The accumulators' columns stand for K in an order in
which a thread owns neighbours; rows of the ring are named by age, and any order of them will do.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_chunk import parts_of, products, rows_shared
from replayssm.ops.gluon_window_parts import add, wrap
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


@gluon.constexpr_function
def spans_of(head_dim):
    """V-rows of a head as powers of two, the largest first: tiles of shared memory without padding."""
    return [1 << i for i in range(head_dim.bit_length() - 1, -1, -1) if head_dim >> i & 1]


@gluon.constexpr_function
def first_of(head_dim, index):
    """The first V-row of a span."""
    return sum(spans_of(head_dim)[:index])


@gluon.constexpr_function
def span_at(head_dim, v):
    """The span in which V-row v lies, and its place there."""
    spans = spans_of(head_dim)
    index = 0
    while v >= spans[index]:
        v -= spans[index]
        index += 1
    return index, v


@gluon.constexpr_function
def pieces_of(ring_len):
    """Pieces of the rows that a ring may hold beside a new token."""
    return (ring_len + 14) // 16


@gluon.jit
def stage_memory(P: gl.constexpr, R: gl.constexpr):
    """Shared memory for the parts of the left factor, a tensor for each span of V-rows."""
    SPANS: gl.constexpr = spans_of(P)
    staged = ()
    for i in gl.static_range(len(SPANS)):
        staged = staged + (gl.allocate_shared_memory(gl.bfloat16, [pieces_of(R) * 3, PIECE, SPANS[i]], rows_shared()),)
    return staged


@gluon.jit
def load_rows_dt(ring_dt_ptr, committed, first, start, R: gl.constexpr):
    """dt of 16 rows from age `first` on, [16, 1], and of the rows younger by one; zeros where there is none."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, gl.num_warps()], [0, 1])
    age = gl.expand_dims(gl.arange(0, PIECE, layout=gl.SliceLayout(1, L)), 1)
    time = committed - 1 - first - age
    own = gl.load(ring_dt_ptr + wrap(start + time, R), mask=time >= 0, other=0.0, volatile=True)
    inside = (time >= 0) & (age > 0)
    return own, gl.load(ring_dt_ptr + wrap(start + time + 1, R), mask=inside, other=0.0, volatile=True)


@gluon.jit
def weigh_piece(own, younger, A, before):
    """e^{G - G_j} dt_j of 16 rows, and the sum of dt up to them; of those younger than all it is `before`.

    Sums over the younger rows, never differences.
    """
    later = before + gl.associative_scan(younger, 0, add)
    return gl.exp(A * later) * own, before + gl.sum(gl.sum(own, 0), 0)


@gluon.jit
def load_rows(
    ring_ptr, committed, start, FIRST: gl.constexpr, WIDTH: gl.constexpr, LENGTH: gl.constexpr, R: gl.constexpr
):
    """Columns from FIRST on of 16 ring rows of LENGTH, by age from the youngest of `committed` on; zeros past them."""
    L: gl.constexpr = vectors_layout(WIDTH, 16, gl.num_warps())
    time = committed - 1 - gl.arange(0, PIECE, layout=gl.SliceLayout(1, L))
    column = gl.expand_dims(FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L)), 0)
    ptrs = ring_ptr + gl.expand_dims(wrap(time + start, R) * LENGTH, 1) + column
    return gl.load(ptrs, mask=gl.expand_dims(time >= 0, 1), other=0.0)


@gluon.jit
def stage_piece(
    staged_U, staged_B, piece, start, committed, A, before, ring_x_ptr, ring_B_ptr, ring_dt_ptr,
    P: gl.constexpr, N: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """Put 16 rows into shared memory: the parts of the left factor and of B, [pieces parts, rows, ...].

    Returns the sum of dt up to them. All is asked for, and held back behind a barrier, before anything is waited for.
    """
    SPANS: gl.constexpr = spans_of(P)
    rest = committed - piece * PIECE
    own, younger = load_rows_dt(ring_dt_ptr, committed, piece * PIECE, start, R)
    B = load_rows(ring_B_ptr, rest, start, 0, N, N, R)
    x = ()
    for i in gl.static_range(len(SPANS)):
        x = x + (load_rows(ring_x_ptr, rest, start, first_of(P, i), SPANS[i], P, R),)
    barrier()
    weight, total = weigh_piece(own, younger, A, before)
    parts = parts_of(B)
    for i in gl.static_range(len(parts)):
        staged_B.index(piece * len(parts) + i).store(in_column_order(parts[i]))
    for i in gl.static_range(len(SPANS)):
        own_weight = gl.convert_layout(weight, x[i].type.layout)
        left = parts_of(own_weight * x[i].to(gl.float32))
        for part in gl.static_range(len(left)):
            staged_U[i].index(piece * len(left) + part).store(left[part])
    return total


@gluon.jit
def stage_chunk(
    staged_U, staged_B, start, committed, A, ring_x_ptr, ring_B_ptr, ring_dt_ptr,
    P: gl.constexpr, N: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """Stage all committed rows; returns the checkpoint's decay."""
    total = A * 0.0
    if pieces_of(R) == 1:
        total = stage_piece(
            staged_U, staged_B, 0, start, committed, A, total, ring_x_ptr, ring_B_ptr, ring_dt_ptr, P, N, R
        )
    else:
        for piece in range((committed + PIECE - 1) // PIECE):
            total = stage_piece(
                staged_U, staged_B, piece, start, committed, A, total, ring_x_ptr, ring_B_ptr, ring_dt_ptr, P, N, R
            )
    barrier()
    return gl.exp(A * total)


@gluon.jit
def add_piece(added, staged_U, staged_B, piece, first_v: gl.constexpr, PARTS_U: gl.constexpr, PARTS_B: gl.constexpr):
    """Accumulators of a band plus the product of 16 staged rows; V-rows from `first_v` of the span on."""
    MMA: gl.constexpr = added.type.layout
    left, right = (), ()
    for part in gl.static_range(PARTS_U):
        rows = staged_U.index(piece * PARTS_U + part).slice(first_v, 16, dim=1).permute((1, 0))
        left = left + (rows.load(gl.DotOperandLayout(0, MMA, 2)),)
    for part in gl.static_range(PARTS_B):
        right = right + (staged_B.index(piece * PARTS_B + part).load(gl.DotOperandLayout(1, MMA, 2)),)
    return products(left, right, added)


@gluon.jit
def replay_band(
    S, decay, first_v: gl.constexpr, staged_U, staged_B, committed, P: gl.constexpr, R: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """A band of the checkpoint in fp32, times its decay, with all committed rows in it."""
    MMA: gl.constexpr = columns_mma(gl.num_warps())
    L: gl.constexpr = S.type.layout
    AT: gl.constexpr = span_at(P, first_v)
    added = gl.zeros(S.shape, gl.float32, layout=MMA)
    if pieces_of(R) == 1:
        added = add_piece(added, staged_U[AT[0]], staged_B, 0, AT[1], 3, PARTS)
    else:
        for piece in range((committed + PIECE - 1) // PIECE):
            added = add_piece(added, staged_U[AT[0]], staged_B, piece, AT[1], 3, PARTS)
    S, decay = gl.broadcast(S, decay)
    return gl.fma(S, decay, from_column_order(added, L))
