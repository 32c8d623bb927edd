"""GDN's flush in chunk form: all rows of a ring at once, by products that are accurate to fp32.

With W = S k^T of the raw keys, u = (I + A)^-1 beta (v - e^G |k|^-1 W), and the state is e^G S + u k^T. Norms and gates
multiply results, so that the keys stay exact operands. Rows are in the order of time; rows past the committed ones have
keys, gates and beta of zero.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_common import add, row_of, table, view_as, wrap
from replayssm.ops.delta.gluon_read_codes import as_shape
from replayssm.ops.delta.gluon_window_fold import band_layout, inverse_bands
from replayssm.ops.gluon_chunk import (
    PIECE,
    left_parts,
    products,
    right_parts,
    split3,
    stage_parts,
    triangle_layout,
    unit_lower_inverse,
)
from replayssm.ops.gluon_window_parts import heads_layout, mma_layout


@gluon.jit
def load_keys(ring_k, start, count, ring_len, K: gl.constexpr, ROWS: gl.constexpr):
    """The committed rows' raw keys [rows, K], the oldest first."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [gl.num_warps(), 1], [1, 0])
    t = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    inner = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, L)), 0)
    rows = gl.expand_dims(wrap(start + gl.minimum(t, count), ring_len) * K, 1)
    return gl.load(ring_k + (rows + inner), mask=gl.expand_dims(t < count, 1), other=0.0)


@gluon.jit
def stage_keys(keys_at, norm_at, keys, WIDTH: gl.constexpr, NORM: gl.constexpr):
    """Put keys [rows, K], as bf16 parts in chunk order [parts, rows, K], and 1 / their norms into shared memory."""
    stage_parts(keys_at, keys, WIDTH)
    keys = keys.to(gl.float32)
    if NORM:
        norm = gl.rsqrt(gl.sum(keys * keys, 1) + 1e-6)
    else:
        norm = gl.full([keys.shape[0]], 1.0, gl.float32, layout=gl.SliceLayout(1, keys.type.layout))
    norm_at.store(norm)


