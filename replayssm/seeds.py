"""Seeds of stochastic rounding, one a slot: where they come from when a request brings none."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replayssm.checks import check_tensor
from replayssm.slots import integer_list, placed

_MULTIPLIER = 6364136223846793005

Seeds = torch.Tensor | Sequence[int]


def first_seeds(seed: int, num_slots: int, device: torch.device) -> torch.Tensor:
    """[num_slots] int64, the same for the same `seed`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (num_slots,), generator=generator).to(device)


def next_seeds(seeds: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Other seeds for the requests that follow in `slots` [n] int64, which have `seeds` [n] now; without the host.

    A linear congruential step that differs by slot, so that slots which share a seed since a copy part. Philox needs no
    more of its keys than that they differ.
    """
    return seeds * _MULTIPLIER + 2 * slots + 1


def check_seeds(seeds: Seeds, count: int, device: torch.device) -> torch.Tensor:
    """int64 [count] on `device`, as a caller gives them."""
    if not isinstance(seeds, torch.Tensor):
        seeds = integer_list("seeds", seeds)
    check_tensor("seeds", seeds, (count,), (torch.int64,))
    return placed("seeds", seeds, device, torch.int64)
