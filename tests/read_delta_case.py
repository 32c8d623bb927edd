"""GDN and KDA layers with a read copy or an fp8 checkpoint, and what a step on one must do, bit by bit."""

from __future__ import annotations

from typing import Any

import torch
from delta_case import (
    RINGS,
    Dims,
    Tensors,
    commit_one,
    copy_of,
    empty_out,
    error,
    new_layer,
    new_tokens,
    options,
    own,
    run_step,
)
from read_case import checkpoint, copied, read_copy, same_bytes, with_copy, write

from replayssm.cursors import NUM_COMMITTED, flush_mask
from replayssm.ops.delta import torch_ops
from replayssm.quant import QuantizedState, dequantize

# What another order of summation changes in an fp32 state: two kernels, a window of 16 tokens, five roundings each.
SHIFT = 2 * 16 * 5 * 2.0**-24


def check_other_order(layer: Tensors, want: Tensors, exact: torch.Tensor, slot: int) -> None:
    """Raises unless a slot's checkpoint is as near to `exact` as `want`'s, but for the order of sums.

    exact: the fp32 state that `want`'s checkpoint is the rounding of. A shift of a state may round any element to its
    other neighbour, and a row of e4m3 by its other scale, but only where both serve alike: the distance from the state
    to its rounding changes by no more than the state does. e4m3 adds two things. A row's scale has 16 significant bits:
    it may come out a step apart, at most 2^-15 of itself, as may all values. And a row takes the scale with the smaller
    sum of squares, each rounded to 2^-12 of the first scale's: the sums of both may be off by K 2^-13 of that, and the
    scale is 1 / 448 of the row's maximum, which its norm is no less than.
    """
    rounding = error(checkpoint(want)[slot], exact)
    shift, limit = error(checkpoint(layer)[slot], exact), rounding + (2 if rounding else 1) * SHIFT
    if "state_scales" in layer:
        k_dim = exact.shape[-1]
        limit = (rounding**2 + k_dim * 2.0**-12 / 448**2) ** 0.5 + 2 * SHIFT + 2.0**-15
    assert shift <= limit


def new_read_layer(
    dims: Dims, read: str, num_slots: int, owned: list[int], generator: torch.Generator, device: str, fp8: bool = False
) -> Tensors:
    """A pool whose owned slots hold random states and copies, windows of different lengths; the rest is poison."""
    layer = new_layer(dims, num_slots, generator, device)
    own(layer, dims, owned, generator, [dims.buffer_len, 3, dims.buffer_len - 1, 1])
    return with_copy(layer, dims, read, owned, fp8)


def run_read_step(
    step: Any, dims: Dims, layer: Tensors, tokens: Tensors, slots: torch.Tensor, **more: Any
) -> torch.Tensor:
    """Outputs of a backend's `delta_read_step`."""
    stored = {"read_codes": "read_codes", "read_scales": "read_scales", "read_global": "read_global_scale"}
    extra = {name: layer.get(key) for name, key in stored.items()}
    return run_step(step, dims, layer, tokens, slots, **extra, state_scales=layer.get("state_scales"), **more)


def _plain(layer: Tensors) -> Tensors:
    return {n: t for n, t in layer.items() if not n.startswith("read_") and n != "state_scales"}


def _expected_outputs(
    dims: Dims, before: Tensors, after: Tensors, read: str, tokens: Tensors, slots: torch.Tensor, flushes: torch.Tensor
) -> torch.Tensor:
    """float64 outputs from dequantised bytes: of the old copy, or of the new one (with an empty ring) after a flush."""
    values = dequantize(read_copy(before, read))
    values[flushes] = dequantize(read_copy(after, read))[flushes]
    exact = copy_of(_plain(before) | {"state": values}, torch.float64)
    committed = torch.arange(4, device=flushes.device) == NUM_COMMITTED
    exact["cursors"] = torch.where(flushes[:, None] & committed, 0, exact["cursors"])
    out = empty_out(dims, tokens, torch.float64)
    inputs = (tokens[name] for name in ("q", "k", "v", "g", "beta"))
    rest = (exact[name] for name in ("A_log", "dt_bias", "state", *RINGS, "cursors"))
    torch_ops.delta_step(*inputs, *rest, slots, None, out, buffer_len=dims.buffer_len, **options(dims))
    return out


def check_read_step(
    dims: Dims, layer: Tensors, read: str, tokens: Tensors, slots: torch.Tensor, step: Any, plain_step: Any,
    tolerance: float, same_kernel: bool = True, **more: Any,
) -> torch.Tensor:  # fmt: skip
    """One step of `layer`, in place; raises unless copies are right to the bit, rings too, and outputs close.

    same_kernel: checkpoints are `plain_step`'s to the bit; otherwise another order of summation is allowed for.
    """
    before = copied(layer)
    plain = _plain(copied(layer)) | {"state": checkpoint(before).clone()}
    if not same_kernel:
        plain["state"] = plain["state"].float()
    run_step(plain_step, dims, plain, tokens, slots)
    got = run_read_step(step, dims, layer, tokens, slots, **more)

    real = (slots >= 0) & (slots < len(layer["state"]))
    flushes = flush_mask(before["cursors"], torch.ones_like(before["cursors"][:, 0]), dims.buffer_len)
    want = copied(before)
    for slot in [slot for slot in slots[real].tolist() if flushes[slot]]:
        if "state_scales" in layer:
            write(QuantizedState("fp8", want["state"], want["state_scales"]), slot, plain["state"][slot])
        else:
            want["state"][slot] = plain["state"][slot]
        if not same_kernel:
            check_other_order(layer, want, plain["state"][slot], slot)
            for name in [n for n in ("state", "state_scales") if n in layer]:
                want[name][slot] = layer[name][slot]
        if read != "none":
            write(read_copy(want, read), slot, checkpoint(want)[slot])
    for name in [n for n in layer if n.startswith(("read_", "state"))]:
        assert same_bytes(layer[name], want[name]), name
    for name in RINGS:
        if name != "ring_u":
            # Gates go through exp and log: kernels of different layouts may round them differently.
            torch.testing.assert_close(layer[name], plain[name], rtol=2e-6, atol=1e-30, equal_nan=True)
    exact = _expected_outputs(dims, before, layer, read, tokens, slots, flushes)
    assert (got[~real] == 0).all()
    assert error(got[real], exact[real]) < tolerance
    return got


def check_read_steps(
    dims: Dims, layer: Tensors, read: str, slots: torch.Tensor, generator: torch.Generator, count: int, step: Any,
    plain_step: Any, tolerance: float, **more: Any,
) -> None:  # fmt: skip
    """`check_read_step` for `count` steps."""
    for _ in range(count):
        tokens = new_tokens(dims, len(slots), generator, slots.device)
        check_read_step(dims, layer, read, tokens, slots, step, plain_step, tolerance, **more)
        commit_one(dims, layer, slots)
