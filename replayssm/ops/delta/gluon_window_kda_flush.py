"""KDA: what the tiles of a flushing program share in the chunk form."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_common import row_of, table
from replayssm.ops.delta.gluon_window_channels import fade_rows, load_rows, stack
from replayssm.ops.delta.gluon_window_fold import stage_inverse, to_key_order, to_update_order
from replayssm.ops.gluon_chunk import split3, triangle_layout
from replayssm.ops.mamba2.gluon_names import view


@gluon.jit
def stage_decayed_keys(
    space, operands_at, updates_at, through_at, ROWS: gl.constexpr, K: gl.constexpr, KW: gl.constexpr
):
    """Keys as operands of both products, tuples of [rows, K]: decayed from the checkpoint on, and to the last row.

    through_at [K]: the checkpoint's decay. The operands go where keys and decays (`channel_space`) lie.
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
        operands_at[i].store(to_key_order(grown[i], KW))
        updates_at[i].store(to_update_order(faded[i], KW))
    through_at.store(through)


@gluon.jit
def score_pairs(space, pair_at, ROWS: gl.constexpr, K: gl.constexpr):
    """pair_at [rows i, rows j], j < i: the sum over K of both rows' keys and the decays of the rows after j up to i.

    Each row's key decays from row j on to it, by factors of at most 1, as the recurrence does. In two halves of the
    rows, so that the younger half takes all decays of the older rows without a choice.
    """
    WARPS: gl.constexpr = gl.num_warps()
    HALF: gl.constexpr = ROWS // 2
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
    # A thread has the products of all rows j, so that they are stored at once.
    LJ: gl.constexpr = gl.BlockedLayout([1, ROWS], [2, 16], [WARPS, 1], [1, 0])
    i = gl.arange(0, HALF, layout=gl.SliceLayout(1, L))
    rows = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, LJ)), 0)
    keys_at = table(space.index(0), ROWS, K)
    laters = (keys_at.slice(0, HALF).load(L), keys_at.slice(HALF, HALF).load(L))
    none = gl.zeros([HALF, ROWS], gl.float32, layout=LJ)
    pairs = (none, none)
    for j in gl.static_range(ROWS - 1, -1, -1):
        key = gl.expand_dims(row_of(space.index(0), j, ROWS, K).load(gl.SliceLayout(0, L)), 0)
        decay = gl.expand_dims(row_of(space.index(1), j, ROWS, K).load(gl.SliceLayout(0, L)), 0)
        new_pairs = ()
        new_laters = ()
        for half in gl.static_range(2):
            pair = pairs[half]
            later = laters[half]
            if half * HALF + HALF > j + 1:
                product = gl.where(i + half * HALF > j, gl.sum(later * key, 1), 0.0)
                product = gl.convert_layout(product, gl.SliceLayout(1, LJ))
                pair = gl.where(rows == j, gl.expand_dims(product, 1), pair)
            if half * HALF >= j:
                later *= decay
            elif half * HALF + HALF > j:
                later *= gl.where(gl.expand_dims(i, 1) + half * HALF >= j, decay, 1.0)
            new_pairs = new_pairs + (pair,)
            new_laters = new_laters + (later,)
        pairs = new_pairs
        laters = new_laters
    pair_at.slice(0, HALF).store(pairs[0])
    pair_at.slice(HALF, HALF).store(pairs[1])


@gluon.jit
def kda_inverse(space, beta, inverse_at, ROWS: gl.constexpr, K: gl.constexpr):
    """inverse_at of `stage_inverse` from the keys and decays of `channel_space`; beta [1, rows]."""
    WARPS: gl.constexpr = gl.num_warps()
    L: gl.constexpr = triangle_layout(ROWS, WARPS)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    pair_at = gl.allocate_shared_memory(gl.float32, [ROWS, ROWS], PLAIN)
    beta_at = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)
    view(beta_at, [1, ROWS], PLAIN).store(beta)
    coef_at = gl.allocate_shared_memory(gl.float32, [ROWS * ROWS], FLAT)
    score_pairs(space, pair_at, ROWS, K)
    pair = pair_at.load(gl.SliceLayout(0, L))
    beta = gl.expand_dims(view(beta_at, [1, ROWS], PLAIN).load(gl.SliceLayout(2, L)), 2)
    stage_inverse(gl.expand_dims(pair, 0) * beta, beta_at, coef_at, inverse_at, 1, ROWS)
