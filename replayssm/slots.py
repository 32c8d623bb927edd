"""Slot lists, window lengths and accepted counts as callers give them: checked and put on the device.

What is given as Python numbers or CPU tensors is checked. What already lies on a GPU is not read back, since that
would synchronise: kernels treat slots outside the cache as padding, and `commit` holds counts to the window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replayssm.checks import ReplayError, check_int, check_tensor, fail
from replayssm.cursors import Step

Slots = torch.Tensor | Sequence[int] | int


def slot_tensor(
    name: str,
    slots: Slots,
    num_slots: int,
    device: torch.device,
    *,
    padding: int | None = None,
    forbidden: int | None = None,
    repeats: bool = False,
) -> torch.Tensor:
    """int32 [n] on `device`: slots of the cache or `padding`, not `forbidden`, distinct unless `repeats`."""
    if isinstance(slots, torch.Tensor):
        if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64):
            raise fail(name, f"{slots.dtype} {list(slots.shape)}", "a 1-D int32 or int64 tensor")
    else:
        slots = integer_list(name, [slots] if isinstance(slots, int) else slots)
    if slots.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_slots(name, slots.tolist(), num_slots, padding, forbidden, repeats)
    return placed(name, slots, device)


def placed(name: str, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """The tensor, contiguous, on `device`, where it has to be unless it is on the CPU."""
    if tensor.device not in (device, torch.device("cpu")):
        raise fail(f"{name}.device", str(tensor.device), " or ".join(dict.fromkeys(("cpu", str(device)))))
    return tensor.to(device=device, dtype=dtype).contiguous()


def integers(name: str, values: object, count: int) -> torch.Tensor:
    """`count` integers, given as such or as a tensor, where they are."""
    if not isinstance(values, torch.Tensor):
        values = integer_list(name, values)
    check_tensor(name, values, (count,), (torch.int32, torch.int64))
    return values


def integer_list(name: str, values: object, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A sequence of Python's integers as a CPU tensor."""
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if isinstance(values, Sequence) and not isinstance(values, str):
        if all(type(v) is int and low <= v <= high for v in values):
            return torch.tensor(list(values), dtype=dtype)
    raise fail(name, values, f"integers: a sequence of Python's, of {torch.iinfo(dtype).bits} bits, or a tensor")


def _check_slots(
    name: str, slots: list[int], num_slots: int, padding: int | None, forbidden: int | None, repeats: bool
) -> None:
    seen: set[int] = set()
    for i, slot in enumerate(slots):
        if slot == padding:
            continue
        if not 0 <= slot < num_slots:
            also = "" if padding is None else f", or {padding} for padding"
            raise fail(f"{name}[{i}]", slot, f"0 to {num_slots - 1}{also}")
        if slot == forbidden:
            raise fail(f"{name}[{i}]", slot, "slots other than pad_slot_id")
        if slot in seen and not repeats:
            raise ReplayError(f"{name}[{i}] is {slot}, which is there before; allowed: every slot once")
        seen.add(slot)


def check_windows(
    batch: int,
    window_lens: int | Sequence[int],
    query_start_loc: torch.Tensor | None,
    max_window_len: int | None,
    longest: int,
    device: torch.device,
) -> tuple[torch.Tensor | None, int, int]:
    """(query_start_loc [batch + 1] int32 or None, max_window_len, num_tokens) of a step; -1 tokens: not known here."""
    if query_start_loc is not None:
        if not (isinstance(window_lens, int) and window_lens == 1):
            raise fail("window_lens", window_lens, "nothing beside query_start_loc")
        check_tensor("query_start_loc", query_start_loc, (batch + 1,), (torch.int32,), device)
        most = check_int("max_window_len", max_window_len, 1, longest)
        if device.type == "cpu" and not torch.compiler.is_compiling():
            lens = query_start_loc.diff().tolist()
            if int(query_start_loc[0]) != 0 or any(not 0 <= n <= most for n in lens):
                raise fail("query_start_loc", query_start_loc.tolist(), f"from 0, in steps of 0 to {most}")
            return query_start_loc, most, sum(lens)
        return query_start_loc, most, -1
    if max_window_len is not None:
        raise fail("max_window_len", max_window_len, "None without query_start_loc")
    if isinstance(window_lens, int):
        most = check_int("window_lens", window_lens, 1, longest)
        if most == 1:
            return None, 1, batch
        starts = torch.arange(0, batch * most + 1, most, dtype=torch.int32, device=device)
        return starts, most, batch * most
    if not isinstance(window_lens, Sequence) or isinstance(window_lens, str):
        raise fail("window_lens", window_lens, "an integer, or one a row")
    if len(window_lens) != batch:
        raise fail("window_lens", f"{len(window_lens)} numbers", f"one a row ({batch})")
    lens = [check_int(f"window_lens[{i}]", n, 0, longest) for i, n in enumerate(window_lens)]
    starts = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0).to(device=device, dtype=torch.int32)
    return starts, max([1, *lens]), sum(lens)


def check_accepted(accepted: torch.Tensor | Sequence[int], step: Step, device: torch.device) -> torch.Tensor:
    """int32 [batch] on `device`: 0 to window_len tokens of every row."""
    accepted = integers("num_accepted_tokens", accepted, len(step.slot_indices))
    if accepted.device.type == "cpu" and device.type == "cpu" and not torch.compiler.is_compiling():
        lens = step.window_lens.tolist()
        if any(not 0 <= a <= n for a, n in zip(accepted.tolist(), lens, strict=True)):
            raise fail("num_accepted_tokens", accepted.tolist(), f"0 to the tokens of each row: {lens}")
    return placed("num_accepted_tokens", accepted, device)
