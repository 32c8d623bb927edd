"""GDN: what the tiles of a flushing program share in the chunk form."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_window_fold import load_parts, stage_inverse, to_key_order, to_update_order
from replayssm.ops.gluon_chunk import parts_of, products, triangle_layout
from replayssm.ops.gluon_window_parts import add, mma_layout
from replayssm.ops.mamba2.gluon_names import view


@gluon.jit
def stage_keys(keys, keys_at, KW: gl.constexpr):
    """Raw keys [rows, K] as operands of the product with a tile; keys that are one part lie at keys_at already."""
    parts = parts_of(keys)
    if len(parts) > 1:
        for i in gl.static_range(len(parts)):
            keys_at[i].store(to_key_order(parts[i], KW))


@gluon.jit
def stage_updates(keys, updates_at, KW: gl.constexpr):
    """Raw keys [rows, K] as what U multiplies."""
    parts = parts_of(keys)
    for i in gl.static_range(len(parts)):
        updates_at[i].store(to_update_order(parts[i], KW))


@gluon.jit
def gdn_inverse(
    keys_at, norm_at, own, beta, grown_at, inverse_at,
    HEADS: gl.constexpr, ROWS: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """inverse_at of `stage_inverse` from the staged keys and, [heads, rows], the rows' log decays and betas.

    Also to shared memory: decays of the checkpoint to each row (grown).
    """
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    L: gl.constexpr = triangle_layout(ROWS, gl.num_warps())
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pair_at = gl.allocate_shared_memory(gl.float32, [ROWS, ROWS], PLAIN)
    coef_at = gl.allocate_shared_memory(gl.float32, [ROWS * HEADS * ROWS], FLAT)
    beta_at = gl.allocate_shared_memory(gl.float32, [HEADS * ROWS], FLAT)
    gate_at = gl.allocate_shared_memory(gl.float32, [HEADS * ROWS], FLAT)
    view(gate_at, [HEADS, ROWS], PLAIN).store(own)
    view(grown_at, [HEADS, ROWS], PLAIN).store(gl.exp(gl.associative_scan(own, 1, add)))
    view(beta_at, [HEADS, ROWS], PLAIN).store(beta)
    pair = gl.zeros([ROWS, ROWS], gl.float32, layout=MMA)
    for c in gl.static_range(K // 64):
        left = load_parts(keys_at, c, 64, gl.DotOperandLayout(0, MMA, 2), False)
        right = load_parts(keys_at, c, 64, gl.DotOperandLayout(1, MMA, 2), True)
        pair += products(left, right, gl.zeros([ROWS, ROWS], gl.float32, layout=MMA))
    pair_at.store(pair)
    IN_I: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, L))
    IN_J: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, L))
    i = gl.expand_dims(gl.arange(0, ROWS, layout=IN_I), 1)
    j = gl.expand_dims(gl.arange(0, ROWS, layout=IN_J), 0)
    norm = norm_at.slice(0, ROWS)
    pair = pair_at.load(gl.SliceLayout(0, L)) * gl.expand_dims(norm.load(IN_I), 1) * gl.expand_dims(norm.load(IN_J), 0)
    pair = gl.where(i > j, pair, 0.0)
    gates = gl.expand_dims(view(gate_at, [HEADS, ROWS], PLAIN).load(gl.SliceLayout(2, L)), 2)
    of_row = gl.expand_dims(view(beta_at, [HEADS, ROWS], PLAIN).load(gl.SliceLayout(2, L)), 2)
    # Sums of the gates after j up to i, never differences.
    fade = gl.exp(gl.associative_scan(gl.where(gl.expand_dims(i > j, 0), gates, 0.0), 1, add))
    stage_inverse(gl.expand_dims(pair, 0) * fade * of_row, beta_at, coef_at, inverse_at, HEADS, ROWS)
