"""Launch configurations of the GDN and KDA kernels: data, chosen from what the host knows, never from timing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from replayssm.ops.device import GLUON_ARCHS


@dataclass(frozen=True)
class LaunchConfig:
    """How a kernel is launched.

    backend: "triton" (portable) or "gluon" (NVIDIA). block_v: V-rows of a tile. For Gluon's step also num_tiles: tiles
    a program; stages: tiles in flight; early: V-rows of the first tile that are requested before the cursors are known
    (None: all; what is requested later does not delay the ring's rows); settle: a flushing row in the last 1 / settle
    of the batch trades places with an early one (0: off); interleave: rows whose programs alternate; pdl: programmatic
    dependent launch; hint: before the previous kernel is done, ask the memory for the state (1; its first hint_rows
    V-rows a program, if not 0), and for the ring's rows, dead ones too (2); by the first hint_programs of the grid
    alone, if not 0; flushers: so many flushing rows have programs of their own, a tile each (in batches of at most 64
    rows). flushers exclude settle and interleave. late: a program that reads writes outputs, u and the new row of the
    ring at its end. tensor_cores: they read a 16-bit checkpoint, in tiles of 16 V-rows a warp.
    """

    backend: str
    block_v: int
    num_warps: int
    num_tiles: int = 1
    stages: int = 1
    max_registers: int | None = None
    settle: int = 0
    interleave: int = 1
    pdl: bool = False
    early: int | None = None
    hint: int = 0
    hint_rows: int = 0
    hint_programs: int = 0
    flushers: int = 0
    late: bool = False
    tensor_cores: bool = False

    def __str__(self) -> str:
        tiles = f", {self.num_tiles} tiles, {self.stages} in flight" if self.num_tiles > 1 else ""
        return f"{self.backend} {self.block_v} rows, {self.num_warps} warps{tiles}"


@dataclass(frozen=True)
class Shape:
    """What a choice depends on besides the batch.

    aligned: state, ring_v and ring_u allow 16-byte accesses.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    kda: bool
    state_bytes: int
    ring_len: int
    aligned: bool
    arch: str


def _step(block_v: int, num_tiles: int, stages: int, registers: int, **more: Any) -> LaunchConfig:
    return LaunchConfig("gluon", block_v, 4, num_tiles, stages, registers, pdl=True, **more)


def _stepwise(block_v: int, num_warps: int) -> LaunchConfig:
    return LaunchConfig("gluon", block_v, num_warps, pdl=True)


_FIRST: dict[str, Any] = {"hint": 1, "hint_rows": 16, "hint_programs": 528}
# (KDA, bytes of a state's element): up to how many tiles of 64 x 128 in the batch, and the configuration for them.
# Measured on one H200 at batches 1, 8, 32 and 256 of 32 and 64 v-heads.
STEP = {
    (False, 4): (
        (96, _step(32, 1, 1, 96, early=8, hint=2)),
        (192, _step(64, 1, 1, 128, early=16, hint=2)),
        (768, _step(64, 1, 1, 128, early=16, hint=2, hint_rows=16)),
        (1536, _step(64, 2, 1, 128, early=16, hint=2, hint_rows=16, flushers=1)),
        (3072, _step(64, 2, 1, 128, early=16, hint=1, hint_rows=16, flushers=3)),
        (6144, _step(64, 8, 1, 128, early=16, flushers=3, late=True)),
        (12288, _step(64, 4, 1, 128, early=16, settle=2, interleave=8)),
        (24576, _step(64, 4, 2, 168, settle=8, interleave=8, hint=1, hint_rows=16, hint_programs=396, late=True)),
        (1 << 40, _step(64, 4, 1, 128, settle=8, interleave=8, late=True, **_FIRST)),
    ),
    (False, 2): (
        (192, _step(32, 1, 1, 96, early=8, hint=2)),
        (768, _step(64, 2, 2, 128, early=16, hint=2, hint_rows=16, tensor_cores=True)),
        (1536, _step(64, 2, 1, 128, early=16, hint=2, hint_rows=16, tensor_cores=True)),
        (3072, _step(64, 4, 2, 128, early=16, hint=1, hint_rows=32, flushers=3, late=True, tensor_cores=True)),
        (6144, _step(64, 8, 2, 128, early=16, hint=1, hint_rows=16, flushers=3, late=True, tensor_cores=True)),
        (12288, _step(64, 4, 1, 128, early=16, flushers=3, tensor_cores=True)),
        (1 << 40, _step(64, 8, 2, 128, settle=8, interleave=8, late=True, tensor_cores=True, **_FIRST)),
    ),
    (True, 4): (
        (96, _step(32, 1, 1, 96, hint=2)),
        (384, _step(64, 1, 1, 128, early=16, hint=2)),
        (768, _step(64, 1, 1, 128, early=16, hint=1)),
        (3072, _step(64, 2, 1, 128, early=16, hint=1, hint_rows=32, flushers=2)),
        (6144, _step(64, 2, 1, 128, settle=2, interleave=8)),
        (1 << 40, _step(64, 2, 1, 128, early=16, settle=8, interleave=8, **_FIRST)),
    ),
    (True, 2): (
        (96, _step(32, 1, 1, 96, hint=2)),
        (384, _step(64, 1, 1, 128, early=16, hint=2, tensor_cores=True)),
        (768, _step(64, 2, 1, 128, early=16, hint=2, tensor_cores=True)),
        (3072, _step(64, 2, 1, 128, early=16, flushers=3, tensor_cores=True)),
        (1 << 40, _step(64, 2, 2, 128, settle=8, interleave=8, tensor_cores=True, **_FIRST)),
    ),
}
STEPWISE = {4: ((1536, _stepwise(16, 2)), (1 << 40, _stepwise(8, 1))), 2: ((1 << 40, _stepwise(32, 2)),)}
MATERIALIZE = LaunchConfig("gluon", 32, 4)
# The Gluon kernels hold tiles of these K; their ring loops take up to 32 rows at once.
GLUON_K = (64, 128)
GLUON_RING_LEN = 33
MOST_ROWS_WITH_FLUSHERS = 64


@cache
def step_config(batch: int, shape: Shape) -> LaunchConfig:
    """Configuration of the step kernel."""
    if not _gluon_fits(shape) or shape.ring_len > GLUON_RING_LEN:
        return _portable(shape)
    config = _with_tiles(_pick(STEP[shape.kda, shape.state_bytes], batch, shape), shape)
    if config.flushers == 0 or batch <= MOST_ROWS_WITH_FLUSHERS:
        return config
    return replace(config, flushers=0, hint=0, settle=2, interleave=8)


def step_options(config: LaunchConfig) -> dict[str, Any]:
    """The Gluon step kernel's constants that a configuration names."""
    early = config.block_v if config.early is None else config.early
    options = {"NUM_TILES": config.num_tiles, "STAGES": config.stages, "EARLY": early, "SETTLE": config.settle}
    options |= {"INTERLEAVE": config.interleave, "HINT": config.hint, "HINT_ROWS": config.hint_rows}
    options |= {"HINT_PROGRAMS": config.hint_programs, "FLUSHERS": config.flushers, "LATE": config.late}
    return options | {"TENSOR_CORES": config.tensor_cores}


@cache
def stepwise_config(batch: int, shape: Shape) -> LaunchConfig:
    """Configuration of the stepwise kernel."""
    return _pick(STEPWISE[shape.state_bytes], batch, shape) if _gluon_fits(shape) else _portable(shape)


@cache
def materialize_config(shape: Shape) -> LaunchConfig:
    """Configuration of the materialize kernel."""
    return MATERIALIZE if _gluon_fits(shape) else _portable(shape)


def flushes_in_chunks(config: LaunchConfig, chunk: bool) -> bool:
    """Whether a flush takes its rows together where it may: by tiles of at least 16 V-rows a warp."""
    return chunk and config.backend == "gluon" and config.block_v >= 16 * config.num_warps


def route(batch: int, shape: Shape, chunk: bool = False) -> str:
    """One line for a plan: what a decode step of this batch runs."""
    config = step_config(batch, shape)
    return f"{config}, flushes in chunks" if flushes_in_chunks(config, chunk) else str(config)


def _gluon_fits(shape: Shape) -> bool:
    rows = shape.head_v_dim % 64 == 0
    return shape.arch in GLUON_ARCHS and shape.head_k_dim in GLUON_K and rows and shape.aligned


def _num_tiles(batch: int, shape: Shape) -> int:
    """The batch's states in tiles of 64 x 128."""
    return batch * shape.num_v_heads * shape.head_v_dim * shape.head_k_dim // (64 * 128)


def _pick(table: tuple[tuple[int, LaunchConfig], ...], batch: int, shape: Shape) -> LaunchConfig:
    tiles = _num_tiles(batch, shape)
    config = next(config for most, config in table if tiles <= most)
    # The register caps were measured on sm90; elsewhere nothing may spill.
    return config if shape.arch == "sm90" else replace(config, max_registers=config.max_registers and 240)


def _with_tiles(config: LaunchConfig, shape: Shape) -> LaunchConfig:
    """As many tiles a program as divide those of a k-head, and whole v-heads or parts of one."""
    per_head = shape.head_v_dim // config.block_v
    total, tiles = shape.num_v_heads // shape.num_k_heads * per_head, config.num_tiles
    while total % tiles or (tiles % per_head and per_head % tiles):
        tiles //= 2
    return replace(config, num_tiles=tiles, stages=min(config.stages, tiles))


def _portable(shape: Shape) -> LaunchConfig:
    """The portable kernels' tile: at most 4096 elements."""
    rows = max(4, 4096 // _power_of_2(shape.head_k_dim))
    return LaunchConfig("triton", min(rows, _power_of_2(shape.head_v_dim)), 4)


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