@gluon.jit
def stage_gates(
    gate_at, beta_at, left_at, through_at, last_at, norm_at, ring_g, ring_beta, start, count, ring_len, stride_rg_head,
    stride_rb_head,
    HEADS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Put what depends on the gates of some v-heads alone into shared memory [heads, rows]; see `chunk_tables`."""
    L: gl.constexpr = heads_layout(gl.num_warps())
    t = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, L)), 0)
    h = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, L)), 1)
    row = wrap(start + gl.minimum(t, count), ring_len)
    next_row = wrap(start + gl.minimum(t + 1, count), ring_len)
    live = (t < count) & (h >= 0)
    gates = gl.load(ring_g + (h * stride_rg_head + row), mask=live, other=0.0)
    later = gl.load(ring_g + (h * stride_rg_head + next_row), mask=live & (t + 1 < count), other=0.0)
    beta = gl.load(ring_beta + (h * stride_rb_head + row), mask=live, other=0.0)
    norm = gl.expand_dims(norm_at.load(gl.SliceLayout(0, L)), 0)
    gate_at.store(gates)
    beta_at.store(beta)
    # Sums of the gates up to a row and after it, each of its own terms.
    left_at.store(gl.exp(gl.associative_scan(later, 1, add, reverse=True)) * norm)
    table(through_at, HEADS, ROWS).store(gl.exp(gl.associative_scan(gates, 1, add)) * norm)
    last_at.store(gl.exp(gl.sum(gates, 1)))


@gluon.jit
def key_products(keys_at, ROWS: gl.constexpr, K: gl.constexpr, MMA: gl.constexpr):
    """Products of all pairs of raw keys [rows, rows]; exact but for the sum."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    PARTS: gl.constexpr = keys_at.shape[0]
    total = gl.zeros([ROWS, ROWS], gl.float32, layout=MMA)
    for c in gl.static_range(K // PIECE):
        left = ()
        for p in gl.static_range(PARTS):
            left = left + (keys_at.index(p).slice(c * PIECE, PIECE, dim=1).load(LEFT),)
        zero = gl.zeros([ROWS, ROWS], gl.float32, layout=MMA)
        total += products(left, right_parts(keys_at, c, True, MMA), zero)
    return total


@gluon.constexpr_function
def pairs_layout(heads, rows, warps):
    """[heads, rows, rows]: as `triangle_layout`; of more than 16 rows, each pair in one thread or in few."""
    if rows <= 16:
        return triangle_layout(rows, warps)
    heads = min(heads, warps)
    return gl.BlockedLayout([1, 8, 1], [1, rows // 8, 256 // rows], [heads, 1, warps // heads], [2, 1, 0])


@gluon.jit
def stage_solution(solve_at, coef_at, left_at, beta_at, HEADS: gl.constexpr, ROWS: gl.constexpr):
    """solve_at as in `chunk_tables` from coef_at: -A [column, heads, row]; left_at, beta_at [heads, rows].

    In bands of four rows: those above the one that is being substituted are left out.
    """
    L: gl.constexpr = band_layout(gl.num_warps())
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    bands = inverse_bands(coef_at, HEADS, ROWS)
    beta = gl.expand_dims(as_shape(beta_at, gl.float32, [HEADS, ROWS], PLAIN).load(gl.SliceLayout(1, L)), 1)
    for band in gl.static_range(ROWS // 4):
        X = bands[band] * beta
        if left_at is not None:
            X *= gl.expand_dims(left_at.slice(4 * band, 4, dim=1).load(gl.SliceLayout(2, L)), 2)
        parts = split3(X)
        for p in gl.static_range(3):
            part_at = as_shape(solve_at.index(p), gl.bfloat16, [HEADS, ROWS, ROWS], CUBE)
            part_at.slice(4 * band, 4, dim=2).permute((0, 2, 1)).store(parts[p])


@gluon.jit
def chunk_tables(
    solve_at, through_at, last_at, keys_at, norm_at, ring_g, ring_beta, start, count, ring_len, stride_rg_head,
    stride_rb_head,
    HEADS: gl.constexpr, ROWS: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """What the tiles of some v-heads of a k-head share, from the staged keys and the heads' gates.

    solve_at [3 parts, heads * rows j, rows s]: e^(G_T - G_s) |k_s|^-1 ((I + A)^-1)_sj beta_j; through_at [heads *
    rows]: e^G_j |k_j|^-1; last_at [heads]: e^G_T.
    """
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    L: gl.constexpr = pairs_layout(HEADS, ROWS, gl.num_warps())
    IN_I: gl.constexpr = gl.SliceLayout(2, L)
    IN_J: gl.constexpr = gl.SliceLayout(1, L)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    gram_at = gl.allocate_shared_memory(gl.float32, [ROWS, ROWS], PLAIN)
    tables_at = gl.allocate_shared_memory(gl.float32, [3, HEADS, ROWS], PLAIN)
    coef_at = gl.allocate_shared_memory(gl.float32, [ROWS, HEADS, ROWS], PLAIN)
    gram_at.store(key_products(keys_at, ROWS, K, MMA))
    gate_at = tables_at.index(0)
    beta_at = tables_at.index(1)
    left_at = tables_at.index(2)
    stage_gates(gate_at, beta_at, left_at, through_at, last_at, norm_at, ring_g, ring_beta, start, count, ring_len,
                stride_rg_head, stride_rb_head, HEADS, ROWS)
    i = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, IN_I)), 0)
    j = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, IN_J)), 0)
    lower = gl.expand_dims(i, 2) > gl.expand_dims(j, 1)
    # Sums over the rows after j up to i, never differences.
    fade = gl.exp(gl.associative_scan(gl.where(lower, gl.expand_dims(gate_at.load(IN_I), 2), 0.0), 1, add))
    gram = gl.expand_dims(gram_at.load(gl.SliceLayout(0, L)), 0)
    norm_i = gl.expand_dims(norm_at.load(gl.SliceLayout(0, IN_I)), 0)
    norm_j = gl.expand_dims(norm_at.load(gl.SliceLayout(0, IN_J)), 0)
    A = fade * gram * gl.expand_dims(beta_at.load(IN_I) * norm_i, 2) * gl.expand_dims(norm_j, 1)
    A = gl.reshape(gl.permute(gl.where(lower, 0.0 - A, 0.0), (2, 0, 1)), [ROWS, HEADS * ROWS])
    view_as(coef_at, gl.float32, ROWS, HEADS * ROWS, PLAIN).store(A)
    if ROWS > 16:
        stage_solution(solve_at, coef_at, left_at, beta_at, HEADS, ROWS)
    else:
        X = unit_lower_inverse(coef_at, HEADS, ROWS)
        X *= gl.expand_dims(left_at.load(IN_I), 2) * gl.expand_dims(beta_at.load(IN_J), 1)
        parts = split3(gl.permute(X, (0, 2, 1)))
        for p in gl.static_range(3):
            solve_at.index(p).store(gl.reshape(parts[p], [HEADS * ROWS, ROWS]))


