"""Mamba-2 layers with a read copy or an fp8 checkpoint, and what a step on one must do, bit by bit."""

from __future__ import annotations

from typing import Any

import torch
from mamba2_case import (
    INPUTS,
    NAN,
    PAD,
    RINGS,
    Dims,
    Tensors,
    commit_one,
    copy_of,
    error,
    in_float64,
    new_tokens,
    run_step,
)

from replayssm.cursors import NUM_COMMITTED, flush_mask
from replayssm.ops.mamba2 import reference
from replayssm.quant import QuantizedState, dequantize, layout, quantize

POISON = 0x7F  # NaN as e4m3 and as a half of any scale


def poisoned(format: str, shape: tuple[int, ...], page: int, device: torch.device | str) -> QuantizedState:
    """A copy of nothing: every byte poison, slots `page` bytes further apart than they need be."""
    tensors = {}
    for name, (size, dtype) in layout(format, shape).items():
        inner = torch.Size(size[1:]).numel()
        gap = page // dtype.itemsize
        whole = torch.full((size[0] * (inner + gap) * dtype.itemsize,), POISON, dtype=torch.uint8, device=device)
        strides = torch.empty(size[1:], device="meta").stride()
        tensors[name] = whole.view(dtype).as_strided(size, (inner + gap, *strides))
    return QuantizedState(format, **tensors)


def write(q: QuantizedState, slot: int, state: torch.Tensor) -> None:
    for name, tensor in quantize(state[None], q.format).tensors().items():
        getattr(q, name)[slot].view(torch.uint8).copy_(tensor[0].contiguous().view(torch.uint8))


def with_copy(layer: Tensors, dims: Dims, read: str, owned: list[int], fp8_checkpoint: bool) -> Tensors:
    """The layer with a read copy of its owned slots; its checkpoint in fp8 if so asked."""
    layer, shape, device = dict(layer), tuple(layer["state"].shape), layer["state"].device
    if fp8_checkpoint:
        stored = poisoned("fp8", shape, dims.page, device)
        for slot in owned:
            write(stored, slot, layer["state"][slot])
            layer["state"][slot] = dequantize(stored.gather(torch.tensor([slot], device=device)))[0]
        layer |= {"state": stored.codes, "state_scales": stored.scales}
    if read != "none":
        copy = poisoned(read, shape, dims.page, device)
        for slot in owned:
            write(copy, slot, checkpoint(layer)[slot])
        layer |= {f"read_{name}": tensor for name, tensor in copy.tensors().items()}
    return layer


def checkpoint(layer: Tensors) -> torch.Tensor:
    """The checkpoint's values in its own dtype, those of fp8 in fp32."""
    if "state_scales" in layer:
        return dequantize(QuantizedState("fp8", layer["state"], layer["state_scales"]))
    return layer["state"]


def read_copy(layer: Tensors, read: str) -> QuantizedState:
    if read == "none":
        return QuantizedState("fp8", layer["state"], layer["state_scales"])
    return QuantizedState(read, layer["read_codes"], layer.get("read_scales"), layer.get("read_global_scale"))


def copied(layer: Tensors) -> Tensors:
    """The same layer in other memory, strides and bytes kept."""
    copies: Tensors = {}
    for name, tensor in layer.items():
        copies[name] = tensor
        if tensor is not None:
            copies[name] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            copies[name].copy_(tensor)
    return copies


