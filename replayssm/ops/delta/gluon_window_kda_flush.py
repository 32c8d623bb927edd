"""KDA: what the tiles of a flushing program share in the chunk form."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_window_fold import stage_inverse, to_update_order
from replayssm.ops.delta.gluon_window_kda import channels_layout
from replayssm.ops.gluon_chunk import split3, triangle_layout
from replayssm.ops.gluon_window_parts import add, wrap
from replayssm.ops.mamba2.gluon_names import view


@gluon.jit
def load_gates(ring_g, start, first: gl.constexpr, committed, ring_len, ROWS: gl.constexpr, K: gl.constexpr):
    """Log decays [rows, K] of the committed rows from number `first` on; 0 past the last."""
    L: gl.constexpr = channels_layout(ROWS, gl.num_warps())
    j = gl.expand_dims(first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L)), 1)
    c = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, L)), 0)
    return gl.load(ring_g + (wrap(start + j, ring_len) * K + c), mask=j < committed, other=0.0)


@gluon.jit
def load_normed(raw_at, norm_at, ROWS: gl.constexpr):
    """The committed rows' keys [rows, K], normed."""
    L: gl.constexpr = channels_layout(ROWS, gl.num_warps())
    norm = norm_at.slice(0, ROWS).load(gl.SliceLayout(1, L))
    return raw_at.load(L).to(gl.float32) * gl.expand_dims(norm, 1)


@gluon.jit
def stage_decayed_keys(
    raw_at, norm_at, ring_g, start, committed, ring_len, keys_at, updates_at, through_at, KW: gl.constexpr
):
    """Keys as operands of both products, tuples of [rows, K]: decayed from the checkpoint on, and to the last row.

    through_at [K]: the checkpoint's decay.
    """
    ROWS: gl.constexpr = keys_at[0].shape[0]
    K: gl.constexpr = keys_at[0].shape[1]
    own = load_gates(ring_g, start, 0, committed, ring_len, ROWS, K)
    younger = load_gates(ring_g, start, 1, committed, ring_len, ROWS, K)
    keys = load_normed(raw_at, norm_at, ROWS)
    # Sums along the rows, never differences.
    grown = split3(keys * gl.exp(gl.associative_scan(own, 0, add)))
    faded = split3(keys * gl.exp(gl.associative_scan(younger, 0, add, reverse=True)))
    for i in gl.static_range(3):
        keys_at[i].store(grown[i])
        updates_at[i].store(to_update_order(faded[i], KW))
    through_at.store(gl.exp(gl.sum(own, 0)))


@gluon.jit
def kda_inverse(
    raw_at, norm_at, ring_g, start, committed, ring_len, beta, inverse_at, ROWS: gl.constexpr, K: gl.constexpr
):
    """inverse_at of `stage_inverse`; beta [1, rows]."""
    WARPS: gl.constexpr = gl.num_warps()
    L: gl.constexpr = triangle_layout(ROWS, WARPS)
    LP: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # A thread has the products of all rows j, so that they are stored at once.
    LJ: gl.constexpr = gl.BlockedLayout([1, ROWS], [4, 8], [WARPS, 1], [1, 0])
    pair_at = gl.allocate_shared_memory(gl.float32, [ROWS, ROWS], PLAIN)
    beta_at = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)
    view(beta_at, [1, ROWS], PLAIN).store(beta)
    coef_at = gl.allocate_shared_memory(gl.float32, [ROWS * ROWS], FLAT)
    plain_at = gl.allocate_shared_memory(gl.float32, [ROWS, K], FLAT)
    decay_at = gl.allocate_shared_memory(gl.float32, [ROWS, K], FLAT)
    view(decay_at, [ROWS, K], PLAIN).store(gl.exp(load_gates(ring_g, start, 0, committed, ring_len, ROWS, K)))
    view(plain_at, [ROWS, K], PLAIN).store(load_normed(raw_at, norm_at, ROWS))
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LP))
    # Each row's key, decayed from row j on to it: by factors of at most 1, as the recurrence does.
    later = view(plain_at, [ROWS, K], PLAIN).load(LP)
    rows = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, LJ)), 0)
    pair = gl.zeros([ROWS, ROWS], gl.float32, layout=LJ)
    for back in gl.static_range(ROWS):
        j = ROWS - 1 - back
        key = gl.expand_dims(plain_at.index(j).load(gl.SliceLayout(0, LP)), 0)
        product = gl.convert_layout(gl.where(i > j, gl.sum(later * key, 1), 0.0), gl.SliceLayout(1, LJ))
        pair = gl.where(rows == j, gl.expand_dims(product, 1), pair)
        decay = gl.expand_dims(decay_at.index(j).load(gl.SliceLayout(0, LP)), 0)
        later *= gl.where(gl.expand_dims(i, 1) >= j, decay, 1.0)
    pair_at.store(pair)
    pair = pair_at.load(gl.SliceLayout(0, L))
    beta = gl.expand_dims(view(beta_at, [1, ROWS], PLAIN).load(gl.SliceLayout(2, L)), 2)
    stage_inverse(gl.expand_dims(pair, 0) * beta, beta_at, coef_at, inverse_at, 1, ROWS)
