"""Device functions of the Mamba-2 Gluon kernels. Their roundings are those of `triton_math`.

Tiles are [heads, V-rows, K]; L, LX, LW, LB are the layouts of `gluon_layouts` for state, ring x, weights and ring B.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.mamba2.gluon_names import view


@gluon.jit
def softplus(x):
    """See `triton_math.softplus`: the same operations in the same order."""
    u = gl.exp(-gl.abs(x))
    s = u / (u + 2.0)
    q = s * s
    p = gl.fma(q, 1.0 / 15.0, 1.0 / 13.0)
    p = gl.fma(p, q, 1.0 / 11.0)
    p = gl.fma(p, q, 1.0 / 9.0)
    p = gl.fma(p, q, 1.0 / 7.0)
    p = gl.fma(p, q, 1.0 / 5.0)
    p = gl.fma(p, q, 1.0 / 3.0)
    p = gl.fma(p, q, 1.0)
    return gl.fma(s + s, p, gl.maximum(x, 0.0))


@gluon.jit
def heads_of(first, HEADS: gl.constexpr, LW: gl.constexpr):
    """The tile's heads, int64 so that products with strides cannot overflow."""
    return first.to(gl.int64) + gl.arange(0, HEADS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LW)))


@gluon.jit
def load_timestep(dt_ptr, dt_bias_ptr, h, HAS_BIAS: gl.constexpr, SOFTPLUS: gl.constexpr):
    """The processed dt of one token's heads."""
    dt = gl.load(dt_ptr + h).to(gl.float32)
    if HAS_BIAS:
        dt += gl.load(dt_bias_ptr + h).to(gl.float32)
    if SOFTPLUS:
        dt = softplus(dt)
    return dt


@gluon.jit
def positions(first, start, ROWS: gl.constexpr, R: gl.constexpr, layout: gl.constexpr):
    """Ages of a tile's ring rows, `first` and on, and their positions in the ring."""
    r = first + gl.arange(0, ROWS, layout=layout)
    return r, gl.where(r + start >= R, r + (start - R), r + start)


@gluon.jit
def load_ring_B(B_ptr, ring_B_ptr, start, live, ROWS: gl.constexpr, N: gl.constexpr, R: gl.constexpr, LB: gl.constexpr):
    """[ROWS, N] of B: live rows of the ring, then the new token; zeros below."""
    k = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, LB)), 0)
    r, position = positions(0, start, ROWS, R, gl.SliceLayout(1, LB))
    row_ptrs = gl.where(r == live, B_ptr, ring_B_ptr + position * N)
    return gl.load(gl.expand_dims(row_ptrs, 1) + k, mask=gl.expand_dims(r <= live, 1), other=0.0)


@gluon.jit
def load_ring_dt(dt_ptrs, start, live, ROWS: gl.constexpr, R: gl.constexpr, LW: gl.constexpr):
    """dt of the live rows, along both sides of the weight layout: [ROWS, heads] and [heads, ROWS]."""
    r_j, position_j = positions(0, start, ROWS, R, gl.SliceLayout(1, gl.SliceLayout(2, LW)))
    r_i, position_i = positions(0, start, ROWS, R, gl.SliceLayout(0, gl.SliceLayout(0, LW)))
    heads_j = gl.expand_dims(dt_ptrs, 0)
    heads_i = gl.expand_dims(
        gl.convert_layout(dt_ptrs, gl.SliceLayout(1, gl.SliceLayout(0, LW)), assert_trivial=True), 1
    )
    dt_j = gl.load(heads_j + gl.expand_dims(position_j, 1), mask=gl.expand_dims(r_j < live, 1), other=0.0)
    dt_i = gl.load(heads_i + gl.expand_dims(position_i, 0), mask=gl.expand_dims(r_i < live, 0), other=0.0)
    return dt_j, dt_i


