"""Launches the Mamba-2 window kernels: several tokens a row, windows of any lengths, drafts as chains or trees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton

from replayssm.checks import fail
from replayssm.config import Mamba2Spec
from replayssm.ops.device import GLUON_ARCHS
from replayssm.ops.mamba2.configs import takes_chunks
from replayssm.ops.window_config import WindowConfig, fast_arch, window_arch, window_rows


@dataclass(frozen=True)
class WindowShape:
    """What a configuration may depend on; `arch` is "" where only the portable kernel runs."""

    num_heads: int
    n_groups: int
    head_dim: int
    d_state: int
    state_bytes: int
    window_len: int
    rows: int
    arch: str


# From this many tiles in the batch on: about so many tiles a program (chunk: of flushes on the tensor cores).
TILES = ((4096, 4), (1024, 2), (0, 1))
TILES_CHUNK = ((16384, 8), (4096, 4), (1024, 2), (0, 1))
MULTIPROCESSORS = 132  # of the GPU that the table was measured on
# Batches up to this many rows have programs for a quarter of them that only flush, those above settle.
MOST_ROWS_WITH_FLUSHERS = 16


@cache
def window_config(batch: int, shape: WindowShape, chunk: bool = False) -> WindowConfig:
    """Configuration of the window kernel; chunk: a flush takes its rows together."""
    if not _gluon_fits(shape):
        rows = max(4, 1024 // triton.next_power_of_2(shape.d_state))
        return WindowConfig("triton", min(rows, triton.next_power_of_2(shape.head_dim)), 4)
    # Tiles of 8192 elements, of several heads where these are odd, then of half as many beside an fp32 checkpoint.
    rows = min(64, 8192 // shape.d_state)
    block_v = next(n for n in (64, 32, 16) if shape.head_dim % n == 0 and n <= rows)
    narrow = block_v == 16 < rows and shape.state_bytes == 4 and batch > 2
    heads = _divisor(shape.num_heads // shape.n_groups, (rows // 2 if narrow else rows) // block_v)
    tiles = shape.num_heads // shape.n_groups // heads * (shape.head_dim // block_v)
    total = batch * shape.n_groups * tiles * heads * block_v // 64
    target = next(n for least, n in (TILES_CHUNK if chunk else TILES) if total >= least)
    small = 2 < batch <= MOST_ROWS_WITH_FLUSHERS
    if narrow:
        target = shape.head_dim // block_v
    elif small and chunk and heads > 1:
        target = 3
    num_tiles = min((n for n in range(1, tiles + 1) if tiles % n == 0), key=lambda n: (abs(n - target), -n))
    roomy = shape.window_len > 8 or narrow or (heads > 1 and shape.state_bytes == 2 and not chunk)
    # Of the first tile of large batches, 16 rows where it is of several heads, else all.
    early = 16 if batch < 128 or heads > 1 else None
    tile = WindowConfig(
        "gluon", block_v, heads * block_v // 16, num_tiles, max_registers=_registers(shape, roomy), dependent=True,
        early=early, heads=heads, chunked=chunk,
    )  # fmt: skip
    # Programs that append have at most 8 heads each.
    appenders = next(n for n in range(1, shape.num_heads + 1) if shape.num_heads % n == 0 and shape.num_heads // n <= 8)
    if batch <= 2:
        return replace(tile, num_tiles=1, hint=1, appenders=appenders)
    if small:
        alone = num_tiles > 1 and (heads > 1 or not chunk)
        return replace(tile, flushers=-(-batch // 4) if alone else 0)
    stages = min(2, num_tiles) if chunk else 1
    settle = _settle(batch * shape.n_groups * tiles // num_tiles, tile.num_warps)
    return replace(tile, stages=stages, settle=settle, appenders=appenders if narrow else 0)


def _registers(shape: WindowShape, roomy: bool) -> int | None:
    """The cap on registers, where it was measured."""
    measured = shape.arch == "sm90" and shape.d_state <= 128 and shape.rows <= 16
    return (168 if roomy else 128) if measured else None


def _settle(programs: int, num_warps: int) -> int:
    """Parts of a batch of which the last should not flush: about the waves of programs, as reads hide other flushes."""
    waves = programs / (MULTIPROCESSORS * min(16 // num_warps, 6))
    return next(n for n in (16, 8, 4, 2) if waves >= 0.75 * n or n == 2)


def _divisor(number: int, most: int) -> int:
    """The largest power of two up to `most` (at least 1) that divides a number."""
    return next(n for n in (4, 2, 1) if n <= max(most, 1) and number % n == 0)


def _gluon_fits(shape: WindowShape) -> bool:
    return (
        shape.arch in GLUON_ARCHS
        and shape.head_dim % 16 == 0
        # A tile of 256 columns leaves no registers on the other architectures.
        and shape.d_state in ((64, 128, 256) if shape.arch == "sm90" else (64, 128))
        and shape.window_len <= 16
        and shape.rows <= 32
    )


def window_route(
    state_dtype: torch.dtype,
    batch: int,
    spec: Mamba2Spec,
    device: torch.device,
    buffer_len: int,
    max_window_len: int,
    activation: torch.dtype,
    replay: str = "serial",
) -> str:
    """One line that names the kernel and the configuration of a window step of a contiguous cache."""
    dims = (spec.num_heads, spec.n_groups, spec.head_dim, spec.d_state)
    rows, arch = window_rows(buffer_len, max_window_len), fast_arch(device, activation)
    shape = WindowShape(*dims, state_dtype.itemsize, max_window_len, rows, arch)
    return str(window_config(batch, shape, takes_chunks(replay, state_dtype, activation, rows)))


def mamba2_window(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    ring_x: torch.Tensor,
    ring_B: torch.Tensor,
    ring_dt: torch.Tensor,
    cursors: torch.Tensor,
    slot_indices: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    out: torch.Tensor,
    *,
    buffer_len: int,
    pad_slot_id: int,
    dt_softplus: bool,
    max_window_len: int,
    parents: torch.Tensor | None = None,
    replay: str = "serial",
    max_committed: int = 0,
    config: WindowConfig | None = None,
) -> None:
    """As `replayssm.ops.mamba2.reference.mamba2_step`; `config` overrides `window_config`.

    replay: "chunk" lets a flush take its rows together where a kernel can. max_committed: rows that a flush may find,
    where that is more than buffer_len.
    """
    if query_start_loc is None:
        raise fail("query_start_loc", None, "[batch + 1] int32 with windows")
    batch = slot_indices.shape[0]
    if batch == 0:
        return
    rows = window_rows(buffer_len, max_window_len)
    flushed = window_rows(max(buffer_len, max_committed), max_window_len)
    chunk = takes_chunks(replay, state.dtype, x.dtype, flushed)
    shape = _shape(state, ring_B.shape[1], x.dtype, flushed, max_window_len)
    config = config or window_config(batch, shape, chunk)
    fast = config.backend == "gluon"
    if fast:
        kernel, grid, options = _gluon(state, batch, max_window_len, config)
        options |= {"FLUSH_ROWS": flushed}
    else:
        kernel, grid, options = _portable(state, batch, config)
    unit = 16 // state.element_size() if fast else 1
    kernel[grid](
        *(x, dt, A, B, C, A if D is None else D, x if z is None else z, A if dt_bias is None else dt_bias),
        *(state, ring_x, ring_B, ring_dt, cursors, slot_indices, query_start_loc),
        *(query_start_loc if parents is None else parents, out),
        *((batch,) if fast else ()),
        *(state.shape[0], buffer_len, pad_slot_id),
        *(stride for t in (x, dt, B, C) for stride in t.stride()[:2]),
        *((0, 0) if z is None else z.stride()[:2]),
        *out.stride()[:2],
        *(stride // unit for stride in state.stride()[:2]),
        *(stride for t in (ring_x, ring_B, ring_dt) for stride in t.stride()[:2]),
        ROWS=rows,
        G=ring_B.shape[1],
        R=ring_B.shape[2],
        TREE=parents is not None,
        HAS_D=D is not None,
        HAS_Z=z is not None,
        HAS_BIAS=dt_bias is not None,
        SOFTPLUS=dt_softplus,
        **options,
    )


def _shape(
    state: torch.Tensor, num_groups: int, activation: torch.dtype, rows: int, max_window_len: int
) -> WindowShape:
    heads, head_dim, d_state = state.shape[1:]
    arch = window_arch(state, activation)
    return WindowShape(heads, num_groups, head_dim, d_state, state.element_size(), max_window_len, rows, arch)


def _portable(state: torch.Tensor, batch: int, config: WindowConfig) -> tuple[Any, tuple[int, ...], dict[str, Any]]:
    from replayssm.ops.mamba2.triton_window import mamba2_window_kernel

    heads, head_dim, d_state = state.shape[1:]
    options: dict[str, Any] = {"H": heads, "P": head_dim, "N": d_state, "BV": config.block_v}
    options["BK"] = triton.next_power_of_2(d_state)
    grid = (heads * triton.cdiv(head_dim, config.block_v), batch)
    return mamba2_window_kernel, grid, options | {"num_warps": config.num_warps, "num_stages": 1}


def _gluon(
    state: torch.Tensor, batch: int, max_window_len: int, config: WindowConfig
) -> tuple[Any, tuple[int, ...], dict[str, Any]]:
    from replayssm.ops.mamba2.gluon_window import mamba2_window_kernel

    heads, head_dim, d_state = state.shape[1:]
    options: dict[str, Any] = {"H": heads, "P": head_dim, "N": d_state} | tile_options(config)
    options |= config.gluon_options(8 if max_window_len <= 8 else 16)
    tiles = heads // config.heads * (head_dim // config.block_v)
    programs = batch * tiles // config.num_tiles + config.flushers * tiles + batch * config.appenders
    return mamba2_window_kernel, (programs,), options


def tile_options(config: WindowConfig) -> dict[str, Any]:
    """Constants of the Gluon kernel that only Mamba-2 has."""
    return {
        "BV": config.block_v,
        "HW": config.heads,
        "APPENDERS": config.appenders,
        "CHUNKED": config.chunked,
    }
