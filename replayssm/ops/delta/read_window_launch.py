"""Launches the GDN and KDA window kernels that read a copy of the checkpoint: several tokens a row, chains or trees."""

from __future__ import annotations

from typing import Any

import torch
import triton

from replayssm.checks import fail
from replayssm.config import GDNSpec, KDASpec
from replayssm.ops import window_config as windows
from replayssm.ops.delta.launch import _gate_options, _token_strides
from replayssm.ops.delta.read_configs import ReadShape
from replayssm.ops.delta.read_launch import NATIVE_ARCHS, _as_bytes, _chunks, _elements, _stored, layer_shape
from replayssm.ops.delta.read_window_configs import PORTABLE, Launch, ReadWindowConfig, gluon_launch, read_window_config
from replayssm.ops.device import device_arch
from replayssm.ops.window_config import window_rows


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
    config: ReadWindowConfig | None = None,
) -> None:
    """See `replayssm.ops.delta.reference.delta_step`. `config` overrides `read_window_config`."""
    if query_start_loc is None:
        raise fail("query_start_loc", None, "[batch + 1] int32 with windows")
    batch = slot_indices.shape[0]
    if batch == 0:
        return
    rings = (ring_k, ring_v, ring_u, ring_g, ring_beta)
    shape = layer_shape(state, k.shape[1], g, rings, read_codes, stochastic=seeds is not None)
    rows = window_rows(buffer_len, max_window_len)
    config = config or _config(batch, shape, rows, max_window_len)
    codes, scales, *others = _stored(state, read_codes, read_scales, read_global, state_scales)
    more: dict[str, Any] = {"ROWS": rows, "TREE": parents is not None}
    more |= _gate_options(g, A_log, dt_bias, lower_bound, use_qk_l2norm)
    if config.backend == "gluon":
        from replayssm.ops.delta.gluon_read_window import delta_read_window_kernel as kernel

        if read_codes is None:  # the checkpoint is its own copy
            scales = others[1]
        more |= {"TOKENS": max(4, triton.next_power_of_2(max_window_len)), "launch_pdl": True}
        launch, strides, count = gluon_launch(config, batch, shape, replay), _chunks, batch
        rounding: tuple[torch.Tensor, ...] = ()
    else:
        from replayssm.ops.delta.triton_read_window import delta_portable_read_window_kernel as kernel

        launch, strides, count = _portable(config, batch, shape), _elements, stream
        rounding, more["STOCHASTIC"] = (cursors if seeds is None else seeds,), seeds is not None
    grid, crew, sizes, options = launch
    kernel[(grid,)](
        *(q, k, v, g, beta, g if A_log is None else A_log, g if dt_bias is None else dt_bias, _as_bytes(state)),
        *(*rings, cursors, slot_indices, query_start_loc, query_start_loc if parents is None else parents),
        *(out, codes, scales, *others, *rounding),
        *(state.shape[0], shape.ring_len, buffer_len, pad_slot_id, count, *crew, scale, lower_bound or 0.0),
        *_token_strides(q, k, v, g, beta, out),
        *strides(state),
        *(stride for ring in rings for stride in ring.stride()[:2]),
        *(strides(codes)[0], *(tensor.stride(0) for tensor in (scales, *others))),
        **more,
        **sizes,
        **options,
    )


def _portable(config: ReadWindowConfig, batch: int, shape: ReadShape) -> Launch:
    """Programs, constants and options of the portable kernel."""
    HV, K, V = shape.num_v_heads, shape.head_k_dim, shape.head_v_dim
    sizes: dict[str, Any] = {"HV": HV, "GROUP": HV // shape.num_k_heads, "K": K, "V": V, "READ": shape.read}
    sizes |= {"BLOCK_K": triton.next_power_of_2(K), "BLOCK_V": triton.next_power_of_2(V)}
    sizes |= {"CHECKPOINT": shape.checkpoint, "NATIVE": shape.arch in NATIVE_ARCHS}
    return batch * HV, (), sizes, {"num_warps": config.num_warps}


def window_route(
    spec: GDNSpec, *, checkpoint: str, read: str, batch: int, device: torch.device, buffer_len: int, max_window_len: int
) -> str:
    """One line that names the kernel and the configuration of a window step of a contiguous cache."""
    dims = (spec.num_k_heads, spec.num_v_heads, spec.head_k_dim, spec.head_v_dim, isinstance(spec, KDASpec))
    rows = window_rows(buffer_len, max_window_len)
    shape = ReadShape(*dims, read, checkpoint, buffer_len + max_window_len, True, device_arch(device))
    return str(_config(batch, shape, rows, max_window_len))


def _config(batch: int, shape: ReadShape, rows: int, max_window_len: int) -> ReadWindowConfig:
    return read_window_config(batch, shape, rows, max_window_len) if windows.GLUON_READ_WINDOWS else PORTABLE
