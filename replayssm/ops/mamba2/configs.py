"""Launch configurations of the Mamba-2 kernels: data, chosen from what the host knows, never from timing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from replayssm.checks import check_choice


@dataclass(frozen=True)
class LaunchConfig:
    """How one kernel is launched.

    kernel: "triton" (portable), "tile" (one tile a program) or "tiles" (a few heads a program, tile after tile, TMA).
    A tile is `heads` heads of `block_v` V-rows; "tiles" has a warp a head and `turns` tiles (0: all V-rows), `stages`
    of them in flight. pdl: programmatic dependent launch. `appenders` programs a row write the new tokens after all
    others (0, "tile" only: each program its own). In the last 1 / `settle` of the rows, those that flush trade places
    with early ones (0: none). ring_first ("tiles" only): all but the first tile is requested after the ring's rows,
    which then do not queue behind it. hint: before the previous kernel is done, the first hint_first programs (0: all)
    ask the memory for their state (the first hint_rows V-rows of each head, if not 0). flushers ("tiles" only): so many
    flushing rows have programs of their own, a tile each (in batches of at most 64 rows, without settle).
    chunked ("tiles" only): a flush takes its rows together on the tensor cores (16-bit checkpoints).
    """

    kernel: str
    block_v: int
    num_warps: int
    heads: int = 1
    turns: int = 1
    stages: int = 1
    max_registers: int | None = None
    pdl: bool = False
    appenders: int = 0
    settle: int = 0
    ring_first: bool = False
    hint: bool = False
    hint_rows: int = 0
    hint_first: int = 0
    flushers: int = 0
    chunked: bool = False


@dataclass(frozen=True)
class Shape:
    """What a choice depends on besides the batch."""

    num_heads: int
    n_groups: int
    head_dim: int
    d_state: int
    state_bytes: int
    tma: bool
    arch: str


def _tile(heads: int, block_v: int, num_warps: int, **more: Any) -> LaunchConfig:
    return LaunchConfig("tile", block_v, num_warps, heads, pdl=True, max_registers=more.pop("registers", None), **more)


def _tiles(heads: int, registers: int, **more: Any) -> LaunchConfig:
    return LaunchConfig("tiles", 16, heads, heads, max_registers=registers, pdl=True, **{"turns": 0, **more})


# For each size of a state's element: the largest batch of an entry, then configurations to try in order; the first that
# fits the layer's shape is used. `block_v` is for d_state 128 and scales with it. Measured on one H200 (docs: the log).
STEP = {
    4: (
        (2, (_tile(1, 64, 8, hint=True), _tile(2, 16, 4, hint=True), _tile(4, 16, 4, hint=True))),
        (4, (_tile(1, 64, 4, registers=128, appenders=4), _tile(2, 16, 4), _tile(4, 16, 4, appenders=4))),
        (
            16,
            (
                _tile(1, 64, 4, registers=128, appenders=2, hint=True, hint_rows=8),
                _tiles(2, 168, turns=2, stages=2, appenders=4, ring_first=True, flushers=1),
                _tiles(2, 168, turns=5, stages=3, appenders=4, ring_first=True, flushers=1, hint=True, hint_rows=16),
                _tile(4, 16, 4, appenders=4, settle=2),
            ),
        ),
        (
            48,
            (
                _tile(1, 64, 4, registers=128, appenders=4, hint=True, hint_rows=16, hint_first=528),
                _tiles(2, 168, turns=5, stages=3, appenders=4, settle=2, hint=True, hint_rows=16, hint_first=396),
                _tile(4, 16, 4, appenders=4, settle=2),
            ),
        ),
        (96, (_tiles(2, 168, stages=2, appenders=4, settle=2),)),
        (1 << 30, (_tiles(4, 128, turns=4, appenders=4, settle=2), _tiles(2, 168, stages=2, appenders=4, settle=2))),
    ),
    2: (
        (2, (_tile(1, 64, 8, hint=True), _tile(2, 16, 4, hint=True), _tile(4, 16, 4, hint=True))),
        (4, (_tile(1, 64, 4, registers=128, appenders=4, hint=True), _tile(4, 16, 4, appenders=4, hint=True))),
        (24, (_tile(1, 64, 4, registers=128, appenders=4, hint=True), _tiles(4, 128, turns=1, appenders=4, hint=True))),
        (48, (_tiles(2, 168, stages=2, appenders=4, flushers=3),)),
        (96, (_tiles(2, 168, stages=2, appenders=4, settle=2),)),
        (1 << 30, (_tiles(4, 128, stages=2, appenders=4, settle=4),)),
    ),
}
# The same where a flush may take its rows together (16-bit checkpoints); "tile" and smaller batches replay serially.
_CHUNK_TILE = _tile(1, 64, 4, registers=128, appenders=4, hint=True)
_CHUNK_80 = _tiles(2, 168, stages=2, appenders=4, settle=2, hint=True, hint_rows=16, hint_first=792)
STEP_CHUNK = (
    (4, ()),
    (8, (_CHUNK_TILE, _tiles(4, 96, stages=2, appenders=4, flushers=1, hint=True, hint_rows=32))),
    (16, (_CHUNK_TILE, _CHUNK_80)),
    (
        48,
        (
            _tiles(2, 128, turns=4, stages=2, appenders=4, settle=2, hint=True, hint_rows=16, hint_first=1056),
            _CHUNK_80,
        ),
    ),
    (96, (_tiles(2, 168, stages=2, appenders=4, settle=2),)),
    (1 << 30, (_tiles(4, 96, stages=2, appenders=4, settle=4),)),
)
STEPWISE = {
    4: ((2, LaunchConfig("triton", 4, 1, pdl=True)), (32, LaunchConfig("triton", 8, 1, pdl=True))),
    2: ((1, LaunchConfig("triton", 16, 8, pdl=True)), (16, LaunchConfig("triton", 16, 4, pdl=True))),
}
FAST_ARCHS = ("sm90", "sm100", "sm103")


def rows_fit(rows: int) -> bool:
    """Whether an item's V-rows are a power of two up to 64, or two of them."""
    rest = rows - min(1 << (rows.bit_length() - 1), 64)
    return rest <= 64 and rest & (rest - 1) == 0


