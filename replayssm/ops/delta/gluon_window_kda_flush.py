"""KDA: what the tiles of a flushing program share in the chunk form."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_common import row_of, table
from replayssm.ops.delta.gluon_window_channels import fade_rows, load_rows, stack
from replayssm.ops.delta.gluon_window_fold import stage_inverse, to_key_order, to_update_order
from replayssm.ops.delta.gluon_window_tile import store_chunks, tile_of
from replayssm.ops.gluon_chunk import split3, triangle_layout
from replayssm.ops.mamba2.gluon_names import view


@gluon.jit
def stage_decayed_keys(space, operands_at, through_at, ROWS: gl.constexpr, K: gl.constexpr, KW: gl.constexpr):
    """Keys as operands of both products, decayed from the checkpoint on, and to the last row.

    operands_at [6 * chunks, rows, columns]: three parts of each; they go where keys and decays (`channel_space`) lie.
    through_at [K]: the checkpoint's decay.
    """
    faded, through = fade_rows(space, ROWS, K)
    keys = load_rows(space.index(0), ROWS, K)
    decays = load_rows(space.index(1), ROWS, K)
    run = through * 0.0 + 1.0
    grown = ()
    for j in gl.static_range(ROWS):
        run *= decays[j]
        grown = grown + (keys[j] * run,)
    grown = split3(stack(grown))
    faded = split3(stack(faded))
    for i in gl.static_range(3):
        store_chunks(tile_of(operands_at, i, K // (8 * KW)), to_key_order(grown[i], KW))
        store_chunks(tile_of(operands_at, 3 + i, K // (8 * KW)), to_update_order(faded[i], KW))
    through_at.store(through)


@gluon.jit
def pair_row(later, space, j, first, ROWS: gl.constexpr, K: gl.constexpr):
    """Products with row j's key of younger keys [rows from `first` on, K] that have decayed from it on, [rows, 1], and
    the keys with row j's decay where it is not younger than they are."""
    L: gl.constexpr = later.type.layout
    i = first + gl.arange(0, later.shape[0], layout=gl.SliceLayout(1, L))
    key = gl.expand_dims(row_of(space.index(0), j, ROWS, K).load(gl.SliceLayout(0, L)), 0)
    decay = gl.expand_dims(row_of(space.index(1), j, ROWS, K).load(gl.SliceLayout(0, L)), 0)
    pair = gl.where(i > j, gl.sum(later * key, 1), 0.0)
    return gl.expand_dims(pair, 1), later * gl.where(gl.expand_dims(i, 1) >= j, decay, 1.0)


@gluon.jit
def score_pairs(space, pair_at, committed, ROWS: gl.constexpr, K: gl.constexpr):
    """pair_at [rows i, rows j], j < i: the sum over K of both rows' keys and the decays of the rows after j up to i.

    Each row's key decays from row j on to it, by factors of at most 1, as the recurrence does. In two halves of the
    rows, of which the older has no part in the younger's pairs.
    """
    HALF: gl.constexpr = ROWS // 2
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    # A lane has the products with row j, so that they are stored at once.
    LJ: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [gl.num_warps(), 1], [1, 0])
    rows = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, LJ)), 0)
    keys_at = table(space.index(0), ROWS, K)
    old = keys_at.slice(0, HALF).load(L)
    young = keys_at.slice(HALF, HALF).load(L)
    old_pairs = gl.zeros([HALF, ROWS], gl.float32, layout=LJ)
    young_pairs = old_pairs
    # Bounds that the compiler does not fold, so that it does not unroll the loops.
    half = gl.minimum(committed + HALF, HALF)
    for back in range(half):
        j = ROWS - 1 - back
        pair, young = pair_row(young, space, j, HALF, ROWS, K)
        young_pairs = gl.where(rows == j, gl.convert_layout(pair, LJ, assert_trivial=True), young_pairs)
    for back in range(half):
        j = HALF - 1 - back
        pair, young = pair_row(young, space, j, HALF, ROWS, K)
        young_pairs = gl.where(rows == j, gl.convert_layout(pair, LJ, assert_trivial=True), young_pairs)
        pair, old = pair_row(old, space, j, 0, ROWS, K)
        old_pairs = gl.where(rows == j, gl.convert_layout(pair, LJ, assert_trivial=True), old_pairs)
    pair_at.slice(0, HALF).store(old_pairs)
    pair_at.slice(HALF, HALF).store(young_pairs)


@gluon.jit
def kda_inverse(space, beta, inverse_at, committed, ROWS: gl.constexpr, K: gl.constexpr):
    """inverse_at of `stage_inverse` from the keys and decays of `channel_space`; beta [1, rows]."""
    WARPS: gl.constexpr = gl.num_warps()
    L: gl.constexpr = triangle_layout(ROWS, WARPS)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    pair_at = gl.allocate_shared_memory(gl.float32, [ROWS, ROWS], PLAIN)
    beta_at = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)
    view(beta_at, [1, ROWS], PLAIN).store(beta)
    coef_at = gl.allocate_shared_memory(gl.float32, [ROWS * ROWS], FLAT)
    score_pairs(space, pair_at, committed, ROWS, K)
    pair = pair_at.load(gl.SliceLayout(0, L))
    beta = gl.expand_dims(view(beta_at, [1, ROWS], PLAIN).load(gl.SliceLayout(2, L)), 2)
    stage_inverse(gl.expand_dims(pair, 0) * beta, beta_at, coef_at, inverse_at, 1, ROWS)
