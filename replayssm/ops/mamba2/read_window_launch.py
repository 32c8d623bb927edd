"""Launches the Mamba-2 window kernel that reads a copy of the checkpoint: several tokens a row, chains or trees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton

from replayssm.config import Mamba2Spec
from replayssm.ops import window_config as windows
from replayssm.ops.device import GLUON_ARCHS, device_arch
from replayssm.ops.mamba2.read_configs import ReadShape, portable_config
from replayssm.ops.window_config import divisor, window_rows


@dataclass(frozen=True)
class ReadWindowConfig:
    """How a window step with a read copy is launched.

    heads: heads of one group a reading program; tile: state rows of a tile (16 a warp or more); crew: programs that
    flush, every `every`-th of the grid's first, `flush_heads` heads after one another.
    """

    num_warps: int
    heads: int
    tile: int
    crew: int
    every: int
    max_registers: int | None = None
    flush_heads: int = 2

    def __str__(self) -> str:
        tiles = f"{self.heads} heads a program, tiles of {self.tile} rows"
        return f"gluon read windows, {self.num_warps} warps, {tiles}, {self.crew} flushing"


# Up to how many heads in the batch, and the configurations to try for them; the first whose tiles fit is used.
_SMALL = ReadWindowConfig(4, 2, 64, 396, 1, 168, 1)
_UNEVEN = ReadWindowConfig(4, 4, 64, 396, 2, 168)
STEP = ((1024, (_SMALL,)), (1 << 40, (ReadWindowConfig(4, 8, 128, 396, 2, 168), _UNEVEN)))


@cache
def read_window_config(batch: int, shape: ReadShape, max_window_len: int) -> ReadWindowConfig:
    """Configuration of the window step with a read copy."""
    choices = next(configs for most, configs in STEP if batch * shape.num_heads <= most)
    config = next((config for config in choices if config.tile % shape.head_dim == 0), choices[-1])
    group = shape.num_heads // shape.n_groups
    # Codes of more bits take more registers.
    heads = config.heads if shape.read == "nvfp4" else 1 if shape.read == "bf16" else 2
    config = replace(config, heads=divisor(heads, group), flush_heads=divisor(config.flush_heads, group))
    if shape.read != "nvfp4":
        config = replace(config, tile=64)
    # The cap was measured on sm90 with four tokens; elsewhere nothing may spill.
    return config if shape.arch == "sm90" and max_window_len <= 4 else replace(config, max_registers=None)


def fits(shape: ReadShape, rows: int, max_window_len: int) -> bool:
    """Whether the Gluon kernel can serve windows of a layer of which a step reads up to `rows` rows."""
    dims = shape.head_dim % 16 == 0 and shape.head_dim >= 64 and shape.d_state in (64, 128)
    return shape.arch in GLUON_ARCHS and shape.fast and dims and rows <= 16 and max_window_len <= 8


def launch_window(
    inputs: tuple[torch.Tensor | None, ...],
    state: torch.Tensor,
    rings: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    out: torch.Tensor,
    stored: tuple[torch.Tensor, ...],
    shape: ReadShape,
    config: ReadWindowConfig | None,
    *,
    buffer_len: int,
    pad_slot_id: int,
    dt_softplus: bool,
    max_window_len: int,
    replay: str,
) -> None:
    """A window step; `config` overrides the tables.

    inputs: x, dt, A, B, C, D, z, dt_bias; rings: of x, B, dt; rows: cursors, slot_indices, query_start_loc, parents;
    stored: the checkpoint's scales, the copy's codes, scales and heads' scales, fp8 as bytes.
    """
    from replayssm.ops.mamba2.gluon_read_window import mamba2_read_window_kernel

    x, dt, A, B, C, D, z, dt_bias = inputs
    assert x is not None and dt is not None and A is not None and B is not None and C is not None
    cursors, slot_indices, query_start_loc, parents = rows
    batch, ring_len = slot_indices.shape[0], rings[1].shape[2]
    config = config or read_window_config(batch, shape, max_window_len)
    grid, crew, sizes, options = gluon_launch(config, batch, shape)
    mamba2_read_window_kernel[(grid,)](
        *(x, dt, A, B, C, A if D is None else D, x if z is None else z, A if dt_bias is None else dt_bias),
        *(state, *rings, cursors, slot_indices, query_start_loc, query_start_loc if parents is None else parents),
        *(out, *stored, state.shape[0], buffer_len, pad_slot_id, batch, *crew),
        *(stride for t in (x, dt, B, C) for stride in t.stride()[:2]),
        *((0, 0) if z is None else z.stride()[:2]),
        *out.stride()[:2],
        *(stride for t in (state, *rings) for stride in t.stride()[:2]),
        *(t.stride(0) for t in stored),
        R=ring_len,
        ROWS=window_rows(buffer_len, max_window_len),
        WINDOW=max(4, triton.next_power_of_2(max_window_len)),
        TREE=parents is not None,
        HAS_D=D is not None,
        HAS_Z=z is not None,
        HAS_BIAS=dt_bias is not None,
        SOFTPLUS=dt_softplus,
        REPLAY=replay,
        **sizes,
        **options,
        launch_pdl=True,
    )


Launch = tuple[int, tuple[int, ...], dict[str, Any], dict[str, Any]]  # programs, (crew, every), constants, options


def gluon_launch(config: ReadWindowConfig, batch: int, shape: ReadShape) -> Launch:
    """What follows from the layer and the configuration."""
    H = shape.num_heads
    flush_heads = min(config.flush_heads, H // shape.n_groups)
    crew = min(config.crew, batch * H // flush_heads)
    grid = batch * H // config.heads + crew
    sizes: dict[str, Any] = {"H": H, "G": shape.n_groups, "P": shape.head_dim, "N": shape.d_state}
    sizes |= {"HEADS": config.heads, "TILE": config.tile, "FLUSH_HEADS": flush_heads}
    sizes |= {"BLOCK_B": max(256, triton.next_power_of_2(batch)), "READ": shape.read, "CHECKPOINT": shape.checkpoint}
    options = {"num_warps": config.num_warps, "maxnreg": config.max_registers}
    return grid, (crew, max(1, min(config.every, grid // crew))), sizes, options


def window_route(
    spec: Mamba2Spec,
    *,
    checkpoint: str,
    read: str,
    batch: int,
    device: torch.device,
    buffer_len: int,
    max_window_len: int,
) -> str:
    """One line that names the kernel and the configuration of a window step of a contiguous cache."""
    dims = (spec.num_heads, spec.n_groups, spec.head_dim, spec.d_state)
    shape = ReadShape(*dims, read, checkpoint, device_arch(device))
    allowed = windows.GLUON_READ_WINDOWS and fits(shape, window_rows(buffer_len, max_window_len), max_window_len)
    if not allowed:
        return str(portable_config(shape))
    return str(read_window_config(batch, shape, max_window_len))
