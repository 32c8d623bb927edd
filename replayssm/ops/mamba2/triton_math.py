"""Device functions that every Mamba-2 Triton kernel shares, so that a flush and stepwise decoding round alike."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """max(x, 0) + log1p(exp(-|x|)); log1p as 2 atanh(u / (2 + u)), because a float32 log(1 + u) loses small u."""
    u = tl.exp(-tl.abs(x))
    s = u / (u + 2.0)
    q = s * s
    p = tl.fma(q, 1.0 / 15.0, 1.0 / 13.0)
    p = tl.fma(p, q, 1.0 / 11.0)
    p = tl.fma(p, q, 1.0 / 9.0)
    p = tl.fma(p, q, 1.0 / 7.0)
    p = tl.fma(p, q, 1.0 / 5.0)
    p = tl.fma(p, q, 1.0 / 3.0)
    p = tl.fma(p, q, 1.0)
    return tl.fma(s + s, p, tl.maximum(x, 0.0))


@triton.jit
def timestep(dt_ptr, dt_bias_ptr, offset, head, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr):
    """The processed dt of one token and head."""
    dt = tl.load(dt_ptr + offset).to(tl.float32)
    if HAS_BIAS:
        dt += tl.load(dt_bias_ptr + head).to(tl.float32)
    if SOFTPLUS:
        dt = softplus(dt)
    return dt


@triton.jit
def update(S, A, dt, B, x):
    """S exp(dt A) + (dt x) B as one fma: the only contraction allowed, so that every kernel rounds the state alike."""
    return tl.fma(S, tl.exp(dt * A), (dt * x)[:, None] * B[None, :])


@triton.jit
def replay(S, A, ring_x_ptr, ring_B_ptr, ring_dt_ptr, start, count, R, P, N, v, k, v_ok, k_ok):
    """Run the recurrence over `count` ring rows, oldest first; the pointers are those of the slot's head and group."""
    for j in range(count):
        position = start + j
        position = tl.where(position >= R, position - R, position)
        dt = tl.load(ring_dt_ptr + position)
        B = tl.load(ring_B_ptr + position * N + k, mask=k_ok, other=0.0).to(tl.float32)
        x = tl.load(ring_x_ptr + position * P + v, mask=v_ok, other=0.0).to(tl.float32)
        S = update(S, A, dt, B, x)
    return S


@triton.jit
def finish(y, z_ptr, v, v_ok, HAS_Z: tl.constexpr):
    """The optional gate y silu(z)."""
    if HAS_Z:
        z = tl.load(z_ptr + v, mask=v_ok, other=0.0).to(tl.float32)
        y = y * (z / (1.0 + tl.exp(-z)))
    return y
