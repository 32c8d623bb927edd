"""What the rows of the ring and of the window weigh in the outputs of a Mamba-2 window."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_window_parts import add, ancestor_bits, nearest_tf32, sees, tables_layout, wrap
from replayssm.ops.mamba2.gluon_names import view
from replayssm.ops.mamba2.gluon_parts import softplus


@gluon.jit
def load_dt(dt_ptrs, ring_dt_ptrs, age, length, count, start, dt_token, mask_h, R: gl.constexpr):
    """Of rows by age, [heads, rows]: whether they are the window's, its raw dt, and dt of the ring's; 0 elsewhere."""
    new = mask_h & (age >= 0) & (age < length)
    old = mask_h & (age >= length) & (age < count)
    fresh = gl.load(dt_ptrs + (length - 1 - age) * dt_token, mask=new, other=0.0)
    kept = gl.load(ring_dt_ptrs + wrap(start + count - 1 - age, R), mask=old, other=0.0)
    return new, fresh, kept


@gluon.jit
def hold(x):
    """x, on which the compiler must not wait before it comes here: shuffles stay where they are."""
    return gl.inline_asm_elementwise(
        "shfl.sync.up.b32 $0, $1, 0, 0, 0xffffffff;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1
    )


@gluon.jit
def process_dt(new, fresh, kept, bias, SOFTPLUS: gl.constexpr):
    """dt of what `load_dt` has loaded."""
    fresh = hold(fresh.to(gl.float32)) + bias
    if SOFTPLUS:
        fresh = softplus(fresh)
    return gl.where(new, fresh, kept)


@gluon.jit
def row_dt(
    dt_ptrs, ring_dt_ptrs, bias, age, length, count, start, dt_token, mask_h, R: gl.constexpr, SOFTPLUS: gl.constexpr
):
    """dt of rows by age for every head, [heads, rows]: the window's, processed here, then the ring's; 0 elsewhere."""
    age = gl.expand_dims(age, 0)
    new, fresh, kept = load_dt(dt_ptrs, ring_dt_ptrs, age, length, count, start, dt_token, mask_h, R)
    return process_dt(new, fresh, kept, bias, SOFTPLUS)


@gluon.jit
def load_terms(
    A_ptr, D_ptr, parents_ptr, length, num_heads,
    HEADS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, TREE: gl.constexpr, HAS_D: gl.constexpr,
):  # fmt: skip
    """A and D of the heads, and the window's tokens that each token reads, as bits."""
    L: gl.constexpr = tables_layout(ROWS, gl.num_warps())
    h = gl.arange(0, HEADS, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    t = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, gl.SliceLayout(0, L)))
    A = gl.load(A_ptr + h, mask=h < num_heads, other=0.0)
    D = gl.load(D_ptr + h, mask=h < num_heads, other=0.0).to(gl.float32) if HAS_D else A * 0.0
    return A, D, ancestor_bits(parents_ptr, length, t, TREE, TOKENS)


@gluon.jit
def fill_tables(
    weight_at, scale_at, score_at, dt_at, A_ptr, D_ptr, parents_ptr, length, count, num_heads,
    HEADS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, TREE: gl.constexpr, HAS_D: gl.constexpr,
):  # fmt: skip
    """As `fill_tables_of`, loading what it needs."""
    A, D, bits = load_terms(A_ptr, D_ptr, parents_ptr, length, num_heads, HEADS, ROWS, TOKENS, TREE, HAS_D)
    fill_tables_of(weight_at, scale_at, score_at, dt_at, A, D, bits, length, count, HEADS, ROWS, TOKENS)


@gluon.jit
def fill_tables_of(
    weight_at, scale_at, score_at, dt_at, A, D, bits, length, count,
    HEADS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """From the scores [rows, tokens] and dt (of each row, and of the row after it) [2, heads, rows]:

    weight_at [heads, tokens, rows]: what x of each row weighs in each token's output; scale_at [heads, tokens]: the
    decay of the checkpoint.
    """
    L: gl.constexpr = tables_layout(ROWS, gl.num_warps())
    LT: gl.constexpr = gl.SliceLayout(2, L)
    LR: gl.constexpr = gl.SliceLayout(1, L)
    L2: gl.constexpr = gl.SliceLayout(0, L)
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
