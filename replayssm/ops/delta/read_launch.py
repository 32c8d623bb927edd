"""Launches the GDN and KDA kernels that read a copy of the checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton

from replayssm.config import GDNSpec, KDASpec, LayerSpec
from replayssm.ops.delta.arguments import chunks, gate_options, ring_strides, slot_strides, token_strides
from replayssm.ops.delta.read_configs import ReadConfig, ReadShape, read_config
from replayssm.ops.device import GLUON_ARCHS, device_arch, is_aligned

if TYPE_CHECKING:
    from replayssm.ops.delta.read_window_configs import ReadWindowConfig

READ_FORMATS = {torch.bfloat16: "bf16", torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.uint8: "nvfp4"}
CHECKPOINTS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8"}
NATIVE_ARCHS = ("sm89", *GLUON_ARCHS)


def delta_read_step(
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
    read_codes: torch.Tensor | None,
    read_scales: torch.Tensor | None,
    read_global: torch.Tensor | None,
    state_scales: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    stream: int = 0,
    replay: str = "serial",
    max_committed: int = 0,
    config: ReadConfig | None = None,
    window_config: ReadWindowConfig | None = None,
) -> None:
    """See `replayssm.ops.delta.reference.delta_step`. `config` and `window_config` (windows) override the tables.

    max_committed: rows that a flush of a window may find, where that is more than buffer_len.
    """
    if query_start_loc is not None or max_window_len != 1:
        from replayssm.ops.delta.read_window_launch import delta_read_window

        return delta_read_window(
            *(q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors),
            *(slot_indices, query_start_loc, out),
            config=window_config,
            buffer_len=buffer_len,
            pad_slot_id=pad_slot_id,
            scale=scale,
            use_qk_l2norm=use_qk_l2norm,
            lower_bound=lower_bound,
            max_window_len=max_window_len,
            parents=parents,
            read_codes=read_codes,
            read_scales=read_scales,
            read_global=read_global,
            state_scales=state_scales,
            seeds=seeds,
            stream=stream,
            replay=replay,
            max_committed=max_committed,
        )
    chunk = chunks(replay)
    batch = slot_indices.shape[0]
    if batch == 0:
        return
    rings = (ring_k, ring_v, ring_u, ring_g, ring_beta)
    random = seeds is not None
    shape = layer_shape(state, k.shape[1], g, rings, read_codes, scales=read_scales, stochastic=random)
    config = config or read_config(batch, shape)
    stored = _stored(state, read_codes, read_scales, read_global, state_scales)
    inputs = (q, k, v, g, beta, g if A_log is None else A_log, g if dt_bias is None else dt_bias)
    if config.backend == "gluon":
        launches = _launches(config, batch, shape, chunk)
        if read_codes is None:  # the checkpoint is its own copy
            stored = (stored[0], stored[3], *stored[2:])
        stored, counts = (stored[0].view(torch.int32), *stored), (pad_slot_id, batch)
    else:
        kernel, grid, options = _portable(config, batch, shape, buffer_len)
        launches = [(kernel, grid, options | {"STOCHASTIC": random})]
        seeds = cursors if seeds is None else seeds
        counts = (pad_slot_id, stream)
    for kernel, grid, options in launches:
        kernel[(grid,)](
            *(*inputs, _as_bytes(state), *rings, cursors, slot_indices, out, *stored),
            *(() if config.backend == "gluon" else (seeds,)),
            *(state.shape[0], shape.ring_len, buffer_len, *counts, scale, lower_bound or 0.0),
            *token_strides(q, k, v, g, beta, out),
            *slot_strides(config.backend, state),
            *ring_strides(config.backend, rings),
            *(slot_strides(config.backend, stored[-4])[0], *(tensor.stride(0) for tensor in stored[-3:])),
            **gate_options(g, A_log, dt_bias, lower_bound, use_qk_l2norm),
            **options,
        )


def route(spec: LayerSpec, *, checkpoint: str, read: str, batch: int, device: torch.device, ring_len: int) -> str:
    """One line that names the kernel and the configuration of a step of a contiguous cache."""
    assert isinstance(spec, GDNSpec)
    dims = (spec.num_k_heads, spec.num_v_heads, spec.head_k_dim, spec.head_v_dim, isinstance(spec, KDASpec))
    return str(read_config(batch, ReadShape(*dims, read, checkpoint, ring_len, True, device_arch(device))))


def layer_shape(
    state: torch.Tensor,
    num_k_heads: int,
    g: torch.Tensor,
    rings: tuple[torch.Tensor, ...],
    codes: torch.Tensor | None,
    *,
    scales: torch.Tensor | None = None,
    stochastic: bool = False,
) -> ReadShape:
    """What the choice of a configuration depends on; only the portable kernel rounds stochastically."""
    heads, v_dim, k_dim = state.shape[1:]
    read = "none" if codes is None else READ_FORMATS[codes.dtype]
    large = (state, *rings[:3], *(() if codes is None else (codes,)))
    fast = rings[2].dtype in (torch.bfloat16, torch.float16) and all(is_aligned(tensor) for tensor in large)
    # nvfp4's scales are read in pairs.
    fast = fast and (scales is None or (scales.data_ptr() | scales.stride(0) * scales.element_size()) % 2 == 0)
    # Inside a slot the Gluon kernel counts in 32 bits.
    fast = fast and not stochastic and all(tensor.stride(1) * heads < 2**31 for tensor in rings)
    dims = (num_k_heads, heads, k_dim, v_dim, g.dim() == 3)
    return ReadShape(*dims, read, CHECKPOINTS[state.dtype], rings[0].shape[2], fast, device_arch(state.device))


def _launches(config: ReadConfig, batch: int, shape: ReadShape, chunk: bool) -> list[tuple[Any, int, dict[str, Any]]]:
    """The Gluon step's launch; or the flushing launch, then the reading one that runs beside it."""
    from replayssm.ops.delta import gluon_read_alone, gluon_read_step

    HV, K, V = shape.num_v_heads, shape.head_k_dim, shape.head_v_dim
    programs = batch * HV // config.heads
    both: dict[str, Any] = {"HV": HV, "GROUP": HV // shape.num_k_heads, "K": K, "V": V, "launch_pdl": True}
    both |= {"BLOCK_L": max(16, triton.next_power_of_2(shape.ring_len - 1))}
    both |= {"READ": "fp8" if shape.read == "none" else shape.read}
    read = {"HEADS": config.heads, "SPLIT": shape.kda, "num_warps": config.num_warps, "maxnreg": config.max_registers}
    flush = {"COPY": shape.read != "none", "BLOCK_B": max(32, triton.next_power_of_2(batch))}
    if config.flush_warps:
        together = config.flush_heads if chunk else 0
        crew = min(config.crew, batch * HV // max(1, together))
        rows = (config.flush_rows if together else 0) or 16 * config.flush_warps
        flush |= {"CHUNK_HEADS": together, "BLOCK_V": rows}
        flush |= {"num_warps": config.flush_warps, "maxnreg": config.flush_registers}
        return [
            (gluon_read_alone.delta_read_flush_kernel, crew, both | flush),
            (gluon_read_alone.delta_read_alone_kernel, programs, both | read),
        ]
    crew = min(config.crew, batch * HV)
    flush |= {"BLOCK_V": 16 * config.num_warps, "CREW": crew}
    flush |= {"EVERY": max(1, min(config.every, (programs + crew) // crew))}
    return [(gluon_read_step.delta_read_step_kernel, programs + crew, both | read | flush)]


def _portable(config: ReadConfig, batch: int, shape: ReadShape, buffer_len: int) -> tuple[Any, int, dict[str, Any]]:
    from replayssm.ops.delta.triton_read_step import delta_read_step_kernel

    HV, K, V = shape.num_v_heads, shape.head_k_dim, shape.head_v_dim
    options: dict[str, Any] = {"HV": HV, "GROUP": HV // shape.num_k_heads, "K": K, "V": V, "READ": shape.read}
    options |= {"BLOCK_K": triton.next_power_of_2(K), "BLOCK_V": triton.next_power_of_2(V)}
    options |= {"BLOCK_L": max(16, triton.next_power_of_2(min(buffer_len, shape.ring_len) - 1))}
    options |= {"CHECKPOINT": shape.checkpoint, "NATIVE": shape.arch in NATIVE_ARCHS, "num_warps": config.num_warps}
    return delta_read_step_kernel, batch * HV, options


def _stored(
    state: torch.Tensor,
    codes: torch.Tensor | None,
    scales: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    state_scales: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Codes, scales, the heads' scales and the checkpoint's; the state stands for what is absent."""
    return tuple(_as_bytes(state if t is None else t) for t in (codes, scales, global_scale, state_scales))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """e4m3 as bytes: the kernels convert them themselves."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
