"""Random Mamba-2 batches as engines pass them: packed inputs, padded pages, shuffled slots, NaN in unowned memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from replayssm.cursors import NO_LIMIT, NUM_COMMITTED, RING_START, WINDOW_LIMIT, flush_mask
from replayssm.ops.mamba2 import reference

NAN = float("nan")
INPUTS = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")
RINGS = ("ring_x", "ring_B", "ring_dt")
PAD = -1
Tensors = dict[str, Any]


@dataclass(frozen=True)
class Dims:
    """A layer, its ring and dtypes."""

    num_heads: int = 4
    head_dim: int = 16
    d_state: int = 16
    n_groups: int = 2
    buffer_len: int = 4
    ring_len: int = 5
    act: torch.dtype = torch.float32
    checkpoint: torch.dtype = torch.float32
    extras: bool = True  # D, z and dt_bias are there
    page: int = 0  # bytes between slots (and heads) that belong to others, a multiple of 16


def paged(shape: tuple[int, ...], dtype: torch.dtype, page: int, device: torch.device | str) -> torch.Tensor:
    """A NaN tensor whose slots and heads lie `page` bytes apart from each other."""
    gap, inner = page // dtype.itemsize, math.prod(shape[2:])
    head, slot = inner + gap, shape[1] * (inner + gap) + 3 * gap
    whole = torch.full((shape[0] * slot,), NAN, dtype=dtype, device=device)
    strides = torch.empty(shape[2:], device="meta").stride()
    return whole.as_strided(shape, (slot, head, *strides))


def new_tokens(dims: Dims, batch: int, generator: torch.Generator, device: torch.device | str) -> Tensors:
    """One token a row: x, B, C are views of one packed tensor."""
    heads, P, N, G = dims.num_heads, dims.head_dim, dims.d_state, dims.n_groups
    widths = (heads * P, G * N, G * N, 8)
    packed = torch.randn(batch, sum(widths), generator=generator).to(device, dims.act)
    x, B, C, _ = packed.split(widths, 1)
    z = torch.randn(batch, heads, P, generator=generator).to(device, dims.act) if dims.extras else None
    dt = (torch.randn(batch, heads, generator=generator) / 2 - (0 if dims.extras else 3)).to(device, dims.act)
    return {"x": x.view(batch, heads, P), "dt": dt, "B": B.view(batch, G, N), "C": C.view(batch, G, N), "z": z}


def new_layer(dims: Dims, num_slots: int, generator: torch.Generator, device: torch.device | str) -> Tensors:
    """Parameters, and a pool in which nothing is owned yet."""
    heads, P, N, R = dims.num_heads, dims.head_dim, dims.d_state, dims.ring_len
    steps = torch.empty(heads).uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp()
    bias = steps + torch.log(-torch.expm1(-steps))
    return {
        "A": -torch.empty(heads).uniform_(1, 16, generator=generator).to(device),
        "D": torch.randn(heads, generator=generator).to(device) if dims.extras else None,
        "dt_bias": bias.to(device) if dims.extras else None,
        "state": paged((num_slots, heads, P, N), dims.checkpoint, dims.page, device),
        "ring_x": paged((num_slots, heads, R, P), dims.act, dims.page, device),
        "ring_B": paged((num_slots, dims.n_groups, R, N), dims.act, dims.page, device),
        "ring_dt": paged((num_slots, heads, R), torch.float32, dims.page, device),
        "cursors": torch.zeros(num_slots, 4, dtype=torch.int32, device=device),
    }


def own(dims: Dims, layer: Tensors, slots: list[int], committed: list[int], generator: torch.Generator) -> None:
    """Give slots a random state, a random ring start and `committed` live rows."""
    for slot, count in zip(slots, committed, strict=True):
        start = int(torch.randint(dims.ring_len, (1,), generator=generator))
        layer["state"][slot] = torch.randn(layer["state"].shape[1:], generator=generator).to(layer["state"])
        for row in range(count):
            at = (start + row) % dims.ring_len
            for name in ("ring_x", "ring_B"):
                ring = layer[name]
                ring[slot, :, at] = torch.randn(ring[slot, :, at].shape, generator=generator).to(ring)
            layer["ring_dt"][slot, :, at] = torch.rand(dims.num_heads, generator=generator).to(layer["A"]) / 10
        layer["cursors"][slot] = torch.tensor([start, count, NO_LIMIT, 0], dtype=torch.int32)


def copy_of(layer: Tensors, dtype: torch.dtype | None = None) -> Tensors:
    """The same layer in other memory; floating tensors become `dtype` if one is given."""
    copies = {}
    for name, tensor in layer.items():
        if tensor is None or not tensor.is_floating_point():
            copies[name] = None if tensor is None else tensor.clone()
        else:
            copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=tensor.device)
            copies[name] = copy.copy_(tensor)
    return copies


def run_step(step: Any, dims: Dims, layer: Tensors, tokens: Tensors, slots: torch.Tensor, **more: Any) -> torch.Tensor:
    """One step; the output starts as NaN."""
    inputs = {name: tokens[name] if name in tokens else layer[name] for name in INPUTS}
    rest = {name: layer[name] for name in ("state", *RINGS, "cursors")}
    out = torch.full_like(tokens["x"], NAN, memory_format=torch.contiguous_format)
    options = {"buffer_len": dims.buffer_len, "pad_slot_id": PAD, "dt_softplus": True, "max_window_len": 1, **more}
    step(**inputs, **rest, slot_indices=slots, query_start_loc=None, out=out, **options)
    return out


def run_stepwise(stepwise: Any, layer: Tensors, tokens: Tensors, slots: torch.Tensor, **more: Any) -> torch.Tensor:
    """Ordinary decoding of the same tokens."""
    inputs = {name: tokens[name] if name in tokens else layer[name] for name in INPUTS}
    out = torch.full_like(tokens["x"], NAN, memory_format=torch.contiguous_format)
    options = {"pad_slot_id": PAD, "dt_softplus": True, "max_window_len": 1, **more}
    stepwise(**inputs, state=layer["state"], slot_indices=slots, query_start_loc=None, out=out, **options)
    return out


def in_float64(tokens: Tensors) -> Tensors:
    return {name: None if tensor is None else tensor.double() for name, tensor in tokens.items()}


def reference_step(
    dims: Dims, layer: Tensors, tokens: Tensors, slots: torch.Tensor, **more: Any
) -> tuple[torch.Tensor, Tensors]:
    """Outputs and layer after a step of the float64 reference, from the values that the layer holds."""
    exact = copy_of(layer, torch.float64)
    return run_step(reference.mamba2_step, dims, exact, in_float64(tokens), slots, **more), exact


def commit_one(dims: Dims, layer: Tensors, slots: torch.Tensor) -> None:
    """Accept the token of every row that is no pad."""
    rows = slots[(slots >= 0) & (slots < len(layer["state"]))].long()
    now = layer["cursors"][rows]
    flushed = flush_mask(now, torch.ones_like(now[:, 0]), dims.buffer_len)
    start = torch.where(flushed, (now[:, RING_START] + now[:, NUM_COMMITTED]) % dims.ring_len, now[:, RING_START])
    now[:, RING_START] = start
    now[:, NUM_COMMITTED] = torch.where(flushed, 0, now[:, NUM_COMMITTED]) + 1
    now[:, WINDOW_LIMIT] = torch.where(flushed, NO_LIMIT, now[:, WINDOW_LIMIT])
    layer["cursors"][rows] = now


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||; NaN (unwritten, poisoned) never passes a comparison."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def same_nans(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether the same elements are NaN: nothing that nobody owns was written."""
    return bool((got.isnan() == want.isnan()).all())