@gluon.jit
def solve_operands(solve_at, h, HEADS: gl.constexpr, ROWS: gl.constexpr):
    """The parts of a head's solve_at as operands [rows, rows]."""
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, mma_layout(gl.num_warps()), 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    SHAPE: gl.constexpr = [3 * HEADS, ROWS, ROWS]
    heads_at = as_shape(solve_at, gl.bfloat16, SHAPE, PLAIN)
    return (heads_at.index(h).load(RIGHT), heads_at.index(HEADS + h).load(RIGHT),
            heads_at.index(2 * HEADS + h).load(RIGHT))  # fmt: skip


@gluon.jit
def seen_by_rows(S, rows_at, first: gl.constexpr, W, MMA: gl.constexpr):
    """W [V, rows] plus the products of some pieces of a tile, from number `first` on, with the staged rows."""
    for c in gl.static_range(len(S)):
        zero = gl.zeros_like(W)
        W += products(left_parts(S[c], MMA), right_parts(rows_at, first + c, True, MMA), zero)
    return W


@gluon.jit
def replay_piece(S, left, rows_at, piece: gl.constexpr, last, MMA: gl.constexpr):
    """last S + u k^T of a piece, in fp32; left: the parts of u; last: what S fades by, broadcast to S."""
    added = products(left, right_parts(rows_at, piece, False, MMA), gl.zeros(S.shape, gl.float32, layout=MMA))
    last, added = gl.broadcast(last, added)
    return gl.fma(S.to(gl.float32), last, added)


@gluon.jit
def replay_chunks(
    S, v, keys_at, through_at, last_at, solve, h,
    HEADS: gl.constexpr, BLOCK_V: gl.constexpr, ROWS: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Fold the staged rows into a tile: S is a tuple of pieces [BLOCK_V, 32], stored dtype or fp32, as accumulators.

    v [BLOCK_V, rows] fp32, finite: in the accumulators' layout. The others: `chunk_tables`, of which this is head h;
    solve: its `solve_operands`. Returns pieces in fp32.
    """
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    through = row_of(through_at, h, HEADS, ROWS).load(gl.SliceLayout(0, MMA))
    last = gl.expand_dims(row_of(last_at, h, HEADS, 1).load(gl.SliceLayout(1, MMA)), 1)
    zero = gl.zeros([BLOCK_V, ROWS], gl.float32, layout=MMA)
    W = seen_by_rows(S, keys_at, 0, zero, MMA)
    left = left_parts(products(left_parts(v - W * gl.expand_dims(through, 0), MMA), solve, zero), MMA)
    new = ()
    for c in gl.static_range(K // PIECE):
        new = new + (replay_piece(S[c], left, keys_at, c, last, MMA),)
    return new
