"""Launches the Mamba-2 kernels that read a copy of the checkpoint, or an fp8 checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton

from replayssm.checks import check_choice, fail
from replayssm.config import Mamba2Spec
from replayssm.ops.device import device_arch, is_aligned
from replayssm.ops.mamba2.read_configs import ReadConfig, ReadShape, read_config
from replayssm.ops.mamba2.read_window_launch import ReadWindowConfig, fits, launch_window
from replayssm.ops.window_config import window_rows

READ_FORMATS = {torch.bfloat16: "bf16", torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.uint8: "nvfp4"}
CHECKPOINTS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8"}
NATIVE_ARCHS = ("sm89", "sm90", "sm100", "sm103", "sm120")


def mamba2_read_step(
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
    read_codes: torch.Tensor | None,
    read_scales: torch.Tensor | None,
    read_global: torch.Tensor | None,
    state_scales: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    stream: int = 0,
    replay: str = "serial",
    config: ReadConfig | None = None,
    window_config: ReadWindowConfig | None = None,
) -> None:
    """See `replayssm.ops.mamba2.reference.mamba2_step`; `config` and `window_config` (windows) override the tables."""
    if query_start_loc is None and max_window_len != 1:
        raise fail("max_window_len", max_window_len, "1 without query_start_loc")
    check_choice("replay", replay, ("serial", "chunk"))
    batch = slot_indices.shape[0]
    if batch == 0:
        return
    copy = (state, state_scales, None) if read_codes is None else (read_codes, read_scales, read_global)
    stored = tuple(as_bytes(state if t is None else t) for t in (state_scales, *copy))
    shape = layer_shape(state, B.shape[1], x.dtype, read_codes, seeds is not None)
    if query_start_loc is not None:
        rows_read = window_rows(buffer_len, max_window_len)
        # A lowered buffer_len changes nothing: a flush of the Gluon kernel takes any number of rows.
        if config is None and fits(shape, rows_read, max_window_len):
            return launch_window(
                (x, dt, A, B, C, D, z, dt_bias), as_bytes(state), (ring_x, ring_B, ring_dt),
                (cursors, slot_indices, query_start_loc, parents), out, stored, shape, window_config,
                buffer_len=buffer_len, pad_slot_id=pad_slot_id, dt_softplus=dt_softplus, max_window_len=max_window_len,
                replay=replay,
            )  # fmt: skip
        shape = replace(shape, fast=False)
    config = config or read_config(batch, shape)
    portable = config.kernel != "gluon"
    rows = [query_start_loc, parents] if portable else []
    rounding = [cursors if seeds is None else seeds] if portable else []
    rest: dict[str, Any] = {
        "R": ring_B.shape[2],
        "ROWS": _rows(config, buffer_len, max_window_len, ring_B.shape[2]),
        "HAS_D": D is not None,
        "HAS_Z": z is not None,
        "HAS_BIAS": dt_bias is not None,
        "SOFTPLUS": dt_softplus,
    }
    if not portable:
        rest["REPLAY"] = replay
    else:
        rest |= {"WINDOWS": query_start_loc is not None, "TREE": parents is not None, "STOCHASTIC": seeds is not None}
    kernel, grid, counts, options = (_portable if portable else _gluon)(config, batch, shape)
    kernel[(grid,)](
        *(x, dt, A, B, C, A if D is None else D, x if z is None else z, A if dt_bias is None else dt_bias),
        *(as_bytes(state), ring_x, ring_B, ring_dt, cursors, slot_indices),
        *(slot_indices if t is None else t for t in rows),
        *(out, *stored, *rounding, state.shape[0], buffer_len, pad_slot_id, *(stream for _ in rounding)),
        *_token_strides(x, dt, B, C, z, out),
        *(stride for tensor in (state, ring_x, ring_B, ring_dt) for stride in tensor.stride()[:2]),
        *(tensor.stride(0) for tensor in stored),
        *counts,
        **rest,
        **options,
    )


def route(spec: Mamba2Spec, *, checkpoint: str, read: str, batch: int, device: torch.device, ring_len: int) -> str:
    """One line that names the kernel and the configuration of a step of a contiguous cache."""
    dims = (spec.num_heads, spec.n_groups, spec.head_dim, spec.d_state)
    return str(read_config(batch, ReadShape(*dims, read, checkpoint, device_arch(device))))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """e4m3 as bytes: kernels convert them themselves, on every target."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def layer_shape(
    state: torch.Tensor,
    n_groups: int,
    activation: torch.dtype,
    codes: torch.Tensor | None,
    special: bool = False,
) -> ReadShape:
    """What the configuration depends on: the Gluon kernel takes 16-bit activations and 16-byte accesses.

    special: stochastic rounding, which the portable kernel alone has.
    """
    heads, head_dim, d_state = state.shape[1:]
    read = "none" if codes is None else READ_FORMATS[codes.dtype]
    whole = state if codes is None else codes
    fast = activation in (torch.bfloat16, torch.float16) and not special
    fast = fast and is_aligned(state) and is_aligned(whole) and whole[0].is_contiguous()
    arch = device_arch(state.device)
    return ReadShape(heads, n_groups, head_dim, d_state, read, CHECKPOINTS[state.dtype], arch, fast)


