"""KDA's flush in chunk form: as `gluon_chunk_gdn`, with a decay for every column of the checkpoint.

The decays lie inside the products over K, so they go to the keys, in fp32: with F_j = e^G_j k_j for the sums of the
gates up to row j and L_j = e^(G_T - G_j) k_j for those after it, W = S F^T, u = (I + A)^-1 beta (v - W), and the state
is S e^G_T + u L^T.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_chunk_gdn import load_keys, replay_piece, seen_by_rows, stage_solution
from replayssm.ops.delta.gluon_common import add, inverse_norm, row_of, table, view_as, wrap
from replayssm.ops.delta.gluon_read_codes import as_shape
from replayssm.ops.delta.gluon_window_kda import channels_layout
from replayssm.ops.gluon_chunk import (
    PIECE,
    in_chunk_order,
    left_parts,
    products,
    rows_shared,
    split3,
    stage_parts,
    triangle_layout,
    unit_lower_inverse,
)
from replayssm.ops.gluon_window_parts import mma_layout


@gluon.jit
def load_gates(ring_g, start, count, ring_len, K: gl.constexpr, ROWS: gl.constexpr):
    """Log decays of the committed rows, the oldest first: [rows, K], a column a thread."""
    L: gl.constexpr = channels_layout(ROWS, gl.num_warps())
    t = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    inner = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, L)), 0)
    row = gl.expand_dims(wrap(start + gl.minimum(t, count), ring_len) * K, 1)
    return gl.load(ring_g + (row + inner), mask=gl.expand_dims(t < count, 1), other=0.0)


@gluon.jit
def score_pairs(gram_at, unit_at, fade_at, count, K: gl.constexpr, ROWS: gl.constexpr):
    """gram_at [rows i, rows j], j < i < count: the sum over K of k_i k_j and the decays of the rows after j up to i.

    unit_at, fade_at [rows * K]: keys and decays of the rows. A row's key fades as i goes on, as a state does: all
    factors are at most 1. Returns the keys as faded in the end.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    IN_K: gl.constexpr = gl.SliceLayout(0, L)
    j = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    faded = table(unit_at, ROWS, K).load(L)
    for i in range(1, count):
        fade = gl.expand_dims(row_of(fade_at, i, ROWS, K).load(IN_K), 0)
        faded = gl.where(gl.expand_dims(j < i, 1), faded * fade, faded)
        key = gl.expand_dims(row_of(unit_at, i, ROWS, K).load(IN_K), 0)
        row_of(gram_at, i, ROWS, ROWS).store(gl.sum(faded * key, 1))
    return faded


