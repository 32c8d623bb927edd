"""Launches the GDN and KDA kernels: checks what they support, picks a configuration, passes strides."""

from __future__ import annotations

import torch

from replayssm.config import GDNSpec, KDASpec
from replayssm.ops.delta import configs
from replayssm.ops.delta.arguments import (
    check_state,
    chunks,
    gate_options,
    kernel_of,
    layer_shape,
    most_rows,
    ring_strides,
    slot_strides,
    tiles_of,
    token_strides,
)
from replayssm.ops.delta.configs import LaunchConfig, Shape
from replayssm.ops.delta.window_launch import delta_window
from replayssm.ops.delta.window_launch import window_route as window_route
from replayssm.ops.device import device_arch


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
    check_state(state, None, max_window_len)
    batch = slot_indices.shape[0]
    if batch == 0:
        return
    if config is None:
        config = configs.step_config(batch, layer_shape(state, k.shape[1], g, ring_v, ring_u))
    kernel, options = kernel_of("step", config, state, k.shape[1])
    if config.backend == "gluon":
        options["CHUNK"] = configs.flushes_in_chunks(config, chunk)
    tiles = tiles_of(config, state)
    programs = tiles // config.num_tiles * batch + tiles * config.flushers
    kernel[(programs,)](
        *(q, k, v, g, beta, g if A_log is None else A_log, g if dt_bias is None else dt_bias),
        *(state, *rings, cursors, slot_indices, out),
        *(state.shape[0], ring_k.shape[2], buffer_len, pad_slot_id, scale, lower_bound or 0.0),
        *token_strides(q, k, v, g, beta, out),
        *slot_strides(config.backend, state),
        *ring_strides(config.backend, rings),
        BLOCK_L=most_rows(config, ring_k.shape[2], buffer_len),
        **gate_options(g, A_log, dt_bias, lower_bound, use_qk_l2norm),
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
    check_state(state, query_start_loc, max_window_len)
    batch = slot_indices.shape[0]
    if batch == 0:
        return
    config = config or configs.stepwise_config(batch, layer_shape(state, k.shape[1], g))
    kernel, options = kernel_of("stepwise", config, state, k.shape[1])
    kernel[(tiles_of(config, state) * batch,)](
        *(q, k, v, g, beta, g if A_log is None else A_log, g if dt_bias is None else dt_bias),
        *(state, slot_indices, out, state.shape[0], pad_slot_id, scale, lower_bound or 0.0),
        *token_strides(q, k, v, g, beta, out),
        *slot_strides(config.backend, state),
        **gate_options(g, A_log, dt_bias, lower_bound, use_qk_l2norm),
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
    check_state(state, None, 1)
    batch = slot_indices.shape[0]
    if batch == 0:
        return
    rings = (ring_k, ring_v, ring_g, ring_beta)
    config = config or configs.materialize_config(layer_shape(state, ring_k.shape[1], ring_g[:, :, 0]))
    kernel, options = kernel_of("materialize", config, state, ring_k.shape[1])
    kernel[(tiles_of(config, state) * batch,)](
        *(state, *rings, cursors, slot_indices, cursors if num_tokens is None else num_tokens, dst, dst_indices),
        *(state.shape[0], dst.shape[0], ring_k.shape[2], pad_slot_id),
        *slot_strides(config.backend, state),
        *(stride for ring in rings for stride in ring.stride()[:2]),
        *dst.stride()[:2],
        KDA=ring_g.dim() == 4,
        NORM=use_qk_l2norm,
        ALL_ROWS=num_tokens is None,
        **({"BLOCK_L": 16} if config.backend == "gluon" else {}),
        **options,
    )


def route(
    state_dtype: torch.dtype,
    batch: int,
    spec: GDNSpec,
    device: torch.device,
    ring_len: int = 17,
    replay: str = "serial",
) -> str:
    """One line that names what a step runs, of a contiguous cache of that size and 16-bit inputs."""
    heads, dims = (spec.num_k_heads, spec.num_v_heads), (spec.head_k_dim, spec.head_v_dim)
    kda, arch = isinstance(spec, KDASpec), device_arch(device)
    shape = Shape(*heads, *dims, kda, state_dtype.itemsize, ring_len, True, arch)
    return configs.route(batch, shape, chunks(replay))
