"""What the launches of the GDN and KDA kernels pass: the layer's shape, the kernel and its options, strides."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
import triton

from replayssm.checks import fail
from replayssm.ops.delta import configs
from replayssm.ops.delta.configs import LaunchConfig, Shape
from replayssm.ops.device import check_one_token, device_arch, is_aligned

STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layer_shape(state: torch.Tensor, num_k_heads: int, g: torch.Tensor, *values: torch.Tensor) -> Shape:
    """What the choice of a configuration depends on; `values` are ring_v and ring_u where a kernel reads them."""
    heads, v_dim, k_dim = state.shape[1:]
    ring_len = values[0].shape[2] if values else 0
    aligned = all(is_aligned(tensor) for tensor in (state, *values))
    size, arch = state.element_size(), device_arch(state.device)
    return Shape(num_k_heads, heads, k_dim, v_dim, g.dim() == 3, size, ring_len, aligned, arch)


@cache
def _function(backend: str, name: str) -> Any:
    """The kernel, imported on first use."""
    return getattr(importlib.import_module(f"replayssm.ops.delta.{backend}_{name}"), f"delta_{name}_kernel")


def check_state(state: torch.Tensor, query_start_loc: torch.Tensor | None, max_window_len: int) -> None:
    check_one_token(query_start_loc, max_window_len)
    if state.dtype not in STATE_DTYPES:
        raise fail("state.dtype", state.dtype, ", ".join(map(str, STATE_DTYPES)) + " on a GPU")


def kernel_of(name: str, config: LaunchConfig, state: torch.Tensor, num_k_heads: int) -> tuple[Any, dict[str, Any]]:
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


def chunks(replay: str) -> bool:
    """Whether a flush takes the chunk form."""
    if replay not in ("serial", "chunk"):
        raise fail("replay", replay, "'serial' or 'chunk'")
    return replay == "chunk"


def tiles_of(config: LaunchConfig, state: torch.Tensor) -> int:
    return int(state.shape[1]) * triton.cdiv(state.shape[2], config.block_v)


def most_rows(config: LaunchConfig, ring_len: int, buffer_len: int) -> int:
    """Ring rows that a program takes at once: portably those it may read, in Gluon also those it may replay."""
    most = ring_len - 1 if config.backend == "gluon" else min(buffer_len, ring_len) - 1
    return max(16, triton.next_power_of_2(most))


def token_strides(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, out: torch.Tensor
) -> tuple[int, ...]:
    return tuple(stride for x in (q, k, v, g, beta, out) for stride in x.stride()[:2])


def slot_strides(backend: str, tensor: torch.Tensor) -> tuple[int, int]:
    """Slot and head stride in elements, or (Gluon) in 16-byte chunks, which proves the alignment to the compiler."""
    per_chunk = 16 // tensor.element_size() if backend == "gluon" else 1
    return tensor.stride(0) // per_chunk, tensor.stride(1) // per_chunk


def ring_strides(backend: str, rings: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    """Slot and head strides of ring_k, ring_v, ring_u, ring_g, ring_beta; those of ring_v and ring_u as the state's."""
    ring_k, ring_v, ring_u, ring_g, ring_beta = rings
    values = (*slot_strides(backend, ring_v), *slot_strides(backend, ring_u))
    return (*ring_k.stride()[:2], *values, *ring_g.stride()[:2], *ring_beta.stride()[:2])


def gate_options(
    g: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
    use_qk_l2norm: bool,
) -> dict[str, bool]:
    raw, bounded = A_log is not None, lower_bound is not None
    return {"KDA": g.dim() == 3, "RAW": raw, "HAS_BIAS": dt_bias is not None, "BOUNDED": bounded, "NORM": use_qk_l2norm}