@gluon.jit
def kda_chunk_rows(
    ring_k, ring_g, ring_beta, start, count, ring_len, K: gl.constexpr, ROWS: gl.constexpr, NORM: gl.constexpr,
    WIDTH: gl.constexpr = PIECE, spare=None,
):
    """What the tiles of a head share: F and L [rows, K], and in shared memory solve_at and last_at.

    solve_at: the parts of ((I + A)^-1)_sj beta_j [3 parts, rows j, rows s]; last_at: e^G_T in chunk order [K]. spare:
    shared memory of 2 rows K words, or more, which is free again afterwards.
    """
    LK: gl.constexpr = channels_layout(ROWS, gl.num_warps())
    L: gl.constexpr = triangle_layout(ROWS, gl.num_warps())
    IN_I: gl.constexpr = gl.SliceLayout(2, L)
    IN_J: gl.constexpr = gl.SliceLayout(1, L)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    solve_at = gl.allocate_shared_memory(gl.bfloat16, [3, ROWS, ROWS], PLAIN)
    last_at = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    if spare is None:
        unit_at = gl.allocate_shared_memory(gl.float32, [ROWS * K], FLAT)
        fade_at = gl.allocate_shared_memory(gl.float32, [ROWS * K], FLAT)
    else:
        unit_at = spare.slice(0, ROWS * K)
        fade_at = spare.slice(ROWS * K, ROWS * K)
    gram_at = gl.allocate_shared_memory(gl.float32, [ROWS * ROWS], FLAT)
    coef_at = gl.allocate_shared_memory(gl.float32, [ROWS, 1, ROWS], PLAIN)
    gates = load_gates(ring_g, start, count, ring_len, K, ROWS)
    keys = load_keys(ring_k, start, count, ring_len, K, ROWS).to(gl.float32)
    table(unit_at, ROWS, K).store(keys * gl.expand_dims(inverse_norm(keys, 1, NORM), 1))
    table(fade_at, ROWS, K).store(gl.exp(gates))
    last = in_chunk_order(gl.expand_dims(gl.exp(gl.sum(gates, 0)), 0), WIDTH)
    last_at.store(gl.reshape(last, [K]))
    left = score_pairs(gram_at, unit_at, fade_at, count, K, ROWS)
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(0, IN_I))
    j = gl.arange(0, ROWS, layout=gl.SliceLayout(0, IN_J))
    beta_i = gl.load(ring_beta + wrap(start + gl.minimum(i, count), ring_len), mask=i < count, other=0.0)
    beta_j = gl.load(ring_beta + wrap(start + gl.minimum(j, count), ring_len), mask=j < count, other=0.0)
    lower = gl.expand_dims(gl.expand_dims((i < count), 0), 2) & (
        gl.expand_dims(gl.expand_dims(i, 0), 2) > gl.expand_dims(gl.expand_dims(j, 0), 1)
    )
    A = gl.expand_dims(table(gram_at, ROWS, ROWS).load(gl.SliceLayout(0, L)), 0)
    A = gl.where(lower, A * gl.expand_dims(gl.expand_dims(0.0 - beta_i, 0), 2), 0.0)
    view_as(coef_at, gl.float32, ROWS, ROWS, PLAIN).store(gl.reshape(gl.permute(A, (2, 0, 1)), [ROWS, ROWS]))
    if ROWS > 16:
        beta_at = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)
        beta_at.store(beta_j)
        stage_solution(solve_at, coef_at, None, beta_at, 1, ROWS)
    else:
        X = unit_lower_inverse(coef_at, 1, ROWS) * gl.expand_dims(gl.expand_dims(beta_j, 0), 1)
        parts = split3(gl.permute(X, (0, 2, 1)))
        for p in gl.static_range(3):
            solve_at.index(p).store(gl.reshape(parts[p], [ROWS, ROWS]))
    unit = table(unit_at, ROWS, K).load(LK)
    # The gates are read again, as registers are short.
    gates = load_gates(ring_g, start, count, ring_len, K, ROWS)
    return unit * gl.exp(gl.associative_scan(gates, 0, add)), left, solve_at, last_at


@gluon.jit
def kda_chunk_tables(
    ring_k, ring_g, ring_beta, start, count, ring_len, K: gl.constexpr, ROWS: gl.constexpr, NORM: gl.constexpr,
    WIDTH: gl.constexpr = PIECE, spare=None,
):
    """`kda_chunk_rows` in shared memory: F and L as bf16 parts in chunk order [3, rows, K]."""
    fresh, left, solve_at, last_at = kda_chunk_rows(
        ring_k, ring_g, ring_beta, start, count, ring_len, K, ROWS, NORM, WIDTH, spare
    )
    # After the last use of what came before, whose space they may take.
    fresh_at = gl.allocate_shared_memory(gl.bfloat16, [3, ROWS, K], rows_shared())
    if spare is None:
        left_at = gl.allocate_shared_memory(gl.bfloat16, [3, ROWS, K], rows_shared())
    else:
        left_at = as_shape(spare, gl.bfloat16, [3, ROWS, K], rows_shared())
    stage_parts(fresh_at, fresh, WIDTH)
    stage_parts(left_at, left, WIDTH)
    return fresh_at, left_at, solve_at, last_at


@gluon.jit
def kda_replay_chunks(S, v, fresh_at, left_at, last_at, solve, K: gl.constexpr):
    """Fold the staged rows into a tile; as `gluon_chunk_gdn.replay_chunks`."""
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    zero = gl.zeros(v.shape, gl.float32, layout=MMA)
    W = seen_by_rows(S, fresh_at, 0, zero, MMA)
    left = left_parts(products(left_parts(v - W, MMA), solve, zero), MMA)
    new = ()
    for c in gl.static_range(K // PIECE):
        last = gl.expand_dims(last_at.slice(c * PIECE, PIECE).load(gl.SliceLayout(0, MMA)), 0)
        new = new + (replay_piece(S[c], left, left_at, c, last, MMA),)
    return new
