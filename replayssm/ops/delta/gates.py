"""Gates of Gated DeltaNet and Kimi Delta Attention: from raw projections to log decay and beta."""

from __future__ import annotations

import torch

from replayssm.ops.elementwise import sigmoid, softplus


def log_decay_and_beta(
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log decay, beta) in `dtype`.

    g [..., HV] (GDN) or [..., HV, K] (KDA); beta [..., HV]; A_log [HV]; dt_bias [HV] or [HV, K].
    A_log None: both are processed already. Otherwise `beta = sigmoid(beta)` and
    `g = -exp(A_log) softplus(g + dt_bias)` (GDN; Kimi-Linear), or with `lower_bound` (Kimi-K3, GLM-5.3-Flash)
    `g = lower_bound sigmoid(exp(A_log)(g + dt_bias))`.
    """
    g, beta = g.to(dtype), beta.to(dtype)
    if A_log is None:
        return g, beta
    rate = A_log.to(dtype).exp()
    if dt_bias is not None:
        g = g + dt_bias.to(dtype)
    if g.dim() > beta.dim():
        rate = rate[:, None]
    if lower_bound is None:
        return -rate * softplus(g), sigmoid(beta)
    return lower_bound * sigmoid(rate * g), sigmoid(beta)


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """`x / sqrt(sum(x^2) + eps)` over the last dimension (eps inside the root, as the models do)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
