"""Softplus and sigmoid that round the same wherever an element stands.

On a CPU torch evaluates the ends of a tensor with other instructions than its middle, and the results differ in the
last bit. Whether a token is computed alone or in a batch must not change a state, so these pad to whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

_VECTOR, _PIECE = 64, 32768  # more elements than a vector register holds; most that torch gives one thread undivided


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), linear above 20."""
    return _everywhere_alike(lambda t: F.softplus(t, threshold=20.0), x)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x))."""
    return _everywhere_alike(torch.sigmoid, x)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x sigmoid(x)."""
    return x * sigmoid(x)


def _everywhere_alike(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    if x.device.type != "cpu":
        return function(x)
    flat = F.pad(x.reshape(-1), (0, -x.numel() % _VECTOR))
    return torch.cat([function(piece) for piece in flat.split(_PIECE)])[: x.numel()].view(x.shape)
