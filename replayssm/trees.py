"""Draft trees as callers give them: parents of a window's tokens and accepted paths, checked and put on the device.

As in `replayssm.slots`, values on a GPU are not read back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from replayssm.checks import ReplayError, check_tensor, fail
from replayssm.cursors import Step
from replayssm.slots import integer_list, placed

Paths = torch.Tensor | Sequence[Sequence[int]]


def check_parents(
    parents: torch.Tensor | Sequence[int], window_lens: torch.Tensor, num_tokens: int, device: torch.device
) -> torch.Tensor:
    """int32 [num_tokens] on `device`: of every token an earlier one of its row's window, or -1."""
    if not isinstance(parents, torch.Tensor):
        parents = integer_list("parents", parents, torch.int32)
    check_tensor("parents", parents, (None if num_tokens < 0 else num_tokens,), (torch.int32,))
    if parents.device.type == "cpu" and device.type == "cpu" and not torch.compiler.is_compiling():
        values, token = parents.tolist(), 0
        for length in window_lens.tolist():
            for i in range(length):
                if not -1 <= values[token] < i:
                    raise fail(f"parents[{token}]", values[token], f"-1 to {i - 1} (token {i} of its window)")
                token += 1
    return placed("parents", parents, device)


def check_paths(paths: Paths, step: Step, device: torch.device) -> torch.Tensor:
    """int32 [batch, depth] on `device`: each row a path from the root, padded with -1."""
    if not isinstance(paths, torch.Tensor):
        paths = _padded(paths)
    check_tensor("accepted_paths", paths, (len(step.slot_indices), None), (torch.int32, torch.int64))
    if paths.shape[1] > step.max_window_len:
        raise fail("accepted_paths.shape", list(paths.shape), f"at most {step.max_window_len} tokens a row")
    if paths.device.type == "cpu" and device.type == "cpu" and not torch.compiler.is_compiling():
        _check_paths(paths.tolist(), step)
    return placed("accepted_paths", paths, device)


def _padded(paths: object) -> torch.Tensor:
    if not isinstance(paths, Sequence) or not all(isinstance(path, Sequence) for path in paths):
        raise fail("accepted_paths", paths, "a sequence of integers for every row")
    rows = [integer_list(f"accepted_paths[{row}]", path, torch.int32) for row, path in enumerate(paths)]
    return pad_sequence(rows, batch_first=True, padding_value=-1) if rows else torch.empty(0, 0, dtype=torch.int32)


def _check_paths(paths: list[list[int]], step: Step) -> None:
    first = 0
    parents = None if step.parents is None else step.parents.tolist()
    for row, (path, length) in enumerate(zip(paths, step.window_lens.tolist(), strict=True)):
        before = -1
        for depth, i in enumerate(path):
            if i == -1 and all(rest == -1 for rest in path[depth:]):
                break
            if not 0 <= i < length:
                raise fail(f"accepted_paths[{row}][{depth}]", i, f"0 to {length - 1}, or -1 after the path's end")
            parent = i - 1 if parents is None else parents[first + i]
            if parent != before:
                raise ReplayError(
                    f"accepted_paths[{row}][{depth}] is {i}, whose parent is {parent}; allowed: a child of {before}"
                )
            before = i
        first += length
