"""Launches the GDN and KDA kernels: checks what they support, picks a configuration, passes strides."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
import triton

from replayssm.checks import fail
from replayssm.config import GDNSpec, KDASpec
from replayssm.ops.delta import configs
from replayssm.ops.delta.configs import LaunchConfig, Shape
from replayssm.ops.delta.window_launch import chunks, delta_window
from replayssm.ops.delta.window_launch import window_route as window_route
from replayssm.ops.device import check_one_token, device_arch, is_aligned

STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def delta_step(
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
    replay: str = "serial",
    max_committed: int = 0,
    config: LaunchConfig | None = None,
) -> None:
    """See `replayssm.ops.delta.reference.delta_step`; `config` overrides the tables of one-token steps.

    replay: a flush's form, "serial" (token by token, bit for bit as stepwise decoding) or "chunk" (products that are
    accurate to fp32, of 16-bit inputs; the portable kernel and tiles of less than 16 V-rows a warp replay serially).
    max_committed: rows that a flush of a window may find, where that is more than buffer_len.
    """
    chunk = chunks(replay) and v.element_size() == 2
    rings = (ring_k, ring_v, ring_u, ring_g, ring_beta)
    if query_start_loc is not None:
        delta_window(
            *(q, k, v, g, beta, A_log, dt_bias, state, *rings, cursors, slot_indices, query_start_loc, out),
            buffer_len=buffer_len,
            pad_slot_id=pad_slot_id,
            scale=scale,
            use_qk_l2norm=use_qk_l2norm,
            lower_bound=lower_bound,
            max_window_len=max_window_len,
            parents=parents,
            replay=replay,
            max_committed=max_committed,
        )
        return
    _check(state, None, max_window_len)
    batch = slot_indices.shape[0]
    if batch == 0:
        return
    if config is None:
        config = configs.step_config(batch, layer_shape(state, k.shape[1], g, ring_v, ring_u))
    kernel, options = _kernel("step", config, state, k.shape[1])
    if config.backend == "gluon":
        options["CHUNK"] = chunk and config.block_v >= 16 * config.num_warps
    tiles = _tiles(config, state)
    kernel[(tiles // config.num_tiles * batch + tiles * config.flushers,)](
        *(q, k, v, g, beta, g if A_log is None else A_log, g if dt_bias is None else dt_bias),
        *(state, *rings, cursors, slot_indices, out),
        *(state.shape[0], ring_k.shape[2], buffer_len, pad_slot_id, scale, lower_bound or 0.0),
        *_token_strides(q, k, v, g, beta, out),
        *_slot_strides(config, state),
        *_ring_strides(config, rings),
        BLOCK_L=_most_rows(config, ring_k.shape[2], buffer_len),
        **_gate_options(g, A_log, dt_bias, lower_bound, use_qk_l2norm),
        **options,
    )


def delta_stepwise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    slot_indices: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    out: torch.Tensor,
    *,
    pad_slot_id: int,
    scale: float,
    use_qk_l2norm: bool,
    lower_bound: float | None,
    max_window_len: int,
    config: LaunchConfig | None = None,
) -> None:
    """See `replayssm.ops.delta.reference.delta_stepwise`; `config` overrides the tables in `configs`."""
    _check(state, query_start_loc, max_window_len)
    batch = slot_indices.shape[0]
    if batch == 0:
        return
    config = config or configs.stepwise_config(batch, layer_shape(state, k.shape[1], g))
    kernel, options = _kernel("stepwise", config, state, k.shape[1])
    kernel[(_tiles(config, state) * batch,)](
        *(q, k, v, g, beta, g if A_log is None else A_log, g if dt_bias is None else dt_bias),
        *(state, slot_indices, out, state.shape[0], pad_slot_id, scale, lower_bound or 0.0),
        *_token_strides(q, k, v, g, beta, out),
        *_slot_strides(config, state),
        **_gate_options(g, A_log, dt_bias, lower_bound, use_qk_l2norm),
        **options,
    )


def delta_materialize(
    state: torch.Tensor,
    ring_k: torch.Tensor,
    ring_v: torch.Tensor,
    ring_g: torch.Tensor,
    ring_beta: torch.Tensor,
    cursors: torch.Tensor,
    slot_indices: torch.Tensor,
    num_tokens: torch.Tensor | None,
    dst: torch.Tensor,
    dst_indices: torch.Tensor,
    *,
    pad_slot_id: int,
    use_qk_l2norm: bool,
    config: LaunchConfig | None = None,
) -> None:
    """See `replayssm.ops.delta.reference.delta_materialize`; `config` overrides the tables in `configs`."""
    _check(state, None, 1)
    batch = slot_indices.shape[0]
    if batch == 0:
        return
    rings = (ring_k, ring_v, ring_g, ring_beta)
    config = config or configs.materialize_config(layer_shape(state, ring_k.shape[1], ring_g[:, :, 0]))
    kernel, options = _kernel("materialize", config, state, ring_k.shape[1])
    kernel[(_tiles(config, state) * batch,)](
        *(state, *rings, cursors, slot_indices, cursors if num_tokens is None else num_tokens, dst, dst_indices),
        *(state.shape[0], dst.shape[0], ring_k.shape[2], pad_slot_id),
        *_slot_strides(config, state),
        *(stride for ring in rings for stride in ring.stride()[:2]),
        *dst.stride()[:2],
        KDA=ring_g.dim() == 4,
        NORM=use_qk_l2norm,
        ALL_ROWS=num_tokens is None,
        **({"BLOCK_L": 16} if config.backend == "gluon" else {}),
        **options,
    )


def layer_shape(state: torch.Tensor, num_k_heads: int, g: torch.Tensor, *values: torch.Tensor) -> Shape:
    """What the choice of a configuration depends on; `values` are ring_v and ring_u where a kernel reads them."""
    heads, v_dim, k_dim = state.shape[1:]
    ring_len = values[0].shape[2] if values else 0
    aligned = all(is_aligned(tensor) for tensor in (state, *values))
    size = state.element_size()
    return Shape(num_k_heads, heads, k_dim, v_dim, g.dim() == 3, size, ring_len, aligned, device_arch(state.device))


def route(state_dtype: torch.dtype, batch: int, spec: GDNSpec, device: torch.device, ring_len: int = 17) -> str:
    """One line that names the kernel and the configuration of a step of a contiguous cache."""
    return configs.route(batch, _contiguous_shape(state_dtype, spec, device, ring_len))


def stepwise_wins(
    state_dtype: torch.dtype, batch: int, spec: GDNSpec, device: torch.device, ring_len: int = 17
) -> bool:
    """Whether a contiguous cache decodes a batch of this size faster stepwise."""
    return configs.stepwise_wins(batch, _contiguous_shape(state_dtype, spec, device, ring_len))


def _contiguous_shape(state_dtype: torch.dtype, spec: GDNSpec, device: torch.device, ring_len: int) -> Shape:
    heads, dims = (spec.num_k_heads, spec.num_v_heads), (spec.head_k_dim, spec.head_v_dim)
    kda = isinstance(spec, KDASpec)
    return Shape(*heads, *dims, kda, state_dtype.itemsize, ring_len, True, device_arch(device))


@cache
def _function(backend: str, name: str) -> Any:
    """The kernel, imported on first use."""
    return getattr(importlib.import_module(f"replayssm.ops.delta.{backend}_{name}"), f"delta_{name}_kernel")


def _check(state: torch.Tensor, query_start_loc: torch.Tensor | None, max_window_len: int) -> None:
    check_one_token(query_start_loc, max_window_len)
    if state.dtype not in STATE_DTYPES:
        raise fail("state.dtype", state.dtype, ", ".join(map(str, STATE_DTYPES)) + " on a GPU")


def _kernel(name: str, config: LaunchConfig, state: torch.Tensor, num_k_heads: int) -> tuple[Any, dict[str, Any]]:
    """The kernel that `config` names, and its options that follow from shapes and configuration."""
    heads, v_dim, k_dim = state.shape[1:]
    options: dict[str, Any] = {"HV": heads, "GROUP": heads // num_k_heads, "V": v_dim, "K": k_dim}
    options |= {"BLOCK_V": config.block_v, "num_warps": config.num_warps}
    if config.backend == "triton":
        return _function("triton", name), options | {"BLOCK_K": triton.next_power_of_2(k_dim)}
    if name == "step":
        options |= configs.step_options(config)
    options |= {"maxnreg": config.max_registers, "launch_pdl": config.pdl}
    return _function("gluon", name), options


def _tiles(config: LaunchConfig, state: torch.Tensor) -> int:
    return int(state.shape[1]) * triton.cdiv(state.shape[2], config.block_v)


def _most_rows(config: LaunchConfig, ring_len: int, buffer_len: int) -> int:
    """Ring rows that a program takes at once: portably those it may read, in Gluon also those it may replay."""
    most = ring_len - 1 if config.backend == "gluon" else min(buffer_len, ring_len) - 1
    return max(16, triton.next_power_of_2(most))


def _token_strides(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, out: torch.Tensor
) -> tuple[int, ...]:
    return tuple(stride for x in (q, k, v, g, beta, out) for stride in x.stride()[:2])


def _slot_strides(config: LaunchConfig, tensor: torch.Tensor) -> tuple[int, int]:
    """Slot and head stride in elements, or (Gluon) in 16-byte chunks, which proves the alignment to the compiler."""
    per_chunk = 16 // tensor.element_size() if config.backend == "gluon" else 1
    return tensor.stride(0) // per_chunk, tensor.stride(1) // per_chunk


def _ring_strides(config: LaunchConfig, rings: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    """Slot and head strides of ring_k, ring_v, ring_u, ring_g, ring_beta; those of ring_v and ring_u as the state's."""
    ring_k, ring_v, ring_u, ring_g, ring_beta = rings
    values = (*_slot_strides(config, ring_v), *_slot_strides(config, ring_u))
    return (*ring_k.stride()[:2], *values, *ring_g.stride()[:2], *ring_beta.stride()[:2])


def _gate_options(
    g: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    use_qk_l2norm: bool,
) -> dict[str, bool]:
    raw, bounded = A_log is not None, lower_bound is not None
    return {"KDA": g.dim() == 3, "RAW": raw, "HAS_BIAS": dt_bias is not None, "BOUNDED": bounded, "NORM": use_qk_l2norm}
