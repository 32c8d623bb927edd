"""The convolution before the recurrence: by our kernels where they fit, by vLLM's elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

from replayssm.integrations.vllm.group import NULL_BLOCK, Rows

WIDTH = 4


def convolve(
    x: torch.Tensor,
    pages: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Any,
    rows: Rows,
    cleared: torch.Tensor | None = None,
) -> torch.Tensor:
    """The convolved tokens of decode rows, and their blocks' convolution states moved on.

    x [tokens, channels], which may be overwritten; pages: vLLM's convolution states [blocks, taps - 1, channels] (or
    transposed, as vLLM is configured); weight [channels, taps], bias [channels]. cleared [tokens, ..]: what the
    recurrence will write; of the padding behind windows, which it does not see, this makes zeros.
    """
    step = rows.decodes
    assert step is not None
    if x.is_cuda and _fits(x, pages, weight, step.max_window_len):
        return _convolve(x, pages, weight, bias, activation in ("silu", "swish", True), rows, cleared)
    if cleared is not None and step.query_start_loc is not None:
        cleared.zero_()
    states = pages if is_conv_state_dim_first() else pages.transpose(-1, -2)
    return causal_conv1d_update(
        x,
        states,
        weight,
        bias,
        activation,
        conv_state_indices=step.slot_indices,
        num_accepted_tokens=rows.accepted,
        query_start_loc=step.query_start_loc,
        max_query_len=step.max_window_len,
        null_block_id=NULL_BLOCK,
    )


def _convolve(
    x: torch.Tensor,
    pages: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    rows: Rows,
    cleared: torch.Tensor | None,
) -> torch.Tensor:
    from replayssm.ops.conv_launch import conv_step, conv_window

    step, out = rows.decodes, torch.empty_like(x, memory_format=torch.contiguous_format)
    assert step is not None
    if step.query_start_loc is None:
        conv_step(x, weight, bias, pages, step.slot_indices, out, silu=silu, pad_slot_id=NULL_BLOCK)
        return out
    assert rows.accepted is not None
    conv_window(
        *(x, weight, bias, pages, step.slot_indices, step.query_start_loc, rows.accepted, out),
        max_window_len=step.max_window_len,
        silu=silu,
        pad_slot_id=NULL_BLOCK,
        cleared=cleared,
    )
    return out


def _fits(x: torch.Tensor, pages: torch.Tensor, weight: torch.Tensor, window_len: int) -> bool:
    """Whether the kernels serve these layouts: four taps, channels last, states as long as a window needs."""
    plain = not is_conv_state_dim_first() and pages.shape[1] >= WIDTH - 2 + window_len and pages.stride(2) == 1
    return plain and weight.shape[1] == WIDTH and weight.is_contiguous() and x.stride(1) == 1
