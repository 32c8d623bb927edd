"""What the launchers of both families' window kernels share: the configuration, and where the Gluon kernels may run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from replayssm.ops.device import device_arch, is_aligned


@dataclass(frozen=True)
class WindowConfig:
    """How a window kernel is launched.

    block_v: V-rows of a tile (Gluon: 16 a warp). For Gluon also num_tiles: tiles a program; stages: tiles in flight;
    settle: a flushing row in the last 1 / settle of the batch trades places with an early one (0: off); dependent:
    start while the previous kernel ends; hint: until it has ended, ask the memory for the state (1), and for the ring's
    rows (2), not with settle; early: V-rows of the first tile that are requested before the cursors are known (None:
    all); flushers: so many flushing rows have programs of their own, a tile each (in batches of at most 64 rows).
    Mamba-2 only: heads: heads of a tile, each of `block_v` V-rows; appenders: programs a row that append the window
    after all others (0: each program its part); chunked: a flush takes its rows together on the tensor cores.
    """

    backend: str
    block_v: int
    num_warps: int
    num_tiles: int = 1
    stages: int = 1
    max_registers: int | None = None
    settle: int = 0
    dependent: bool = False
    hint: int = 0
    early: int | None = None
    flushers: int = 0
    heads: int = 1
    appenders: int = 0
    chunked: bool = False

    def __str__(self) -> str:
        tiles = f", {self.num_tiles} tiles, {self.stages} in flight" if self.num_tiles > 1 else ""
        return f"{self.backend} {self.block_v} rows, {self.num_warps} warps{tiles}"

    def gluon_options(self, tokens: int) -> dict[str, Any]:
        """Options of a Gluon window kernel that has room for `tokens` tokens a row."""
        options: dict[str, Any] = {
            "TILES": self.num_tiles,
            "STAGES": self.stages,
            "SETTLE": self.settle,
            "HINT": self.hint,
            "FLUSHERS": self.flushers,
            "EARLY": self.heads * self.block_v if self.early is None else self.early,
        }
        launch = {"num_warps": self.num_warps, "maxnreg": self.max_registers, "launch_pdl": self.dependent}
        return options | {"TOKENS": tokens} | launch


def divisor(most: int, number: int) -> int:
    """The largest number up to `most`, halved as often as need be, that divides `number`."""
    while number % most:
        most //= 2
    return most


def window_rows(buffer_len: int, max_window_len: int) -> int:
    """Rows that the committed ones and the window fill together, as the kernels lay them out."""
    return max(16, triton.next_power_of_2(max(buffer_len, max_window_len)))


def tokens_laid_out(max_window_len: int) -> int:
    """Tokens of a window that the Gluon kernels have room for."""
    return max(4, triton.next_power_of_2(max_window_len))


def window_arch(state: torch.Tensor, activation: torch.dtype) -> str:
    """The device's architecture, or "" where only the portable kernels run.

    The tensor cores take 16-bit activations, and 16-byte accesses to the checkpoint.
    """
    return fast_arch(state.device, activation) if is_aligned(state) else ""


def fast_arch(device: torch.device, activation: torch.dtype) -> str:
    """As `window_arch`, of an aligned checkpoint."""
    return device_arch(device) if activation in (torch.bfloat16, torch.float16) else ""
