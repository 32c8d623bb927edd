"""ReplayCache: the steps of a cache's requests: begin, commit, take back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from replayssm.checks import ReplayError, check_int, fail
from replayssm.cursors import Step
from replayssm.memory import CacheMemory
from replayssm.ops.commits import CommitOps
from replayssm.plan import Plan
from replayssm.slots import Slots, check_accepted, check_windows, slot_tensor
from replayssm.trees import Paths, check_parents, check_paths


class ReplayCache(CacheMemory):
    """Checkpoints, read copies, rings and cursors of `num_slots` requests.

    The order of use: load -> (begin_step -> decode of every layer -> commit)* -> materialize. All methods leave the
    cache unchanged when they raise.
    """

    def __init__(
        self,
        plan: Plan,
        num_slots: int,
        *,
        layers: Mapping[int, Mapping[str, torch.Tensor]] | None = None,
        cursors: torch.Tensor | None = None,
        pad_slot_id: int = -1,
    ) -> None:
        """See `CacheMemory`: allocate, or with `layers` and `cursors` take tensors that an engine owns."""
        super().__init__(plan, num_slots, layers=layers, cursors=cursors, pad_slot_id=pad_slot_id)
        rings = [ring for layer in self._layers.values() for ring in layer.ring.values()]
        self._commits = CommitOps(plan.backend, self.cursors, rings)

    def begin_step(
        self,
        slot_indices: Slots,
        window_lens: int | Sequence[int] = 1,
        *,
        query_start_loc: torch.Tensor | None = None,
        max_window_len: int | None = None,
        buffer_len: int | None = None,
        parents: torch.Tensor | Sequence[int] | None = None,
    ) -> Step:
        """Describe a step, without a host synchronisation and without changing the cache.

        slot_indices [batch]: the slot of every row, padding included. window_lens: tokens of every row (one number:
        the same for all; zero is allowed in a sequence). Or query_start_loc [batch + 1] int32 on the device with
        max_window_len. buffer_len: a lower one than the plan's for this step. parents [num_tokens] int32: windows are
        trees, and each token names an earlier one of its row's window, or -1 for the last committed token; commit such
        a step with accepted_paths.
        """
        slots = slot_tensor("slot_indices", slot_indices, self.num_slots, self.device, padding=self.pad_slot_id)
        limit = self.plan.buffer_len
        if buffer_len is not None:
            limit = check_int("buffer_len", buffer_len, 1, limit)
        longest = min(self.plan.max_window_len, limit)
        windows = check_windows(len(slots), window_lens, query_start_loc, max_window_len, longest, self.device)
        stepwise = self._check_ring(parents=parents)
        step = Step(
            slots, *windows, buffer_len=limit, pad_slot_id=self.pad_slot_id, epoch=self._epoch, stepwise=stepwise
        )
        if parents is None:
            return step
        return replace(step, parents=check_parents(parents, step.window_lens, step.num_tokens, self.device))

    def commit(
        self,
        step: Step,
        num_accepted_tokens: torch.Tensor | Sequence[int] | None = None,
        *,
        accepted_paths: Paths | None = None,
    ) -> None:
        """Accept the first `num_accepted_tokens` [batch] tokens of every window (None: all). Once a step.

        Or accept the tokens of accepted_paths [batch, depth]: indices in the window from a token without parent to its
        last accepted descendant, then -1. Rows of a path that are apart are moved together in every layer's ring.
        """
        if not isinstance(step, Step):
            raise fail("step", type(step).__name__, "the Step that begin_step returned")
        if step.epoch != self._epoch:
            raise ReplayError("step is an earlier one or another cache's; allowed: the last step, committed once")
        self._check_ring(num_accepted_tokens=num_accepted_tokens, accepted_paths=accepted_paths)
        accepted = None if num_accepted_tokens is None else check_accepted(num_accepted_tokens, step, self.device)
        paths = None
        if accepted_paths is not None:
            if accepted is not None:
                raise fail("num_accepted_tokens", "given with accepted_paths", "one of them")
            paths = check_paths(accepted_paths, step, self.device)
            self._commits.move_rows(step, paths)
        elif step.parents is not None:
            raise fail("accepted_paths", None, "the accepted path of every row, for a step with parents")
        if not step.stepwise:
            self._commits.commit(step, accepted, paths, self.plan.ring_len)
        self._epoch += 1

    def take_back(self, slots: Slots, num_tokens: torch.Tensor | Sequence[int]) -> None:
        """Forget the last `num_tokens` [n] committed tokens of `slots` [n], which no flush may have replayed yet.

        A step never replays its own tokens, so those of the last step can always be taken back.
        """
        self._check_ring(num_tokens=num_tokens)
        index = self._slots(slots)
        self._commits.take_back(index, self._check_counts(num_tokens, index))
        self._epoch += 1

    def _check_ring(self, **arguments: object) -> bool:
        """Whether steps leave the ring out; then a token is in the state at once, and `arguments` mean nothing."""
        stepwise = self.plan.route == "stepwise"
        for name, value in arguments.items():
            if stepwise and value is not None:
                raise fail(name, "given with route stepwise", "None")
        return stepwise
