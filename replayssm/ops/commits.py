"""The ops that end a step, as `torch.library` custom ops, and which backend runs them: cursors move, rows move."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from replayssm import cursors as torch_cursors
from replayssm.cursors import Step
from replayssm.ops import moves
from replayssm.ops.library import register

_ROWS = "Tensor slot_indices, Tensor? query_start_loc, Tensor? num_accepted_tokens, Tensor? accepted_paths=None"
_TABLE = "Tensor? table=None, int word_bytes=0"
SCHEMAS = {
    "commit": f"Tensor(a!) cursors, {_ROWS}, *, int buffer_len, int ring_len, int pad_slot_id",
    "take_back": "Tensor(a!) cursors, Tensor slots, Tensor num_tokens",
    "move_rows": "Tensor(a!)[] rings, Tensor cursors, Tensor slot_indices, Tensor accepted_paths, "
    f"{_TABLE}, *, int pad_slot_id",
}
_TORCH: dict[str, Callable[..., Any]] = {
    "commit": torch_cursors.commit_rows,
    "follow_windows": torch_cursors.follow_windows,
    "take_back": torch_cursors.take_back,
    "move_rows": moves.move_rows,
}


class CommitOps:
    """What ends a step of one cache: the functions of its backend, and the table of its rings where kernels need it."""

    def __init__(self, backend: str, cursors: torch.Tensor, rings: Sequence[torch.Tensor]) -> None:
        """rings: every ring [num_slots, heads, ring_len(, dim)] of every layer."""
        self._backend, self._cursors, self._rings = backend, cursors, list(rings)
        self._commit, self._take_back, self._move_rows = (
            commit_function(name, backend, cursors.device) for name in SCHEMAS
        )
        self._table = moves.ring_table(rings) if backend == "triton" else None

    def __deepcopy__(self, memo: dict[int, Any]) -> CommitOps:
        """For the copies of the cursors and rings, whose table holds other addresses."""
        return CommitOps(self._backend, copy.deepcopy(self._cursors, memo), copy.deepcopy(self._rings, memo))

    def commit(
        self, step: Step, accepted: torch.Tensor | None, accepted_paths: torch.Tensor | None, ring_len: int
    ) -> None:
        """See `replayssm.cursors.commit_rows`."""
        rows = (step.slot_indices, step.query_start_loc, accepted, accepted_paths)
        options = {"buffer_len": step.buffer_len, "ring_len": ring_len, "pad_slot_id": step.pad_slot_id}
        self._commit(self._cursors, *rows, **options)

    def take_back(self, slots: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """See `replayssm.cursors.take_back`."""
        self._take_back(self._cursors, slots, num_tokens)

    def move_rows(self, step: Step, accepted_paths: torch.Tensor) -> None:
        """See `replayssm.ops.moves.move_rows`: the rows of all layers, before the cursors move."""
        table = () if self._table is None else (self._table.entries, self._table.word_bytes)
        rows = (step.slot_indices, accepted_paths)
        self._move_rows(self._rings, self._cursors, *rows, *table, pad_slot_id=step.pad_slot_id)


def commit_function(name: str, backend: str, device: torch.device) -> Callable[..., Any]:
    """The op, if it is one and the dispatcher would pick the backend for the device; else the backend's function."""
    if name in SCHEMAS and (backend, device.type) in (("torch", "cpu"), ("triton", "cuda")):
        op: Callable[..., Any] = getattr(torch.ops.replayssm, name)
        return op
    return _triton(name) if backend == "triton" else _TORCH[name]


@functools.cache
def _triton(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module("replayssm.ops.commit_launch"), name)
    return function


def _on_gpu(name: str) -> Callable[..., None]:
    def run(*args: Any, **kwargs: Any) -> None:
        _triton(name)(*args, **kwargs)

    return run


register(SCHEMAS, _TORCH.__getitem__, _on_gpu)
