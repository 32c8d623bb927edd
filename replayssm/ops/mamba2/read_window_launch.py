"""Launches the Mamba-2 window kernel that reads a copy of the checkpoint: several tokens a row, chains or trees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton

from replayssm.config import Mamba2Spec
from replayssm.ops.device import GLUON_ARCHS, device_arch
from replayssm.ops.mamba2.read_configs import ReadShape, portable_config
from replayssm.ops.window_config import divisor, tokens_laid_out, window_rows


@dataclass(frozen=True)
class ReadWindowConfig:
    """How a window step with a read copy is launched.

    The flushing launch has `crew` programs of `flush_warps`, each with `flush_heads` heads of one row at a time. A
    program of the reading one has `heads` heads of one group, in tiles of `tile` state rows (16 a warp or more); of a
    row that flushes, `turns` times as many. Or one launch does both (`joint`): its first `crew` programs take a head at
    a time.
    """

    num_warps: int
    heads: int
    tile: int
    max_registers: int | None
    crew: int
    flush_registers: int | None
    flush_heads: int = 1
    flush_warps: int = 4
    turns: int = 1
    joint: bool = False

    def __str__(self) -> str:
        tiles = f"{self.heads} heads a program, tiles of {self.tile} rows"
        return f"gluon read windows, {self.num_warps} warps, {tiles}, {self.crew} flushing"


# Up to how many heads in the batch, and the configurations to try for them; the first whose tiles fit is used.
_LARGE = (
    ReadWindowConfig(4, 8, 128, 128, 2112, 128, turns=2),
    ReadWindowConfig(4, 4, 64, 112, 1056, 128, turns=2),
)
STEP = (
    (1024, (ReadWindowConfig(4, 2, 64, 168, 396, 168, joint=True),)),
    (16384, (ReadWindowConfig(4, 4, 128, 128, 528, 128), ReadWindowConfig(4, 4, 64, 112, 528, 128))),
    (1 << 40, _LARGE),
)


@cache
def read_window_config(batch: int, shape: ReadShape, rows: int, max_window_len: int) -> ReadWindowConfig:
    """Configuration of the window step with a read copy; rows: what committed rows and a window fill together."""
    choices = next(configs for most, configs in STEP if batch * shape.num_heads <= most)
    if rows > 16 or max_window_len > 4:
        choices = choices[-1:]
    config = next((config for config in choices if config.tile % shape.head_dim == 0), choices[-1])
    group = shape.num_heads // shape.n_groups
    # Codes of more bits take more registers.
    heads = divisor(config.heads if shape.read == "nvfp4" else 1 if shape.read == "bf16" else 2, group)
    config = replace(config, heads=heads, flush_heads=divisor(config.flush_heads, group))
    if shape.read != "nvfp4":
        config = replace(config, tile=64, max_registers=168)
    if shape.checkpoint == "fp8":
        config = replace(config, flush_registers=168)
    config = replace(config, joint=config.joint and shape.checkpoint != "fp8" and shape.d_state == 128)
    if rows > 16 or max_window_len > 4:
        capped = rows > 16 and max_window_len <= 8 and shape.read == "nvfp4" and not config.joint
        config = replace(config, max_registers=128 if capped else None)
    # The caps were measured on sm90; elsewhere nothing may spill.
    if shape.arch != "sm90":
        return replace(config, max_registers=None, flush_registers=None)
    return config if rows <= 16 else replace(config, flush_registers=None)


def fits(shape: ReadShape, rows: int, max_window_len: int) -> bool:
    """Whether the Gluon kernel can serve windows of a layer of which a step reads up to `rows` rows."""
    dims = shape.head_dim % 16 == 0 and shape.head_dim >= 64 and shape.d_state in (64, 128)
    return shape.arch in GLUON_ARCHS and shape.fast and dims and rows <= 32 and max_window_len <= 16


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
    x, dt, A, B, C, D, z, dt_bias = inputs
    assert x is not None and dt is not None and A is not None and B is not None and C is not None
    cursors, slot_indices, query_start_loc, parents = rows
    batch = slot_indices.shape[0]
    rows_read = window_rows(buffer_len, max_window_len)
    config = config or read_window_config(batch, shape, rows_read, max_window_len)
    more: dict[str, Any] = {"TREE": parents is not None, "HAS_D": D is not None, "HAS_Z": z is not None}
    more |= {"HAS_BIAS": dt_bias is not None, "SOFTPLUS": dt_softplus, "REPLAY": replay, "R": rings[1].shape[2]}
    more |= {"WINDOW": tokens_laid_out(max_window_len), "ROWS": rows_read}
    for kernel, grid, options in gluon_launches(config, batch, shape):
        kernel[(grid,)](
            *(x, dt, A, B, C, A if D is None else D, x if z is None else z, A if dt_bias is None else dt_bias),
            *(state, *rings, cursors, slot_indices, query_start_loc, query_start_loc if parents is None else parents),
            *(out, *stored, state.shape[0], buffer_len, pad_slot_id, batch),
            *(stride for t in (x, dt, B, C) for stride in t.stride()[:2]),
            *((0, 0) if z is None else z.stride()[:2]),
            *out.stride()[:2],
            *(stride for t in (state, *rings) for stride in t.stride()[:2]),
            *(t.stride(0) for t in stored),
            **{name: value for name, value in more.items() if name in kernel.arg_names},
            **options,
            launch_pdl=True,
        )


Launch = tuple[Any, int, dict[str, Any]]  # kernel, programs, constants and options


def gluon_launches(config: ReadWindowConfig, batch: int, shape: ReadShape) -> tuple[Launch, ...]:
    """The flushing launch, then the reading one that runs beside it; or the one that does both."""
    from replayssm.ops.mamba2 import gluon_read_window as kernels

    H = shape.num_heads
    parts, turns = H // config.heads, divisor(config.turns, H // config.heads)
    sizes: dict[str, Any] = {"H": H, "G": shape.n_groups, "P": shape.head_dim, "N": shape.d_state, "READ": shape.read}
    read: dict[str, Any] = sizes | {"HEADS": config.heads, "TILE": config.tile}
    read |= {"num_warps": config.num_warps, "maxnreg": config.max_registers}
    rows = {"BLOCK_B": max(256, triton.next_power_of_2(batch))}
    if config.joint:
        crew = min(config.crew, batch * H)
        return ((kernels.mamba2_read_window_joint_kernel, crew + batch * parts, read | rows),)
    flush = sizes | rows | {"FLUSH_HEADS": config.flush_heads, "CHECKPOINT": shape.checkpoint}
    flush |= {"num_warps": config.flush_warps, "maxnreg": config.flush_registers}
    crew = min(config.crew, batch * H // config.flush_heads)
    return (
        (kernels.mamba2_read_window_flush_kernel, crew, flush),
        (kernels.mamba2_read_window_kernel, batch * (parts + parts // turns), read | {"TURNS": turns}),
    )


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
    rows = window_rows(buffer_len, max_window_len)
    if not fits(shape, rows, max_window_len):
        return str(portable_config(shape))
    return str(read_window_config(batch, shape, rows, max_window_len))
