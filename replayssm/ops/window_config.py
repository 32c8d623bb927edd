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
    settle: move flushing rows to the front of the grid; dependent: start while the previous kernel ends.
    """

    backend: str
    block_v: int
    num_warps: int
    num_tiles: int = 1
    stages: int = 1
    max_registers: int | None = None
    settle: bool = False
    dependent: bool = False

    def gluon_options(self, tokens: int) -> dict[str, Any]:
        """Options of a Gluon window kernel that has room for `tokens` tokens a row."""
        options: dict[str, Any] = {"TILES": self.num_tiles, "STAGES": self.stages, "SETTLE": self.settle}
        launch = {"num_warps": self.num_warps, "maxnreg": self.max_registers, "launch_pdl": self.dependent}
        return options | {"TOKENS": tokens} | launch


def window_rows(buffer_len: int, max_window_len: int) -> int:
    """Rows that the committed ones and the window fill together, as the kernels lay them out."""
    return max(16, triton.next_power_of_2(max(buffer_len, max_window_len)))


def window_arch(state: torch.Tensor, activation: torch.dtype) -> str:
    """The device's architecture, or "" where only the portable kernels run.

    The tensor cores take 16-bit activations, and 16-byte accesses to the checkpoint.
    """
    fast = activation in (torch.bfloat16, torch.float16) and is_aligned(state)
    return device_arch(state.device) if fast else ""
