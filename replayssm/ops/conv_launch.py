"""Launches the convolution kernels."""

from __future__ import annotations

import torch
import triton

from replayssm.ops.triton_conv import conv_step_kernel, conv_window_kernel

LARGE_BATCH = 64  # from here on a program serves several rows with the taps that it has read


def conv_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    slot_indices: torch.Tensor,
    out: torch.Tensor,
    *,
    silu: bool,
    pad_slot_id: int,
    block: int = 0,
    rows: int = 0,
) -> None:
    """Convolve one token a row: x, out [n, channels], weight [channels, 4], states [slots, 3, channels] in place.

    Channels are contiguous everywhere; rows and slots may have any stride. Rows of pad_slot_id or of a slot that there
    is not are padding: nothing of theirs is touched, outputs included. block, rows: sizes of a program (0: by batch).
    """
    batch, channels = x.shape
    if batch == 0:
        return
    block = block or (256 if batch < LARGE_BATCH else 1024)
    rows = rows or (1 if batch < LARGE_BATCH else 4)
    conv_step_kernel[(triton.cdiv(channels, block), triton.cdiv(batch, rows))](
        *(x, weight, weight if bias is None else bias, states, slot_indices, out),
        *(batch, states.shape[0], pad_slot_id, channels, x.stride(0), *states.stride()[:2], out.stride(0)),
        BLOCK=block,
        ROWS=rows,
        HAS_BIAS=bias is not None,
        SILU=silu,
        PDL=_has_pdl(x.device),
        num_warps=4 if block >= 512 else 2,
        **({"launch_pdl": True} if _has_pdl(x.device) else {}),
    )


def conv_window(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    slot_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    out: torch.Tensor,
    *,
    max_window_len: int,
    silu: bool,
    pad_slot_id: int,
    block: int = 0,
) -> None:
    """Convolve windows of tokens: x, out [num_tokens, channels], states [slots, at least max_window_len + 2, channels].

    query_start_loc [n + 1] int32 delimits the windows. A state holds the two inputs before a slot's last window, then
    the window; num_accepted_tokens [n] int32 says how many of the window count. Else as `conv_step`.
    """
    batch, channels = len(slot_indices), x.shape[1]
    if batch == 0:
        return
    block = block or (256 if batch < LARGE_BATCH else 512)
    conv_window_kernel[(triton.cdiv(channels, block), batch)](
        *(x, weight, weight if bias is None else bias, states, slot_indices, query_start_loc, num_accepted_tokens, out),
        *(states.shape[0], pad_slot_id, channels, x.stride(0), *states.stride()[:2], out.stride(0)),
        WINDOW=max_window_len,
        BLOCK=block,
        HAS_BIAS=bias is not None,
        SILU=silu,
        PDL=_has_pdl(x.device),
        num_warps=2,
        **({"launch_pdl": True} if _has_pdl(x.device) else {}),
    )


def _has_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)
