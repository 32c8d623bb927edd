"""Launches the convolution kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton

from replayssm.ops.triton_conv import conv_kernel

BLOCK = 512  # channels a program


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
    block: int = BLOCK,
) -> None:
    """Convolve one token a row: x, out [n, channels], weight [channels, 4], states [slots, 3, channels] in place.

    Channels are contiguous everywhere; rows and slots may have any stride. Rows of pad_slot_id or of a slot that there
    is not are padding: nothing of theirs is touched, outputs included.
    """
    _launch(x, weight, bias, states, slot_indices, None, None, out, None, 1, silu, pad_slot_id, block)


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
    block: int = BLOCK,
    cleared: torch.Tensor | None = None,
) -> None:
    """Convolve windows of tokens: x, out [num_tokens, channels], states [slots, at least max_window_len + 2, channels].

    query_start_loc [n + 1] int32 delimits the windows. A state holds the two inputs before a slot's last window, then
    the window; num_accepted_tokens [n] int32 says how many of the window count. Else as `conv_step`. cleared
    [num_tokens, ..], contiguous: becomes zero behind the last window.
    """
    windows = (query_start_loc, num_accepted_tokens)
    _launch(x, weight, bias, states, slot_indices, *windows, out, cleared, max_window_len, silu, pad_slot_id, block)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    slot_indices: torch.Tensor,
    starts: torch.Tensor | None,
    accepted: torch.Tensor | None,
    out: torch.Tensor,
    cleared: torch.Tensor | None,
    window: int,
    silu: bool,
    pad_slot_id: int,
    block: int,
) -> None:
    batch, channels = len(slot_indices), x.shape[1]
    if batch == 0:
        return
    pdl: dict[str, Any] = {"launch_pdl": True} if _has_pdl(x.device) else {}
    conv_kernel[(triton.cdiv(channels, block), batch)](
        *(x, weight, weight if bias is None else bias, states, slot_indices),
        *(slot_indices if t is None else t for t in (starts, accepted)),
        *(out, out if cleared is None else cleared, batch, len(x), states.shape[0], pad_slot_id, channels),
        *(1 if cleared is None else cleared[0].numel(), x.stride(0), *states.stride()[:2], out.stride(0)),
        WINDOW=window,
        RAGGED=starts is not None,
        BLOCK=block,
        HAS_BIAS=bias is not None,
        SILU=silu,
        CLEAR=cleared is not None,
        PDL=bool(pdl),
        num_warps=num_warps(block),
        **pdl,
    )


def num_warps(block: int) -> int:
    """Warps of a program of so many channels: a thread has four."""
    return max(1, block // 128)


def _has_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)
