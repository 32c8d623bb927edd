"""The window's triangular system (I + A) U = R, by forward substitution in the accumulators' registers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def substitute(
    X, v_at, coef_at, beta_at, h, length, ROWS: gl.constexpr, TOKENS: gl.constexpr, KDA: gl.constexpr, MMA: gl.constexpr
):
    """Forward substitution on a tile [V, columns] of what checkpoint and committed rows give: returns u and outputs."""
    n = gl.expand_dims(gl.arange(0, 2 * TOKENS, layout=gl.SliceLayout(0, MMA)), 0)
    for i in gl.static_range(TOKENS):
        if KDA:
            coef = coef_at.index(i).load(gl.SliceLayout(0, MMA))
        else:
            coef = coef_at.index(h * ROWS + gl.maximum(length - 1 - i, 0)).load(gl.SliceLayout(0, MMA))
        v = v_at.index(i).load(gl.SliceLayout(1, MMA)).to(gl.float32)
        u = beta_at.index(h * TOKENS + i).load(gl.SliceLayout(1, MMA)) * (v - gl.sum(gl.where(n == i, X, 0.0), 1))
        u = gl.expand_dims(u, 1)
        X = gl.where(n == i, u, X + u * gl.expand_dims(coef, 0))
    return X