def fits(config: LaunchConfig, shape: Shape) -> bool:
    """Whether a configuration can serve a layer of this shape."""
    rows = config.block_v * max(config.turns, 1)
    return (
        shape.d_state in (64, 128, 256)
        and (shape.num_heads // shape.n_groups) % config.heads == 0
        and shape.head_dim % rows == 0
        and config.block_v >= 4 * config.num_warps // config.heads
        and (config.block_v >= 16 or not config.chunked)
        and (shape.tma or config.kernel != "tiles")
        and (config.appenders == 0 or shape.num_heads % config.appenders == 0)
        and (config.kernel != "tiles" or rows_fit(rows if config.turns else shape.head_dim))
    )


@cache
def step_config(batch: int, shape: Shape, chunk: bool = False) -> LaunchConfig:
    """The step kernel's configuration; chunk: a flush may take its rows together."""
    if shape.arch in FAST_ARCHS:
        choices = next(choices for largest, choices in STEP[shape.state_bytes] if batch <= largest)
        if chunk:
            together = next(choices for largest, choices in STEP_CHUNK if batch <= largest)
            choices = (*(replace(config, chunked=config.kernel == "tiles") for config in together), *choices)
        for config in (*choices, _tile(1, 16, 4), _tile(1, 16, 2)):
            config = replace(config, block_v=max(config.block_v * 128 // shape.d_state, 4))
            if fits(config, shape):
                # The caps on registers were tuned where they are measured; elsewhere nothing may spill.
                registers = config.max_registers
                if shape.arch != "sm90":
                    registers = 240 if config.flushers else None
                elif shape.d_state > 128 and config.kernel == "tile":
                    registers = None
                turns = config.turns or shape.head_dim // config.block_v
                return replace(config, turns=turns, max_registers=registers)
    return LaunchConfig("triton", 16 if shape.head_dim % 32 else 32, 4)


@cache
def stepwise_config(batch: int, shape: Shape) -> LaunchConfig:
    """The stepwise kernel's configuration."""
    small = [config for largest, config in STEPWISE[shape.state_bytes] if batch <= largest]
    config = small[0] if small else LaunchConfig("triton", 8, 1)
    return replace(config, pdl=config.pdl and shape.arch in FAST_ARCHS)


def route(batch: int, shape: Shape, chunk: bool = False) -> str:
    """One line that names what a step runs."""
    return describe(step_config(batch, shape, chunk))


@cache
def materialize_config(batch: int, shape: Shape) -> LaunchConfig:
    """The materialize kernel's configuration."""
    return LaunchConfig("triton", 16, 2)


def describe(config: LaunchConfig) -> str:
    """One line that names what runs."""
    kernel = {"triton": "triton", "tile": "gluon, one tile a program", "tiles": "gluon, TMA"}[config.kernel]
    parts = [f"{kernel}: {config.heads} x {config.block_v} rows, {config.num_warps} warps"]
    if config.kernel == "tiles":
        parts.append(f"{config.turns} tiles, {config.stages} in flight")
    if config.appenders:
        parts.append("appends last")
    if config.settle:
        parts.append("late flushes first")
    if config.chunked:
        parts.append("flushes in chunks")
    return ", ".join(parts)


def takes_chunks(replay: str, state: torch.dtype, activation: torch.dtype, rows: int) -> bool:
    """Whether a flush of up to `rows` rows takes them together: as `replay` allows, beside a 16-bit checkpoint."""
    check_choice("replay", replay, ("serial", "chunk"))
    return replay == "chunk" and state.itemsize == 2 and activation.itemsize == 2 and rows <= 32