def same_bytes(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def run_read_step(
    step: Any, dims: Dims, layer: Tensors, tokens: Tensors, slots: torch.Tensor, **more: Any
) -> torch.Tensor:
    names = ("read_codes", "read_scales", "read_global")
    extra = {name: layer.get("read_global_scale" if name == "read_global" else name) for name in names}
    return run_step(step, dims, layer, tokens, slots, **extra, state_scales=layer.get("state_scales"), **more)


def expected_outputs(
    dims: Dims, before: Tensors, after: Tensors, read: str, tokens: Tensors, slots: torch.Tensor
) -> torch.Tensor:
    """float64 outputs from the dequantised bytes: of the old copy, or after a flush of the new one, its ring empty."""
    plain = {n: t for n, t in before.items() if not n.startswith("read_") and n != "state_scales"}
    values = dequantize(read_copy(before, read))
    flushes = flush_mask(before["cursors"], torch.ones_like(before["cursors"][:, 0]), dims.buffer_len)
    values[flushes] = dequantize(read_copy(after, read))[flushes]
    plain["state"] = values
    exact = copy_of(plain, torch.float64)
    exact["cursors"] = torch.where(
        flushes[:, None] & (torch.arange(4, device=flushes.device) == NUM_COMMITTED), 0, exact["cursors"]
    )
    return run_step(reference.mamba2_step, dims, exact, in_float64(tokens), slots)


def check_read_step(
    dims: Dims,
    layer: Tensors,
    read: str,
    tokens: Tensors,
    slots: torch.Tensor,
    step: Any,
    plain_step: Any,
    tolerance: float,
    **more: Any,
) -> torch.Tensor:
    """One step of `layer`, in place; raises unless states, copies and rings are right to the bit and outputs close.

    With `replay="chunk"` in `more` new states may err as much as rounding the serial ones would, a thousandth more, and
    two roundings of fp32 a token.
    """
    before, chunk = copied(layer), more.get("replay") == "chunk"
    plain = {n: t for n, t in copied(layer).items() if not n.startswith("read_") and n != "state_scales"}
    plain["state"] = checkpoint(before).float() if chunk else checkpoint(before).clone()
    run_step(plain_step, dims, plain, tokens, slots)
    got = run_read_step(step, dims, layer, tokens, slots, **more)

    real = slots[(slots >= 0) & (slots < len(layer["state"]))].long()
    flushes = flush_mask(before["cursors"], torch.ones_like(before["cursors"][:, 0]), dims.buffer_len)
    flushed = [slot for slot in real.tolist() if flushes[slot]]
    want = copied(before)
    for slot in flushed:
        if "state_scales" in layer:
            write(QuantizedState("fp8", want["state"], want["state_scales"]), slot, plain["state"][slot])
        else:
            want["state"][slot] = plain["state"][slot]
        if chunk:
            rounding = error(checkpoint(want)[slot], plain["state"][slot])
            assert error(checkpoint(layer)[slot], plain["state"][slot]) <= 1.001 * rounding + dims.buffer_len * 2**-23
            for name in [n for n in layer if n.startswith("state")]:
                want[name][slot] = layer[name][slot]
        if read != "none":
            write(read_copy(want, read), slot, checkpoint(want)[slot])
    for name in [n for n in layer if n.startswith(("read_", "state"))]:
        assert same_bytes(layer[name], want[name]), name
    for name in ("ring_x", "ring_B", "ring_dt"):
        assert same_bytes(layer[name], plain[name]), name
    exact = expected_outputs(dims, before, layer, read, tokens, slots)
    assert (got[(slots < 0) | (slots >= len(layer["state"]))] == 0).all()
    assert error(got, exact) < tolerance
    return got


def check_steps(
    dims: Dims,
    layer: Tensors,
    read: str,
    slots: torch.Tensor,
    generator: torch.Generator,
    count: int,
    step: Any,
    plain_step: Any,
    tolerance: float,
    **more: Any,
) -> None:
    for _ in range(count):
        tokens = new_tokens(dims, len(slots), generator, slots.device)
        check_read_step(dims, layer, read, tokens, slots, step, plain_step, tolerance, **more)
        commit_one(dims, layer, slots)


def run_window(
    step: Any, dims: Dims, layer: Tensors, tokens: Tensors, slots: torch.Tensor, **more: Any
) -> torch.Tensor:
    """A step with any `query_start_loc`, formats and parents; the output starts as NaN."""
    inputs = {name: tokens[name] if name in tokens else layer[name] for name in INPUTS}
    rest = {name: layer[name] for name in ("state", *RINGS, "cursors")}
    out = torch.full_like(tokens["x"], NAN, memory_format=torch.contiguous_format)
    step(
        **inputs,
        **rest,
        slot_indices=slots,
        out=out,
        buffer_len=dims.buffer_len,
        pad_slot_id=PAD,
        dt_softplus=True,
        **more,
    )
    return out


def check_window(
    dims: Dims, layer: Tensors, read: str, lens: list[int], slots: torch.Tensor, generator: torch.Generator, step: Any,
    tree: bool, tolerance: float,
) -> None:  # fmt: skip
    """Windows of `lens` tokens: outputs from the dequantised bytes; what flushes, and only that, is rewritten."""
    tokens = new_tokens(dims, sum(lens), generator, slots.device)
    bounds = torch.tensor([0, *lens], device=slots.device).cumsum(0).int()
    parents = None
    if tree:
        parents = torch.cat([torch.arange(n) // 2 - (torch.arange(n) < 2).int() for n in lens]).int().to(slots.device)
    rows = {"query_start_loc": bounds, "max_window_len": max(lens), "parents": parents}
    before, names = copied(layer), ("read_codes", "read_scales", "read_global")
    formats = {name: layer.get("read_global_scale" if name == "read_global" else name) for name in names}
    got = run_window(step, dims, layer, tokens, slots, **rows, **formats, state_scales=layer.get("state_scales"))
    window = torch.ones_like(before["cursors"][:, 0])
    for slot, length in zip(slots.tolist(), lens, strict=True):
        if 0 <= slot < len(window):
            window[slot] = length
    flushes = flush_mask(before["cursors"], window, dims.buffer_len)
    values = dequantize(read_copy(before, read))
    values[flushes] = dequantize(read_copy(layer, read))[flushes]
    plain = {n: t for n, t in before.items() if not n.startswith("read_") and n != "state_scales"}
    exact = copy_of(plain | {"state": values}, torch.float64)
    exact["cursors"][flushes, NUM_COMMITTED] = 0
    want = run_window(reference.mamba2_step, dims, exact, in_float64(tokens), slots, **rows)
    assert error(got, want) < tolerance
    for slot in range(len(window)):
        mine, stored = (
            read_copy(layer, read),
            quantize(checkpoint(layer)[slot][None], read if read != "none" else "fp8"),
        )
        same = before if not flushes[slot] else None
        for name, tensor in mine.tensors().items():
            expected = stored.tensors()[name][0] if same is None else read_copy(same, read).tensors()[name][slot]
            assert read == "none" or same_bytes(tensor[slot], expected), name
        assert same is None or same_bytes(layer["state"][slot], same["state"][slot])
