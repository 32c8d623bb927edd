"""One KV-cache group of vLLM: the cursors that its layers share, and the order of a step.

The layers of a group find a request in the same block, so one tensor of cursors serves them. Different groups give
different blocks to a request and never share cursors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from replayssm import cursors as cursor_ops
from replayssm.cursors import Step
from replayssm.layer import LayerCache
from replayssm.ops.commits import commit_function
from replayssm.plan import Plan
from replayssm.quant import as_indexable

NULL_BLOCK = 0  # vLLM keeps this block for padding


@dataclass(frozen=True)
class Rows:
    """The rows of a step, as one group of layers sees them.

    decodes: the rows that go through the ring. accepted [n] int32: tokens that vLLM took of each of their windows
    before this one (None: all). prefills [n] int32: blocks of the rows that vLLM's own prefill serves; continued [n]
    int32: the same where the request has a state already, NULL_BLOCK where it starts anew.
    """

    decodes: Step | None = None
    accepted: torch.Tensor | None = None
    prefills: torch.Tensor | None = None
    continued: torch.Tensor | None = None


def decode_step(plan: Plan, blocks: torch.Tensor, query_start_loc: torch.Tensor | None = None) -> Step | None:
    """One token a row, or windows [query_start_loc[i], query_start_loc[i + 1]); None without rows. Any block stride."""
    if not len(blocks):
        return None
    window, tokens = (1, len(blocks)) if query_start_loc is None else (plan.max_window_len, -1)
    return Step(blocks, query_start_loc, window, tokens, plan.buffer_len, NULL_BLOCK, epoch=0)


def continued_blocks(blocks: torch.Tensor, has_state: torch.Tensor | None) -> torch.Tensor | None:
    """`Rows.continued` of prefill rows; has_state [n] bool (None: no row has)."""
    return None if has_state is None else torch.where(has_state, blocks, NULL_BLOCK).int()


def once_each(blocks: torch.Tensor) -> torch.Tensor:
    """blocks [n] with every repetition of one replaced by NULL_BLOCK, without a shape that depends on them."""
    ordered, order = blocks.sort(stable=True)
    repeated = torch.nn.functional.pad(ordered[1:] == ordered[:-1], (1, 0))
    return torch.empty_like(blocks).index_copy_(0, order, torch.where(repeated, NULL_BLOCK, ordered))


class Group:
    """Cursors [num_blocks, 4] of one group, read by every layer and moved once a step.

    Without drafts the last layer commits the step's token. With drafts nobody knows what is accepted before the next
    step: then `pending` [num_blocks] holds the length of each block's last window, and the first layer commits it, in
    one launch.
    """

    def __init__(
        self,
        plan: Plan,
        num_blocks: int,
        device: torch.device,
        layer_names: list[str],
        caches: Sequence[Callable[[], LayerCache]] = (),
    ) -> None:
        """caches: each layer's tensors, which moving a request to another block needs."""
        self.plan = plan
        self._caches = caches
        self.cursors = torch.zeros(num_blocks, 4, dtype=torch.int32, device=device)
        self.pending = torch.zeros(num_blocks, dtype=torch.int32, device=device) if plan.num_draft_tokens else None
        self._first, self._last = layer_names[0], layer_names[-1]
        self._rows = Rows()
        self._started = 0
        self._commit = commit_function("commit", plan.backend, device)
        self._follow = commit_function("follow_windows", plan.backend, device)
        self._limits = {"buffer_len": plan.buffer_len, "ring_len": plan.ring_len, "pad_slot_id": NULL_BLOCK}

    def begin(self, layer_name: str, rows: Callable[[], Rows]) -> Rows:
        """The rows of this step, found once, by the first layer; captured in a graph as everything else."""
        if layer_name == self._first:
            self._rows = self._started_rows(rows())
        return self._rows

    def end(self, layer_name: str) -> None:
        """After the last layer: move on by what the decode rows took, and start empty rings for prefill rows."""
        if layer_name != self._last:
            return
        rows, step = self._rows, self._rows.decodes
        if step is not None and self.pending is None:
            self._commit(self.cursors, step.slot_indices, step.query_start_loc, None, **self._limits)
        if rows.prefills is not None:
            self._reset(rows.prefills, 0 if step is None else len(step.slot_indices))

    def start(self, blocks: torch.Tensor) -> None:
        """Empty states and rings for requests that no prefill begins, in `blocks` [n] int64."""
        for cache in self._caches:
            layer = cache()
            layer.load(blocks, torch.zeros(len(blocks), *layer.spec.state_shape, device=blocks.device))
        self._reset(blocks, 0)

    def settle(self, blocks: torch.Tensor) -> None:
        """Replay the rings of `blocks` [n] int64 into their states; requests may name one block, a cached prefix's."""
        blocks = once_each(blocks)
        for cache in self._caches:
            cache().flush(blocks, NULL_BLOCK)
        cursor_ops.mark_flushed(self.cursors, blocks, self.plan.ring_len)

    def copied(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """The rest of what vLLM copies from settled blocks `src` [n] int64 to `dst`: read copies; rings start empty."""
        for cache in self._caches:
            formats = cache().op_formats().values()
            for tensor in (as_indexable(t) for t in formats if isinstance(t, torch.Tensor)):
                tensor[dst] = tensor[src]
        self._reset(dst, 0)

    def _started_rows(self, rows: Rows) -> Rows:
        """Commit what was accepted of the windows before (of a request that a prefill goes on with, all of them).

        Returns the rows with their blocks' numbers close together.
        """
        step, pending = rows.decodes, self.pending
        if pending is not None and rows.continued is not None:
            self._follow(self.cursors, pending, rows.continued, None, None, window_len=0, **self._limits)
        if step is None:
            return rows
        if pending is None:
            blocks = step.slot_indices.contiguous()
        else:
            windows = (step.slot_indices, step.query_start_loc, rows.accepted)
            blocks = self._follow(self.cursors, pending, *windows, **self._limits)
        return replace(rows, decodes=replace(step, slot_indices=blocks))

    def _reset(self, blocks: torch.Tensor, others: int) -> None:
        """Empty rings; in large batches the first windows differ, by order of arrival as block numbers may be alike."""
        spread, index = self.plan.spreads(len(blocks) + others), blocks.long()
        order = torch.arange(self._started, self._started + len(blocks), device=blocks.device)
        cursor_ops.reset(self.cursors, index, self.plan.buffer_len, spread=spread, order=order)
        if spread:
            self._started = (self._started + len(blocks)) % self.plan.buffer_len
        if self.pending is not None:
            self.pending[index] = 0