def _token_strides(
    x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, C: torch.Tensor, z: torch.Tensor | None, out: torch.Tensor
) -> tuple[int, ...]:
    gate = (0, 0) if z is None else z.stride()[:2]
    return (*x.stride()[:2], dt.stride(0), *B.stride()[:2], *C.stride()[:2], *gate, *out.stride()[:2])


def _rows(config: ReadConfig, buffer_len: int, max_window_len: int, ring_len: int) -> int:
    """Rows that the committed ones and the new tokens fill together, as the kernels lay them out."""
    if config.kernel == "gluon":
        return int(max(triton.next_power_of_2(min(buffer_len, ring_len)), 8))
    return window_rows(buffer_len, max_window_len)


def _dims(shape: ReadShape) -> dict[str, Any]:
    sizes = {"H": shape.num_heads, "G": shape.n_groups, "P": shape.head_dim, "N": shape.d_state}
    return {**sizes, "READ": shape.read, "CHECKPOINT": shape.checkpoint}


Launch = tuple[Any, int, tuple[int, ...], dict[str, Any]]  # kernel, programs, its last arguments, its options


def _portable(config: ReadConfig, batch: int, shape: ReadShape) -> Launch:
    from replayssm.ops.mamba2.triton_read import mamba2_portable_read_kernel

    blocks = {"BV": triton.next_power_of_2(shape.head_dim), "BK": triton.next_power_of_2(shape.d_state)}
    options = {**_dims(shape), **blocks, "NATIVE": shape.arch in NATIVE_ARCHS}
    options |= {"num_warps": config.num_warps, "num_stages": 1}
    return mamba2_portable_read_kernel, batch * shape.num_heads, (), options


def _gluon(config: ReadConfig, batch: int, shape: ReadShape) -> Launch:
    from replayssm.ops.mamba2.gluon_read import mamba2_read_kernel

    flushers = triton.cdiv(batch, config.flush_rows) * shape.num_heads
    readers = batch * shape.num_heads * shape.head_dim // (16 * config.num_warps * config.tiles)
    options = {**_dims(shape), "TILES": config.tiles, "GROUP": config.group, "DEPTH": config.depth}
    options |= {"FLUSH_ROWS": config.flush_rows, "EVERY": config.every, "APPENDERS": config.appenders}
    options |= {"AHEAD": config.ahead, "HINT": config.hint}
    options |= {"num_warps": config.num_warps, "maxnreg": config.max_registers}
    options["launch_pdl"] = True
    grid = flushers + readers + batch * config.appenders
    return mamba2_read_kernel, grid, (batch, flushers, readers), options
