"""Launch configurations of the GDN and KDA window step with a read copy: data, chosen from what the host knows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import triton

from replayssm.ops.delta.read_configs import ReadShape
from replayssm.ops.device import GLUON_ARCHS
from replayssm.ops.window_config import divisor, tokens_laid_out, window_rows


@dataclass(frozen=True)
class ReadWindowConfig:
    """How a window step with a read copy is launched.

    backend: "triton" (portable, a v-head a program) or "gluon" (NVIDIA: programs that read, `heads` v-heads of one
    k-head each, beside a launch that flushes). Of the latter: crew: its programs; flush_warps, flush_registers;
    flush_heads: v-heads of a row whose tables a program makes together in chunk form (a tile has 16 rows a warp);
    pieces: of 32 columns, whose work overlaps while a head stays in shared memory (GDN's nvfp4 copies).
    """

    backend: str
    num_warps: int
    heads: int = 1
    max_registers: int | None = None
    crew: int = 0
    flush_warps: int = 0
    flush_registers: int | None = None
    flush_heads: int = 1
    pieces: int = 1

    def __str__(self) -> str:
        if self.backend == "triton":
            return f"triton read windows, {self.num_warps} warps"
        reads = f"{self.num_warps} warps, {self.heads} heads a program"
        return f"gluon read windows, {reads}, {self.crew} flushing with {self.flush_warps} warps"


PORTABLE = ReadWindowConfig("triton", 16)
SMALL = 512  # v-heads in the batch
# By whether it is KDA and whether more than 16 rows are laid out: up to how many v-heads in the batch, and the
# configuration for them. Measured on one H200.
STEP = {
    (False, False): (
        (SMALL, ReadWindowConfig("gluon", 2, 1, 104, 132, 8, 168, 1, 4)),
        (4096, ReadWindowConfig("gluon", 2, 1, 104, 264, 8, 128, 1)),
        (1 << 40, ReadWindowConfig("gluon", 2, 2, 96, 264, 8, 128, 4)),
    ),
    (False, True): (
        (SMALL, ReadWindowConfig("gluon", 4, 1, 128, 132, 8, None, 1, 4)),
        (4096, ReadWindowConfig("gluon", 2, 1, 128, 264, 8, 128, 1)),
        (1 << 40, ReadWindowConfig("gluon", 2, 2, 128, 264, 8, 128, 2)),
    ),
    (True, False): ((1 << 40, ReadWindowConfig("gluon", 4, 1, 80, 396, 4, 128, 1)),),
    (True, True): (
        (SMALL, ReadWindowConfig("gluon", 4, 1, 112, 132, 8, None, 1)),
        (1 << 40, ReadWindowConfig("gluon", 4, 1, 112, 396, 4, 168, 1)),
    ),
}
# What reads formats of more bits, and what flushes where whole rows have a scale; registers of a flush of 16 rows.
WIDE: dict[str, Any] = {"num_warps": 4, "max_registers": 96, "crew": 396, "flush_warps": 4, "flush_registers": 128}
ROW_SCALES: dict[str, Any] = {"crew": 264, "flush_warps": 4, "flush_registers": 168}


@cache
def read_window_config(batch: int, shape: ReadShape, rows: int, max_window_len: int) -> ReadWindowConfig:
    """Configuration of the window step with a read copy; rows: `rows_laid_out`."""
    if not _gluon_fits(shape, rows, max_window_len):
        return PORTABLE
    table = STEP[shape.kda, rows > 16]
    config = next(config for most, config in table if batch * shape.num_v_heads <= most)
    if shape.read != "nvfp4":
        config = replace(config, **WIDE, heads=config.flush_heads)
        config = config if rows <= 16 else replace(config, flush_registers=168)
    if shape.read == "bf16":
        config = replace(config, max_registers=128)
    if "fp8" in (shape.read, shape.checkpoint):
        config = replace(config, **ROW_SCALES, heads=config.flush_heads, flush_heads=min(2, config.flush_heads))
        config = config if rows <= 16 else replace(config, flush_registers=None)
    if max_window_len > 4 or rows > 16:
        config = _longer(config, batch * shape.num_v_heads, shape, max_window_len)
    group = shape.num_v_heads // shape.num_k_heads
    config = replace(config, heads=divisor(config.heads, group), flush_heads=divisor(config.flush_heads, group))
    # The caps were measured on sm90; elsewhere the compiler chooses.
    if shape.arch != "sm90":
        return replace(config, max_registers=None, flush_registers=None)
    return config


def _longer(config: ReadWindowConfig, heads: int, shape: ReadShape, max_window_len: int) -> ReadWindowConfig:
    """What reads more than four tokens, or rings of more than 16 rows."""
    if max_window_len > 8:
        return replace(config, num_warps=4, heads=min(2, config.heads), max_registers=None)
    if max_window_len > 4 and heads <= SMALL:
        config = replace(config, num_warps=4)
    capped = {"nvfp4": 112 if shape.kda else 128, "int8": 128}
    return replace(config, max_registers=capped.get(shape.read))


def _gluon_fits(shape: ReadShape, rows: int, max_window_len: int) -> bool:
    """Whether the Gluon kernels can serve a layer's windows."""
    dims = shape.head_k_dim == 128 and shape.head_v_dim == 128 and rows <= 32 and max_window_len <= 16
    return shape.arch in GLUON_ARCHS and shape.fast and dims and (shape.read != "none" or shape.checkpoint == "fp8")


def rows_laid_out(most_rows: int, max_window_len: int) -> int:
    """Committed rows that the Gluon kernels have room for: as many as a window's k and q, or more."""
    return max(window_rows(most_rows, max_window_len), 2 * tokens_laid_out(max_window_len))


Launch = tuple[int, dict[str, Any]]  # programs; constants and options


def gluon_launches(config: ReadWindowConfig, batch: int, shape: ReadShape, chunk: bool) -> tuple[Launch, Launch]:
    """What follows for the flushing kernel and for the reading one."""
    HV = shape.num_v_heads
    together = config.flush_heads if chunk else 0
    sizes: dict[str, Any] = {"HV": HV, "GROUP": HV // shape.num_k_heads, "K": shape.head_k_dim, "V": shape.head_v_dim}
    sizes |= {"READ": "fp8" if shape.read == "none" else shape.read}
    flush: dict[str, Any] = {"COPY": shape.read != "none", "CHUNK_HEADS": together, "BLOCK_V": 16 * config.flush_warps}
    flush |= {"BLOCK_B": max(32 * config.flush_warps, triton.next_power_of_2(batch))}
    flush |= {"PIECES": config.pieces, "num_warps": config.flush_warps, "maxnreg": config.flush_registers}
    read = {"HEADS": config.heads, "num_warps": config.num_warps, "maxnreg": config.max_registers}
    crew = min(config.crew, batch * HV // max(1, together))
    return (crew, sizes | flush), (2 * batch * HV // config.heads, sizes | read)
