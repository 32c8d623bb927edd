"""Launch configurations of the GDN and KDA window step with a read copy: data, chosen from what the host knows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import triton

from replayssm.ops.delta.read_configs import ReadShape
from replayssm.ops.device import GLUON_ARCHS
from replayssm.ops.window_config import divisor


@dataclass(frozen=True)
class ReadWindowConfig:
    """How a window step with a read copy is launched.

    backend: "triton" (portable, a v-head a program) or "gluon" (NVIDIA). For Gluon: heads: v-heads of one k-head a
    reading program; crew: programs that flush, every `every`-th of the grid's first, in chunk form `flush_heads`
    v-heads of a row at a time (a flushing tile has 16 rows a warp).
    """

    backend: str
    num_warps: int
    heads: int = 1
    crew: int = 0
    every: int = 1
    max_registers: int | None = None
    flush_heads: int = 1

    def __str__(self) -> str:
        if self.backend == "triton":
            return f"triton read windows, {self.num_warps} warps"
        return f"gluon read windows, {self.num_warps} warps, {self.heads} heads a program, {self.crew} flushing"


PORTABLE = ReadWindowConfig("triton", 16)
# KDA: up to how many v-heads in the batch, and the configuration for them.
STEP = {
    False: (
        (1024, ReadWindowConfig("gluon", 4, 1, 512, 1, 168)),
        (1 << 40, ReadWindowConfig("gluon", 4, 2, 396, 2, 168, 2)),
    ),
    True: ((1 << 40, ReadWindowConfig("gluon", 4, 1, 396, 2, 168)),),
}


@cache
def read_window_config(batch: int, shape: ReadShape, rows: int, max_window_len: int) -> ReadWindowConfig:
    """Configuration of the window step with a read copy; rows: what committed rows and a window fill together."""
    if not _gluon_fits(shape, rows, max_window_len):
        return PORTABLE
    config = next(config for most, config in STEP[shape.kda] if batch * shape.num_v_heads <= most)
    group = shape.num_v_heads // shape.num_k_heads
    config = replace(config, heads=divisor(config.heads, group), flush_heads=divisor(config.flush_heads, group))
    if shape.read != "nvfp4":
        # Codes of more bits take more registers.
        config = replace(config, heads=1)
    # The cap was measured on sm90 with four tokens; elsewhere nothing may spill.
    return config if shape.arch == "sm90" and max_window_len <= 4 else replace(config, max_registers=None)


def _gluon_fits(shape: ReadShape, rows: int, max_window_len: int) -> bool:
    """Whether the Gluon kernel can serve a layer's windows."""
    dims = shape.head_k_dim == 128 and shape.head_v_dim == 128 and rows <= 16 and max_window_len <= 8
    return shape.arch in GLUON_ARCHS and shape.fast and dims and (shape.read != "none" or shape.checkpoint == "fp8")


Launch = tuple[int, tuple[int, ...], dict[str, Any], dict[str, Any]]  # programs, (crew, every), constants, options


def gluon_launch(config: ReadWindowConfig, batch: int, shape: ReadShape, replay: str) -> Launch:
    """What follows for the Gluon kernel."""
    HV = shape.num_v_heads
    flush_heads = config.flush_heads if replay == "chunk" else 1
    crew = min(config.crew, batch * HV // flush_heads)
    grid = batch * HV // config.heads + crew
    sizes: dict[str, Any] = {"HV": HV, "GROUP": HV // shape.num_k_heads, "K": shape.head_k_dim, "V": shape.head_v_dim}
    sizes |= {"HEADS": config.heads, "CHUNK_HEADS": flush_heads if replay == "chunk" else 0}
    sizes |= {"BLOCK_V": 16 * config.num_warps, "BLOCK_B": max(256, triton.next_power_of_2(batch))}
    sizes |= {"COPY": shape.read != "none", "READ": "fp8" if shape.read == "none" else shape.read}
    options = {"num_warps": config.num_warps, "maxnreg": config.max_registers}
    return grid, (crew, max(1, min(config.every, grid // crew))), sizes, options
