"""Argument checks: one clear error that names the argument, its value and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class ReplayError(ValueError):
    """A wrong argument or configuration; nothing has been changed when it is raised."""


def fail(name: str, value: object, allowed: str) -> ReplayError:
    """Build the error for argument `name`; the caller raises it."""
    return ReplayError(f"{name} is {value!r}; allowed: {allowed}")


def check_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return `value` if it is an integer in [low, high], else raise."""
    allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise fail(name, value, allowed)
    if value < low or (high is not None and value > high):
        raise fail(name, value, allowed)
    return value


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise unless `value` is one of `choices`; 1 is not True."""
    choices = list(choices)
    if not any(isinstance(value, type(choice)) and value == choice for choice in choices):
        raise fail(name, value, ", ".join(map(str, choices)))


def check_tensor(
    name: str,
    tensor: object,
    shape: tuple[int | None, ...],
    dtypes: Iterable[torch.dtype],
    device: torch.device | None = None,
    *,
    inner_contiguous: int = 1,
) -> None:
    """Check shape (None: any size), dtype, device, and that the last `inner_contiguous` dims are contiguous."""
    if not isinstance(tensor, torch.Tensor):
        raise fail(name, type(tensor).__name__, "a torch.Tensor")
    if tensor.layout != torch.strided:
        raise fail(f"{name}.layout", tensor.layout, "torch.strided")
    if tensor.dim() != len(shape) or any(w is not None and w != s for s, w in zip(tensor.shape, shape, strict=True)):
        want = "[" + ", ".join("any" if s is None else str(s) for s in shape) + "]"
        raise fail(f"{name}.shape", list(tensor.shape), want)
    dtypes = tuple(dtypes)
    if tensor.dtype not in dtypes:
        raise fail(f"{name}.dtype", tensor.dtype, ", ".join(map(str, dtypes)))
    if device is not None and tensor.device != device:
        raise fail(f"{name}.device", str(tensor.device), str(device))
    expected = 1
    for dim in range(tensor.dim() - 1, tensor.dim() - 1 - inner_contiguous, -1):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != expected:
            raise fail(f"{name}.stride()", tensor.stride(), f"the last {inner_contiguous} dimensions contiguous")
        expected *= tensor.shape[dim]


def check_written(name: str, tensor: torch.Tensor) -> None:
    """Raise if elements of a tensor that is to be written share memory, as after `expand`."""
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise fail(f"{name}.stride()", tensor.stride(), "memory of its own for every element")
