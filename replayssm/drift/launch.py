"""Scans on a GPU: one launch for a piece of the text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from replayssm.checks import fail
from replayssm.drift.variants import Variant
from replayssm.drift.windows import LayerInputs, make_windows

if TYPE_CHECKING:
    from replayssm.drift.scan import Checkpoint


def launch_scan(variant: Variant, inputs: LayerInputs, checkpoint: Checkpoint) -> torch.Tensor:
    """Outputs [T, H, V] of T tokens, T divisible by the variant's buffer_len; `checkpoint` is updated in place.

    K must be a power of two, and with stochastic rounding V too.
    """
    import triton

    from replayssm.drift.triton_scan import scan_kernel

    (tokens, heads, V), K, state = inputs.v.shape, inputs.k.shape[2], checkpoint.state
    rows, is_stochastic = triton.next_power_of_2(V), variant.option == "stochastic"
    if K & (K - 1) or state.dtype != torch.float32 or (is_stochastic and rows != V):
        raise fail("state", (tuple(state.shape), state.dtype), "fp32, K (and V for stochastic rounding) powers of two")
    native = state.device.type == "cuda" and torch.cuda.get_device_capability(state.device) >= (8, 9)
    windows = make_windows(inputs, 1)
    given = (windows.values, windows.reads, windows.queries, windows.attention, windows.keep, windows.outgoing)
    out = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
    scan_kernel[(heads,)](
        *(None if t is None else t.contiguous() for t in given),
        state,
        out,
        checkpoint.seeds,
        checkpoint.flushes,
        tokens,
        heads,
        variant.buffer_len,
        V,
        K,
        rows,
        windows.keep.shape[-1] > 1,
        windows.reads is not None,
        variant.read,
        variant.checkpoint,
        is_stochastic,
        native,
        num_warps=16 if V * K >= 8192 else 4,
    )
    checkpoint.flushes.add_(tokens // variant.buffer_len)
    return out