@gluon.jit
def weigh(score, dt_j, dt_i, dt, A, D, live, ROWS: gl.constexpr, LW: gl.constexpr):
    """What each row weighs in the output, the new token among them, and the decay of the checkpoint.

    [ROWS, heads] and [heads]; decays come from suffix sums of dt, never from differences of prefix sums, so that their
    error stays relative to the exponent that matters.
    """
    LI: gl.constexpr = gl.SliceLayout(0, LW)
    LJ: gl.constexpr = gl.SliceLayout(2, LW)
    r_j = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LJ))
    r_i = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LI))
    new_j = gl.expand_dims(r_j == live, 1)
    dt_of_i = gl.expand_dims(gl.convert_layout(dt, gl.SliceLayout(1, LI), assert_trivial=True), 1)
    A_of_i = gl.convert_layout(A, gl.SliceLayout(1, LI), assert_trivial=True)
    dt_j = gl.where(new_j, gl.expand_dims(dt, 0), dt_j)
    dt_i = gl.where(gl.expand_dims(r_i == live, 0), dt_of_i, dt_i)
    rows_j = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, LJ)), 1)
    is_later = gl.expand_dims(rows_j, 2) < gl.expand_dims(gl.expand_dims(r_i, 0), 0)
    later = gl.sum(gl.where(is_later, gl.expand_dims(dt_i, 0), 0.0), 2)
    weight = gl.exp(gl.expand_dims(A, 0) * later) * dt_j * gl.expand_dims(score, 1)
    weight += gl.where(new_j, gl.expand_dims(D, 0), 0.0)
    return weight, gl.exp(A_of_i * gl.sum(dt_i, 1))


@gluon.jit
def load_ring_x(
    x_ptrs, ring_x_ptrs, start, live, first_v,
    ROWS: gl.constexpr, P: gl.constexpr, R: gl.constexpr, BV: gl.constexpr, LX: gl.constexpr,
):  # fmt: skip
    """[ROWS, heads, BV] of x: live rows of the ring, then the new token; zeros below."""
    LH: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LX))
    r, position = positions(0, start, ROWS, R, gl.SliceLayout(1, gl.SliceLayout(2, LX)))
    r = gl.expand_dims(r, 1)
    new = gl.expand_dims(gl.convert_layout(x_ptrs, LH, assert_trivial=True), 0)
    old = gl.expand_dims(gl.convert_layout(ring_x_ptrs, LH, assert_trivial=True), 0) + gl.expand_dims(position, 1) * P
    v = first_v + gl.arange(0, BV, layout=gl.SliceLayout(0, gl.SliceLayout(0, LX)))
    ptrs = gl.expand_dims(gl.where(r == live, new, old), 2) + gl.expand_dims(gl.expand_dims(v, 0), 0)
    return gl.load(ptrs, mask=gl.expand_dims(r <= live, 2), other=0.0)


@gluon.jit
def keep_ring_output(x, weight, kept, first_tile: gl.constexpr, BV: gl.constexpr, LX: gl.constexpr):
    """Put the ring's part of the output, weight x, into shared memory [tiles][heads, BV], from `first_tile` on."""
    HEADS: gl.constexpr = x.shape[1]
    TILES: gl.constexpr = x.shape[2] // BV
    weight = gl.expand_dims(gl.convert_layout(weight, gl.SliceLayout(2, LX), assert_trivial=True), 2)
    y = gl.sum(x.to(gl.float32) * weight, 0)
    ALL: gl.constexpr = kept.shape[0]
    tiles = view(kept, [ALL, HEADS, BV], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])).slice(first_tile, TILES)
    tiles.store(gl.permute(gl.reshape(y, [HEADS, TILES, BV]), [1, 0, 2]))


@gluon.jit
def tile_ptrs(head_ptrs, first_v, BV: gl.constexpr, L: gl.constexpr):
    """[heads, BV] pointers to a tile's V-rows."""
    v = first_v + gl.arange(0, BV, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    heads = gl.convert_layout(head_ptrs, gl.SliceLayout(1, gl.SliceLayout(2, L)), assert_trivial=True)
    return gl.expand_dims(heads, 1) + gl.expand_dims(v, 0)


@gluon.jit
def ring_output(x, weight, L: gl.constexpr, LX: gl.constexpr):
    """The ring's part of a tile's output, weight x."""
    weight = gl.expand_dims(gl.convert_layout(weight, gl.SliceLayout(2, LX), assert_trivial=True), 2)
    return gl.convert_layout(gl.sum(x.to(gl.float32) * weight, 0), gl.SliceLayout(2, L), assert_trivial=True)


@gluon.jit
def output(y, S, C, decay, z, L: gl.constexpr, HAS_Z: gl.constexpr):
    """y + decay (S C), gated; D is part of the new token's weight in y."""
    decay = gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, gl.SliceLayout(2, L)), assert_trivial=True), 1)
    y += decay * gl.sum(S.to(gl.float32) * gl.expand_dims(gl.expand_dims(C, 0), 0), 2)
    if HAS_Z:
        z = z.to(gl.float32)
        y *= z / (1.0 + gl.exp(-z))
    return y
