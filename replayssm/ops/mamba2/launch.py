"""Launches the Mamba-2 kernels: picks a configuration, passes pointers and strides. Signatures as in `reference`."""

from __future__ import annotations

from typing import Any

import torch
import triton

from replayssm.config import Mamba2Spec
from replayssm.ops.device import check_one_token, device_arch, is_aligned
from replayssm.ops.mamba2 import configs
from replayssm.ops.mamba2.configs import LaunchConfig, Shape
from replayssm.ops.mamba2.triton_materialize import mamba2_materialize_kernel
from replayssm.ops.mamba2.triton_step import mamba2_step_kernel
from replayssm.ops.mamba2.triton_stepwise import mamba2_stepwise_kernel
from replayssm.ops.mamba2.window_launch import mamba2_window
from replayssm.ops.mamba2.window_launch import window_route as window_route


def mamba2_step(
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
    config: LaunchConfig | None = None,
) -> None:
    """See `replayssm.ops.mamba2.reference.mamba2_step`; `config` overrides the tables of one-token steps.

    replay: "chunk" lets a flush take its rows together where a kernel can. max_committed: rows that a flush of a window
    may find, where that is more than buffer_len.
    """
    if query_start_loc is not None:
        mamba2_window(
            *(x, dt, A, B, C, D, z, dt_bias, state, ring_x, ring_B, ring_dt),
            *(cursors, slot_indices, query_start_loc, out),
            buffer_len=buffer_len,
            pad_slot_id=pad_slot_id,
            dt_softplus=dt_softplus,
            max_window_len=max_window_len,
            parents=parents,
            replay=replay,
            max_committed=max_committed,
        )
        return
    check_one_token(None, max_window_len)
    batch = slot_indices.shape[0]
    if batch == 0:
        return
    chunk = configs.takes_chunks(replay, state.dtype, x.dtype, ring_B.shape[2] - 1)
    config = config or configs.step_config(batch, layer_shape(state, B.shape[1]), chunk)
    kernel, grid, own, options = _step_kernel(config, batch, state, min(buffer_len, ring_B.shape[2]))
    flush_programs = grid // batch * config.turns * config.flushers
    kernel[(flush_programs + grid + batch * config.appenders,)](
        *own,
        *(x, dt, A, B, C, A if D is None else D, x if z is None else z, A if dt_bias is None else dt_bias),
        *(state, ring_x, ring_B, ring_dt, cursors, slot_indices, out, grid, state.shape[0], buffer_len, pad_slot_id),
        *_token_strides(x, dt, B, C, z, out),
        *(stride for tensor in (state, ring_x, ring_B, ring_dt) for stride in tensor.stride()[:2]),
        R=ring_B.shape[2],
        **options,
        **_features(state, B, D, z, dt_bias, dt_softplus),
    )


def mamba2_stepwise(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    slot_indices: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    out: torch.Tensor,
    *,
    pad_slot_id: int,
    dt_softplus: bool,
    max_window_len: int,
    config: LaunchConfig | None = None,
) -> None:
    """See `replayssm.ops.mamba2.reference.mamba2_stepwise`; `config` overrides the tables in `configs`."""
    check_one_token(query_start_loc, max_window_len)
    batch = slot_indices.shape[0]
    if batch == 0:
        return
    config = config or configs.stepwise_config(batch, layer_shape(state, B.shape[1]))
    mamba2_stepwise_kernel[(_tiles_of(state, config.block_v) * batch,)](
        *(x, dt, A, B, C, A if D is None else D, x if z is None else z, A if dt_bias is None else dt_bias),
        *(state, slot_indices, out, state.shape[0], pad_slot_id),
        *_token_strides(x, dt, B, C, z, out),
        *state.stride()[:2],
        **_portable_options(config, state),
        **_features(state, B, D, z, dt_bias, dt_softplus),
    )


def mamba2_materialize(
    A: torch.Tensor,
    state: torch.Tensor,
    ring_x: torch.Tensor,
    ring_B: torch.Tensor,
    ring_dt: torch.Tensor,
    cursors: torch.Tensor,
    slot_indices: torch.Tensor,
    num_tokens: torch.Tensor | None,
    dst: torch.Tensor,
    dst_indices: torch.Tensor,
    *,
    pad_slot_id: int,
    config: LaunchConfig | None = None,
) -> None:
    """See `replayssm.ops.mamba2.reference.mamba2_materialize`; `config` overrides the tables in `configs`."""
    batch, (H, P, N), (G, R) = slot_indices.shape[0], state.shape[1:], ring_B.shape[1:3]
    if batch == 0:
        return
    config = config or configs.materialize_config(batch, layer_shape(state, G))
    options = _portable_options(config, state)
    options.pop("PDL")
    mamba2_materialize_kernel[(_tiles_of(state, config.block_v) * batch,)](
        *(A, state, ring_x, ring_B, ring_dt, cursors, slot_indices, num_tokens, dst, dst_indices),
        *(state.shape[0], dst.shape[0], pad_slot_id),
        *(stride for tensor in (state, ring_x, ring_B, ring_dt, dst) for stride in tensor.stride()[:2]),
        **{"H": H, "G": G, "P": P, "N": N, "R": R, "HAS_NUM_TOKENS": num_tokens is not None, **options},
    )


