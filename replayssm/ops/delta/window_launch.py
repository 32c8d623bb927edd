"""Launches the GDN and KDA window kernels: several tokens a row, windows of any lengths, drafts as chains or trees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

from replayssm.checks import fail
from replayssm.config import GDNSpec, KDASpec
from replayssm.ops.delta.arguments import chunks, gate_options, slot_strides, token_strides
from replayssm.ops.device import GLUON_ARCHS
from replayssm.ops.window_config import WindowConfig, fast_arch, tokens_laid_out, window_arch, window_rows


@dataclass(frozen=True)
class WindowShape:
    """What a configuration may depend on; `arch` is "" where only the portable kernel runs."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    kda: bool
    state_bytes: int
    window_len: int
    rows: int
    arch: str


# From this many tiles of 64 V-rows in the batch on: tiles a program; measured on one H200.
TILES = ((16384, 8), (4096, 4), (2048, 2), (0, 1))
# Batches up to this many rows have programs for a quarter of them that only flush, those above settle.
MOST_ROWS_WITH_FLUSHERS = 16


@cache
def window_config(batch: int, shape: WindowShape) -> WindowConfig:
    """Configuration of the window kernel."""
    if not _gluon_fits(shape):
        rows = max(4, 2048 // triton.next_power_of_2(shape.head_k_dim))
        return WindowConfig("triton", min(rows, triton.next_power_of_2(shape.head_v_dim)), 4)
    # The caps on registers were tuned where they are measured; elsewhere they would spill.
    capped = shape.arch == "sm90" and shape.window_len <= (4 if shape.kda else 8) and shape.rows <= 16
    registers = 168 if capped else None
    if batch <= 2:
        early = None if shape.kda else 8
        return WindowConfig("gluon", 32, 2, max_registers=registers, dependent=True, hint=2, early=early)
    # As many tiles a program as divide those of a k-head, and whole v-heads or parts of one.
    per_head = shape.head_v_dim // 64
    tiles = shape.num_v_heads // shape.num_k_heads * per_head
    whole = [n for n in (8, 4, 2, 1) if tiles % n == 0 and (n % per_head == 0 or per_head % n == 0)]
    total = batch * shape.num_k_heads * tiles
    if batch <= MOST_ROWS_WITH_FLUSHERS and 2 in whole:
        # Where two programs share a multiprocessor with two tiles each: KDA's longer windows need too much beside them.
        stages = 2 if shape.state_bytes == 4 and total <= 768 and not (shape.kda and shape.window_len > 4) else 1
        flushers = -(-batch // 4)
        return WindowConfig("gluon", 64, 4, 2, stages, registers, dependent=True, early=16, flushers=flushers)
    num_tiles = next(n for least, n in TILES if total >= least and n in whole)
    # Trading places gains KDA nothing in large batches.
    settle = (0 if shape.kda else 8) if batch >= 128 else 4 if total >= 8192 and not shape.kda else 2
    if capped and shape.state_bytes == 2 and not shape.kda:
        registers = 128
    return WindowConfig("gluon", 64, 4, num_tiles, 1, registers, settle, dependent=True, early=16)


def window_route(
    state_dtype: torch.dtype,
    batch: int,
    spec: GDNSpec,
    device: torch.device,
    buffer_len: int,
    max_window_len: int,
    activation: torch.dtype,
) -> str:
    """One line that names the kernel and the configuration of a window step of a contiguous cache."""
    dims = (spec.num_k_heads, spec.num_v_heads, spec.head_k_dim, spec.head_v_dim, isinstance(spec, KDASpec))
    rows, arch = window_rows(buffer_len, max_window_len), fast_arch(device, activation)
    return str(window_config(batch, WindowShape(*dims, state_dtype.itemsize, max_window_len, rows, arch)))


def _gluon_fits(shape: WindowShape) -> bool:
    return (
        shape.arch in GLUON_ARCHS
        and shape.head_v_dim % 64 == 0
        and shape.head_k_dim in (64, 128)
        and shape.window_len <= 8
        and shape.rows <= 16
    )


def delta_window(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    ring_k: torch.Tensor,
    ring_v: torch.Tensor,
    ring_u: torch.Tensor,
    ring_g: torch.Tensor,
    ring_beta: torch.Tensor,
    cursors: torch.Tensor,
    slot_indices: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    out: torch.Tensor,
    *,
    buffer_len: int,
    pad_slot_id: int,
    scale: float,
    use_qk_l2norm: bool,
    lower_bound: float | None,
    max_window_len: int,
    parents: torch.Tensor | None = None,
    config: WindowConfig | None = None,
    replay: str = "serial",
    max_committed: int = 0,
) -> None:
    """As `replayssm.ops.delta.reference.delta_step`; `config` overrides `window_config`.

    replay: a flush's form, "serial" (token by token) or "chunk" (products that are accurate to fp32); the portable
    kernel knows the first only. max_committed: rows that a flush may find, where that is more than buffer_len.
    """
    if query_start_loc is None:
        raise fail("query_start_loc", None, "[batch + 1] int32 with windows")
    batch = slot_indices.shape[0]
    if batch == 0:
        return
    kda = g.dim() == 3
    shape = _shape(
        state, (ring_v, ring_u, v), ring_k.shape[1], q.dtype, kda, max(buffer_len, max_committed), max_window_len
    )
    config = config or window_config(batch, shape)
    make = _gluon if config.backend == "gluon" else _portable
    kernel, grid, options = make(state, batch, max_window_len, config)
    if config.backend == "gluon":
        options["CHUNK"] = chunks(replay)
    kernel[grid](
        *(q, k, v, g, beta, g if A_log is None else A_log, g if dt_bias is None else dt_bias),
        *(state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices, query_start_loc),
        *(query_start_loc if parents is None else parents, out),
        *(state.shape[0], ring_k.shape[2], buffer_len, pad_slot_id, scale, lower_bound or 0.0),
        *token_strides(q, k, v, g, beta, out),
        *slot_strides(config.backend, state),
        *(stride for t in (ring_k, ring_v, ring_u, ring_g, ring_beta) for stride in t.stride()[:2]),
        ROWS=window_rows(buffer_len, max_window_len),
        GROUP=state.shape[1] // ring_k.shape[1],
        TREE=parents is not None,
        **gate_options(g, A_log, dt_bias, lower_bound, use_qk_l2norm),
        **options,
    )


def _shape(
    state: torch.Tensor,
    values: tuple[torch.Tensor, ...],
    num_k_heads: int,
    activation: torch.dtype,
    kda: bool,
    buffer_len: int,
    max_window_len: int,
) -> WindowShape:
    """values: what is copied to shared memory 16 bytes at a time, [.., heads, ..]."""
    heads, v_dim, k_dim = state.shape[1:]
    rows, arch = window_rows(buffer_len, max_window_len), window_arch(state, activation)
    if not all(_copies_wide(tensor) for tensor in values):
        arch = ""
    return WindowShape(num_k_heads, heads, k_dim, v_dim, kda, state.element_size(), max_window_len, rows, arch)


def _copies_wide(tensor: torch.Tensor) -> bool:
    """Whether the compiler can prove that rows of values start at 16 bytes: it learns whether 16 divides a stride."""
    return tensor.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in tensor.stride()[:2])


def _portable(
    state: torch.Tensor, batch: int, max_window_len: int, config: WindowConfig
) -> tuple[Any, tuple[int, ...], dict[str, Any]]:
    from replayssm.ops.delta.triton_window import delta_window_kernel

    heads, v_dim, k_dim = state.shape[1:]
    options: dict[str, Any] = {"HV": heads, "K": k_dim, "V": v_dim, "BLOCK_V": config.block_v}
    options["BLOCK_K"] = triton.next_power_of_2(k_dim)
    grid = (batch * heads * triton.cdiv(v_dim, config.block_v),)
    return delta_window_kernel, grid, options | {"num_warps": config.num_warps, "num_stages": 1}


def _gluon(
    state: torch.Tensor, batch: int, max_window_len: int, config: WindowConfig
) -> tuple[Any, tuple[int, ...], dict[str, Any]]:
    from replayssm.ops.delta.gluon_window import delta_window_kernel

    heads, v_dim, k_dim = state.shape[1:]
    options: dict[str, Any] = {"HV": heads, "K": k_dim, "V": v_dim, "BLOCK_V": config.block_v}
    options |= config.gluon_options(tokens_laid_out(max_window_len)) | {"WINDOW": max_window_len}
    tiles = heads * v_dim // config.block_v
    return delta_window_kernel, (batch * tiles // config.num_tiles + config.flushers * tiles,), options
