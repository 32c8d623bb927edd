"""Launches the Mamba-2 window kernels: several tokens a row, windows of any lengths, drafts as chains or trees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

from replayssm.checks import fail
from replayssm.config import Mamba2Spec
from replayssm.ops.device import GLUON_ARCHS
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


# (rows of a tile, from this many tiles in the batch on: tiles a program), measured on one H200.
TILES = {
    64: ((4096, 4), (1024, 2), (0, 1)),
    32: ((8192, 8), (2048, 4), (1024, 2), (0, 1)),
    16: ((65536, 10), (65536, 8), (2048, 5), (2048, 4), (1024, 2), (0, 1)),
}
# Batches up to this many rows have programs for a quarter of them that only flush, those above settle.
MOST_ROWS_WITH_FLUSHERS = 16


@cache
def window_config(batch: int, shape: WindowShape) -> WindowConfig:
    """Configuration of the window kernel."""
    if not _gluon_fits(shape):
        rows = max(4, 1024 // triton.next_power_of_2(shape.d_state))
        return WindowConfig("triton", min(rows, triton.next_power_of_2(shape.head_dim)), 4)
    block_v = next(rows for rows in (64, 32, 16) if shape.head_dim % rows == 0 and rows * shape.d_state <= 8192)
    tiles = shape.num_heads // shape.n_groups * shape.head_dim // block_v
    total = batch * shape.n_groups * tiles
    num_tiles = next(n for least, n in TILES[block_v] if total >= least and tiles % n == 0)
    # A stage of 16 to 32 KB a program; the caps on registers were tuned where they are measured.
    stages = min(2 if block_v < 64 else 1, num_tiles)
    capped = shape.arch == "sm90" and shape.d_state <= 128 and shape.rows <= 16
    registers = (128 if shape.window_len <= 8 and block_v == 64 else 168) if capped else None
    tile = ("gluon", block_v, block_v // 16)
    if batch <= 2:
        # A program of one warp spills without any cap.
        registers = registers or (240 if block_v == 16 else None)
        return WindowConfig(*tile, max_registers=registers, dependent=True, hint=1, early=min(16, block_v // 2))
    if batch <= MOST_ROWS_WITH_FLUSHERS:
        early, flushers = min(16, block_v // 2), -(-batch // 4) if num_tiles > 1 else 0
        return WindowConfig(*tile, num_tiles, stages, registers, dependent=True, early=early, flushers=flushers)
    settle = 8 if batch >= 128 else (4 if block_v == 16 else 2)
    return WindowConfig(*tile, num_tiles, stages, registers, settle, batch <= 32)


def window_route(
    state_dtype: torch.dtype,
    batch: int,
    spec: Mamba2Spec,
    device: torch.device,
    buffer_len: int,
    max_window_len: int,
    activation: torch.dtype,
) -> str:
    """One line that names the kernel and the configuration of a window step of a contiguous cache."""
    dims = (spec.num_heads, spec.n_groups, spec.head_dim, spec.d_state)
    rows, arch = window_rows(buffer_len, max_window_len), fast_arch(device, activation)
    return str(window_config(batch, WindowShape(*dims, state_dtype.itemsize, max_window_len, rows, arch)))


def _gluon_fits(shape: WindowShape) -> bool:
    return (
        shape.arch in GLUON_ARCHS
        and shape.head_dim % 16 == 0
        # A tile of 256 columns leaves no registers on the other architectures.
        and shape.d_state in ((64, 128, 256) if shape.arch == "sm90" else (64, 128))
        and shape.window_len <= 16
        and shape.rows <= 32
    )


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
    config: WindowConfig | None = None,
) -> None:
    """As `replayssm.ops.mamba2.reference.mamba2_step`; `config` overrides `window_config`."""
    if query_start_loc is None:
        raise fail("query_start_loc", None, "[batch + 1] int32 with windows")
    batch = slot_indices.shape[0]
    if batch == 0:
        return
    config = config or window_config(batch, _shape(state, ring_B.shape[1], x.dtype, buffer_len, max_window_len))
    make = _gluon if config.backend == "gluon" else _portable
    kernel, grid, options = make(state, ring_B.shape[1], batch, max_window_len, config)
    chunk = 16 // state.element_size() if config.backend == "gluon" else 1
    kernel[grid](
        *(x, dt, A, B, C, A if D is None else D, x if z is None else z, A if dt_bias is None else dt_bias),
        *(state, ring_x, ring_B, ring_dt, cursors, slot_indices, query_start_loc),
        *(query_start_loc if parents is None else parents, out),
        *(state.shape[0], buffer_len, pad_slot_id),
        *(stride for t in (x, dt, B, C) for stride in t.stride()[:2]),
        *((0, 0) if z is None else z.stride()[:2]),
        *out.stride()[:2],
        *(stride // chunk for stride in state.stride()[:2]),
        *(stride for t in (ring_x, ring_B, ring_dt) for stride in t.stride()[:2]),
        ROWS=window_rows(buffer_len, max_window_len),
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
    state: torch.Tensor, num_groups: int, activation: torch.dtype, buffer_len: int, max_window_len: int
) -> WindowShape:
    heads, head_dim, d_state = state.shape[1:]
    rows, arch = window_rows(buffer_len, max_window_len), window_arch(state, activation)
    return WindowShape(heads, num_groups, head_dim, d_state, state.element_size(), max_window_len, rows, arch)


def _portable(
    state: torch.Tensor, num_groups: int, batch: int, max_window_len: int, config: WindowConfig
) -> tuple[Any, tuple[int, ...], dict[str, Any]]:
    from replayssm.ops.mamba2.triton_window import mamba2_window_kernel

    heads, head_dim, d_state = state.shape[1:]
    options: dict[str, Any] = {"H": heads, "P": head_dim, "N": d_state, "BV": config.block_v}
    options["BK"] = triton.next_power_of_2(d_state)
    grid = (heads * triton.cdiv(head_dim, config.block_v), batch)
    return mamba2_window_kernel, grid, options | {"num_warps": config.num_warps, "num_stages": 1}


def _gluon(
    state: torch.Tensor, num_groups: int, batch: int, max_window_len: int, config: WindowConfig
) -> tuple[Any, tuple[int, ...], dict[str, Any]]:
    from replayssm.ops.mamba2.gluon_window import mamba2_window_kernel

    heads, head_dim, d_state = state.shape[1:]
    options: dict[str, Any] = {"H": heads, "P": head_dim, "N": d_state, "BV": config.block_v}
    options |= config.gluon_options(8 if max_window_len <= 8 else 16)
    tiles = heads * head_dim // config.block_v
    return mamba2_window_kernel, (batch * tiles // config.num_tiles + config.flushers * tiles,), options