def layer_shape(state: torch.Tensor, n_groups: int) -> Shape:
    """What the choice of a configuration depends on."""
    H, P, N = state.shape[1:]
    tma = is_aligned(state) and state.stride(2) == N
    return Shape(H, n_groups, P, N, state.element_size(), tma, device_arch(state.device))


def route(
    state_dtype: torch.dtype,
    batch: int,
    spec: Mamba2Spec,
    device: torch.device,
    ring_len: int = 17,
    replay: str = "serial",
) -> str:
    """One line that names what a step runs, of a contiguous cache of that size and 16-bit inputs."""
    chunk = configs.takes_chunks(replay, state_dtype, torch.bfloat16, ring_len - 1)
    dims = (spec.num_heads, spec.n_groups, spec.head_dim, spec.d_state)
    shape = Shape(*dims, state_dtype.itemsize, True, device_arch(device))
    return configs.route(batch, shape, chunk)


def _tiles_of(state: torch.Tensor, block_v: int) -> int:
    return int(state.shape[1]) * triton.cdiv(state.shape[2], block_v)


def _token_strides(
    x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, C: torch.Tensor, z: torch.Tensor | None, out: torch.Tensor
) -> tuple[int, ...]:
    gate = (0, 0) if z is None else z.stride()[:2]
    return (*x.stride()[:2], dt.stride(0), *B.stride()[:2], *C.stride()[:2], *gate, *out.stride()[:2])


def _features(
    state: torch.Tensor,
    B: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
) -> dict[str, Any]:
    has = {"HAS_D": D is not None, "HAS_Z": z is not None, "HAS_BIAS": dt_bias is not None, "SOFTPLUS": dt_softplus}
    return {"H": state.shape[1], "G": B.shape[1], "P": state.shape[2], "N": state.shape[3], **has}


def _portable_options(config: LaunchConfig, state: torch.Tensor) -> dict[str, Any]:
    pdl = {"launch_pdl": True} if config.pdl else {}
    block = {"BV": config.block_v, "BK": triton.next_power_of_2(state.shape[3]), "PDL": config.pdl}
    return {**block, "num_warps": config.num_warps, "num_stages": 1, **pdl}


def _step_kernel(
    config: LaunchConfig, batch: int, state: torch.Tensor, most_rows: int
) -> tuple[Any, int, tuple[Any, ...], dict[str, Any]]:
    """(kernel, programs without appenders, its leading arguments, its options); `most_rows` bounds live rows + 1."""
    if config.kernel == "triton":
        portable = _portable_options(config, state) | {"ROWS": triton.next_power_of_2(max(most_rows - 1, 1))}
        return mamba2_step_kernel, _tiles_of(state, config.block_v) * batch, (), portable
    from replayssm.ops.mamba2 import gluon_tile, gluon_tiles

    programs = batch * (state.shape[1] // config.heads) * (state.shape[2] // (config.block_v * config.turns))
    options: dict[str, Any] = {"BV": config.block_v, "ROWS": max(triton.next_power_of_2(most_rows), 8)}
    options |= {"APPENDERS": config.appenders, "SETTLE": config.settle, "PDL": config.pdl, "launch_pdl": config.pdl}
    options |= {"HINT": config.hint, "HINT_ROWS": config.hint_rows, "HINT_FIRST": config.hint_first}
    options |= {"num_warps": config.num_warps, "maxnreg": config.max_registers}
    if config.kernel == "tile":
        options |= {"HEADS": config.heads}
        return gluon_tile.mamba2_tile_kernel, programs, (), options
    descriptor = gluon_tiles.describe(state, config.heads, config.block_v)
    options |= {"TURNS": config.turns, "STAGES": config.stages}
    options |= {"RING_FIRST": config.ring_first, "FLUSHERS": config.flushers, "CHUNKED": config.chunked}
    return gluon_tiles.mamba2_tiles_kernel, programs, (descriptor,), options
