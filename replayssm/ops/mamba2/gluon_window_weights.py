"""What the rows of the ring and of the window weigh in the outputs of a Mamba-2 window."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_window_parts import add, ancestor_bits, nearest_tf32, sees, tables_layout, wrap
from replayssm.ops.mamba2.gluon_names import view
from replayssm.ops.mamba2.gluon_parts import softplus


@gluon.jit
def row_dt(
    dt_ptrs, ring_dt_ptrs, bias, age, length, count, start, dt_token, mask_h, R: gl.constexpr, SOFTPLUS: gl.constexpr
):
    """dt of rows by age for every head, [heads, rows]: the window's, processed here, then the ring's; 0 elsewhere."""
    new = mask_h & gl.expand_dims((age >= 0) & (age < length), 0)
    old = mask_h & gl.expand_dims((age >= length) & (age < count), 0)
    position = wrap(start + count - 1 - age, R)
    fresh = (
        gl.load(dt_ptrs + gl.expand_dims((length - 1 - age) * dt_token, 0), mask=new, other=0.0).to(gl.float32) + bias
    )
    if SOFTPLUS:
        fresh = softplus(fresh)
    kept = gl.load(ring_dt_ptrs + gl.expand_dims(position, 0), mask=old, other=0.0)
    return gl.where(new, fresh, kept)


@gluon.jit
def fill_tables(
    weight_at, scale_at, score_at, dt_at, A_ptr, D_ptr, parents_ptr, length, count, num_tiles, PER_HEAD: gl.constexpr,
    HEADS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, TREE: gl.constexpr, HAS_D: gl.constexpr,
):  # fmt: skip
    """From the scores [rows, tokens] and dt (of each row, and of the row after it) [2, heads, rows]:

    weight_at [heads, tokens, rows]: what x of each row weighs in each token's output; scale_at [heads, tokens]: the
    decay of the checkpoint.
    """
    L: gl.constexpr = tables_layout(ROWS, gl.num_warps())
    LT: gl.constexpr = gl.SliceLayout(2, L)
    LR: gl.constexpr = gl.SliceLayout(1, L)
    L2: gl.constexpr = gl.SliceLayout(0, L)
    h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, LT))
    mask = h * PER_HEAD < num_tiles
    A = gl.load(A_ptr + h, mask=mask, other=0.0)
    D = gl.load(D_ptr + h, mask=mask, other=0.0).to(gl.float32) if HAS_D else A * 0.0
    bits = ancestor_bits(parents_ptr, length, gl.arange(0, TOKENS, layout=gl.SliceLayout(1, L2)), TREE, TOKENS)
    age = gl.arange(0, ROWS, layout=gl.SliceLayout(0, L2))
    seen = gl.expand_dims(sees(bits, age, length, count), 0)
    seen_after = gl.expand_dims(sees(bits, age - 1, length, count), 0)
    dt = gl.expand_dims(dt_at.index(0).load(LR), 1)
    dt_after = gl.expand_dims(dt_at.index(1).load(LR), 1)
    # Suffix sums of dt along the token's path, never differences: their error is relative to the exponent that matters.
    later = gl.associative_scan(gl.where(seen_after, dt_after, 0.0), 2, add)
    total = gl.sum(gl.where(seen, dt, 0.0), 2)
    score = gl.expand_dims(score_at.permute((1, 0)).load(L2), 0)
    weight = gl.exp(gl.expand_dims(gl.expand_dims(A, 1), 2) * later) * dt * score
    token = gl.expand_dims(gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, LT)), 0), 2)
    age = gl.expand_dims(gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, LR)), 0), 1)
    skip = gl.where(length - 1 - age == token, gl.expand_dims(gl.expand_dims(D, 1), 2), 0.0)
    weight = gl.where(seen, weight, 0.0) + skip
    view(weight_at, [HEADS, TOKENS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])).store(nearest_tf32(weight))
    scale = gl.exp(gl.expand_dims(A, 1) * total)
    view(scale_at, [HEADS, TOKENS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(scale)
