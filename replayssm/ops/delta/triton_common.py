"""Device functions shared by the portable delta kernels: gates, norms, ring rows and one recurrence step."""

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + exp(x)), linear above 20; keeps full relative precision for very negative x."""
    e = tl.exp(tl.minimum(x, 20.0))
    one_plus = 1.0 + e
    rounded = one_plus - 1.0
    # log(1 + e) * e / ((1 + e) - 1) undoes the rounding of 1 + e.
    small = tl.where(rounded == 0.0, e, tl.log(one_plus) * (e / tl.where(rounded == 0.0, 1.0, rounded)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def sigmoid(x):
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0.0, 1.0, e) / (1.0 + e)


@triton.jit
def log_decay(raw, a_log, bias, lower_bound, BOUNDED: tl.constexpr):
    """The log decay of a raw gate; BOUNDED picks the sigmoid form with a lower bound."""
    if BOUNDED:
        decay = lower_bound * sigmoid(tl.exp(a_log) * (raw + bias))
    else:
        decay = -tl.exp(a_log) * softplus(raw + bias)
    return decay


@triton.jit
def unit(x, NORM: tl.constexpr):
    """x over its L2 norm (eps inside the root) when NORM, else x."""
    if NORM:
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6)
    return x


@triton.jit
def ring_row(start, j, ring_len):
    """Physical row of logical row j; start < ring_len and j <= ring_len."""
    row = start + j
    return tl.where(row >= ring_len, row - ring_len, row)


@triton.jit
def recur(S, decay, k, v, beta):
    """One token of the recurrence on S [V, K]: the only place that updates a state."""
    S = S * decay
    u = beta * (v - tl.sum(S * k[None, :], axis=1))
    S = tl.fma(u[:, None] + tl.zeros_like(S), k[None, :] + tl.zeros_like(S), S)
    return S


@triton.jit
def token_gate(
    g, beta, A_log, dt_bias, token, head, offs_k, mask_k, lower_bound, stride_g_token, stride_g_head,
    stride_beta_token, stride_beta_head, K: tl.constexpr, KDA: tl.constexpr,
    RAW: tl.constexpr, HAS_BIAS: tl.constexpr, BOUNDED: tl.constexpr,
):
    """Log decay (scalar, or [K] for KDA) and beta of one token and v-head, in fp32."""
    b = tl.load(beta + token * stride_beta_token + head * stride_beta_head).to(tl.float32)
    at = g + token * stride_g_token + head * stride_g_head
    if KDA:
        decay = tl.load(at + offs_k, mask=mask_k, other=0.0).to(tl.float32)
    else:
        decay = tl.load(at).to(tl.float32)
    if RAW:
        a_log = tl.load(A_log + head).to(tl.float32)
        if not HAS_BIAS:
            bias = 0.0
        elif KDA:
            bias = tl.load(dt_bias + head * K + offs_k, mask=mask_k, other=0.0).to(tl.float32)
        else:
            bias = tl.load(dt_bias + head).to(tl.float32)
        decay = log_decay(decay, a_log, bias, lower_bound, BOUNDED)
        b = sigmoid(b)
    return decay, b


@triton.jit
def replay(
    S, ring_k, ring_v, ring_g, ring_beta, start, count, ring_len, offs_k, mask_k, offs_v, mask_v, K: tl.constexpr,
    V: tl.constexpr, KDA: tl.constexpr, NORM: tl.constexpr,
):
    """Fold `count` committed rows into S, token by token, from the raw inputs; the ring pointers are of one head."""
    for j in range(count):
        row = ring_row(start, j, ring_len)
        k = unit(tl.load(ring_k + row * K + offs_k, mask=mask_k, other=0.0).to(tl.float32), NORM)
        v = tl.load(ring_v + row * V + offs_v, mask=mask_v, other=0.0).to(tl.float32)
        beta = tl.load(ring_beta + row)
        if KDA:
            decay = tl.exp(tl.load(ring_g + row * K + offs_k, mask=mask_k, other=0.0))[None, :]
        else:
            decay = tl.exp(tl.load(ring_g + row))
        S = recur(S, decay, k, v, beta)
    return S
