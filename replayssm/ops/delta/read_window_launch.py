"""Launches the GDN and KDA window kernels that read a copy of the checkpoint: several tokens a row, chains or trees."""

from __future__ import annotations

from typing import Any

import torch
import triton

from replayssm.checks import fail
from replayssm.config import GDNSpec, KDASpec
from replayssm.ops.delta.arguments import chunks, gate_options, slot_strides, token_strides
from replayssm.ops.delta.read_configs import ReadShape
from replayssm.ops.delta.read_launch import NATIVE_ARCHS, _as_bytes, _stored, layer_shape
from replayssm.ops.delta.read_window_configs import (
    ReadWindowConfig,
    gluon_launches,
    read_window_config,
    rows_laid_out,
)
from replayssm.ops.device import device_arch
from replayssm.ops.window_config import tokens_laid_out, window_rows


def delta_read_window(
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
    parents: torch.Tensor | None,
    read_codes: torch.Tensor | None,
    read_scales: torch.Tensor | None,
    read_global: torch.Tensor | None,
    state_scales: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    stream: int = 0,
    replay: str = "serial",
    max_committed: int = 0,
    config: ReadWindowConfig | None = None,
) -> None:
    """See `replayssm.ops.delta.reference.delta_step`. `config` overrides `read_window_config`.

    max_committed: rows that a flush may find, where that is more than buffer_len.
    """
    if query_start_loc is None:
        raise fail("query_start_loc", None, "[batch + 1] int32 with windows")
    chunk = chunks(replay)
    batch = slot_indices.shape[0]
    if batch == 0:
        return
    rings = (ring_k, ring_v, ring_u, ring_g, ring_beta)
    shape = layer_shape(state, k.shape[1], g, rings, read_codes, stochastic=seeds is not None)
    rows = rows_laid_out(max(buffer_len, max_committed), max_window_len)
    config = config or read_window_config(batch, shape, rows, max_window_len)
    stored = _stored(state, read_codes, read_scales, read_global, state_scales)
    more: dict[str, Any] = gate_options(g, A_log, dt_bias, lower_bound, use_qk_l2norm)
    tree = {"TREE": parents is not None}
    rounding: list[torch.Tensor] = []
    if config.backend == "gluon":
        more |= {"ROWS": rows}
        launches = _gluon(config, batch, shape, chunk, tree | {"TOKENS": tokens_laid_out(max_window_len)})
        if read_codes is None:  # the checkpoint is its own copy
            stored = (stored[0], stored[3], *stored[2:])
        count = batch
    else:
        more |= {"ROWS": window_rows(buffer_len, max_window_len)}
        rounding = [cursors if seeds is None else seeds]
        launches = [_portable(config, batch, shape, tree | {"STOCHASTIC": seeds is not None})]
        count = stream
    for kernel, grid, options in launches:
        kernel[(grid,)](
            *(q, k, v, g, beta, g if A_log is None else A_log, g if dt_bias is None else dt_bias, _as_bytes(state)),
            *(*rings, cursors, slot_indices, query_start_loc, query_start_loc if parents is None else parents),
            *(out, *stored, *rounding),
            *(state.shape[0], shape.ring_len, buffer_len, pad_slot_id, count, scale, lower_bound or 0.0),
            *token_strides(q, k, v, g, beta, out),
            *slot_strides(config.backend, state),
            *(stride for ring in rings for stride in ring.stride()[:2]),
            *(slot_strides(config.backend, stored[0])[0], *(tensor.stride(0) for tensor in stored[1:])),
            **more,
            **options,
        )


Launch = tuple[Any, int, dict[str, Any]]  # kernel, programs, constants and options


def _gluon(config: ReadWindowConfig, batch: int, shape: ReadShape, chunk: bool, window: dict[str, Any]) -> list[Launch]:
    """The flushing launch, then the reading one that runs beside it."""
    from replayssm.ops.delta import gluon_read_window as kernels

    (crew, flush), (programs, read) = gluon_launches(config, batch, shape, chunk)
    return [
        (kernels.delta_read_window_flush_kernel, crew, flush | {"launch_pdl": True}),
        (kernels.delta_read_window_kernel, programs, read | window | {"launch_pdl": True}),
    ]


def _portable(config: ReadWindowConfig, batch: int, shape: ReadShape, more: dict[str, Any]) -> Launch:
    from replayssm.ops.delta.triton_read_window import delta_portable_read_window_kernel

    HV, K, V = shape.num_v_heads, shape.head_k_dim, shape.head_v_dim
    sizes: dict[str, Any] = {"HV": HV, "GROUP": HV // shape.num_k_heads, "K": K, "V": V, "READ": shape.read}
    sizes |= {"BLOCK_K": triton.next_power_of_2(K), "BLOCK_V": triton.next_power_of_2(V)}
    sizes |= {"CHECKPOINT": shape.checkpoint, "NATIVE": shape.arch in NATIVE_ARCHS}
    return delta_portable_read_window_kernel, batch * HV, sizes | more | {"num_warps": config.num_warps}


def window_route(
    spec: GDNSpec, *, checkpoint: str, read: str, batch: int, device: torch.device, buffer_len: int, max_window_len: int
) -> str:
    """One line that names the kernel and the configuration of a window step of a contiguous cache."""
    dims = (spec.num_k_heads, spec.num_v_heads, spec.head_k_dim, spec.head_v_dim, isinstance(spec, KDASpec))
    rows = rows_laid_out(buffer_len, max_window_len)
    shape = ReadShape(*dims, read, checkpoint, buffer_len + max_window_len, True, device_arch(device))
    return str(read_window_config(batch, shape, rows, max_window_len))
