"""Cursors of a slot, the flush rule, and commit: the only place that writes cursors.

`cursors` is one int32 tensor `[num_slots, 4]`, so that a kernel gets all of a slot's cursors with one 16-byte load.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

RING_START, NUM_COMMITTED, WINDOW_LIMIT, NUM_FLUSHES = range(4)
NO_LIMIT = 2**31 - 1
SPREAD_FROM = 64  # slots from which on the rows of a cache flush at different steps, unless a plan says otherwise


@dataclass(frozen=True)
class Step:
    """One step of a batch, as kernels and `commit` see it; made by `ReplayCache.begin_step`.

    slot_indices [batch] int32; query_start_loc [batch + 1] int32, or None for one token a row. `max_window_len`,
    `num_tokens` and `buffer_len` are host integers, so nothing depends on what the device holds. parents [num_tokens]
    int32: each token's parent inside its row's window, -1 for the last committed token; None: windows are chains.
    stepwise: the tokens go straight into the checkpoints, whose rings are empty.
    """

    slot_indices: torch.Tensor
    query_start_loc: torch.Tensor | None
    max_window_len: int
    num_tokens: int
    buffer_len: int
    pad_slot_id: int
    epoch: int
    parents: torch.Tensor | None = None
    stepwise: bool = False

    @property
    def window_lens(self) -> torch.Tensor:
        """[batch] int32: tokens of every row."""
        if self.query_start_loc is None:
            return torch.ones_like(self.slot_indices)
        return self.query_start_loc.diff()


def must_flush(num_committed: int, window_len: int, buffer_len: int, window_limit: int) -> bool:
    """The flush rule for one row: a row with nothing committed has nothing to replay."""
    return num_committed > 0 and num_committed + window_len > min(buffer_len, window_limit)


def flush_mask(cursors: torch.Tensor, window_lens: torch.Tensor, buffer_len: int) -> torch.Tensor:
    """The flush rule for rows: cursors [batch, 4] and window_lens [batch] -> bool [batch]."""
    num_committed = cursors[:, NUM_COMMITTED]
    return (num_committed > 0) & (num_committed + window_lens > cursors[:, WINDOW_LIMIT].clamp(max=buffer_len))


def real_slots(slot_indices: torch.Tensor, num_slots: int, pad_slot_id: int) -> torch.Tensor:
    """Bool [batch]: which slot indices are not padding (`pad_slot_id`, or outside the cache)."""
    return (slot_indices != pad_slot_id) & (slot_indices >= 0) & (slot_indices < num_slots)


def commit(cursors: torch.Tensor, step: Step, num_accepted_tokens: torch.Tensor | None, ring_len: int) -> None:
    """`commit_rows` of a step."""
    rows = (step.slot_indices, step.query_start_loc, num_accepted_tokens)
    commit_rows(cursors, *rows, buffer_len=step.buffer_len, ring_len=ring_len, pad_slot_id=step.pad_slot_id)


def commit_rows(
    cursors: torch.Tensor,
    slot_indices: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    num_accepted_tokens: torch.Tensor | None,
    accepted_paths: torch.Tensor | None = None,
    *,
    buffer_len: int,
    ring_len: int,
    pad_slot_id: int,
) -> None:
    """Accept the first `num_accepted_tokens` [batch] of every window (None: all), on the device, without a sync.

    Or as many tokens as accepted_paths [batch, depth] have, whose rows were moved together before. After a flush
    `ring_start += P; P = accepted`, else `P += accepted`. Counts are held to 0 ... window_len; pads and slots outside
    the cache change nothing.
    """
    real = real_slots(slot_indices, len(cursors), pad_slot_id)
    slots = torch.where(real, slot_indices, 0).long()
    now = cursors[slots]
    window_lens = torch.ones_like(slot_indices) if query_start_loc is None else query_start_loc.diff()
    if accepted_paths is not None:
        num_accepted_tokens = path_lens(accepted_paths)
    accepted = window_lens if num_accepted_tokens is None else num_accepted_tokens.to(torch.int32)
    accepted = torch.minimum(accepted.clamp(min=0), window_lens)
    flushed = flush_mask(now, window_lens, buffer_len)
    committed = now[:, NUM_COMMITTED]
    then = torch.stack(
        [
            torch.where(flushed, (now[:, RING_START] + committed) % ring_len, now[:, RING_START]),
            torch.where(flushed, 0, committed) + accepted,
            torch.where(flushed, NO_LIMIT, now[:, WINDOW_LIMIT]),
            now[:, NUM_FLUSHES] + flushed,
        ],
        1,
    ).to(torch.int32)
    # Adding differences lets pad rows point at slot 0 and add nothing, with no shape that depends on data.
    cursors.index_add_(0, slots, torch.where(real[:, None], then - now, 0))


def follow_windows(
    cursors: torch.Tensor,
    pending: torch.Tensor,
    slot_indices: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    num_accepted_tokens: torch.Tensor | None,
    *,
    window_len: int = 1,
    buffer_len: int,
    ring_len: int,
    pad_slot_id: int,
) -> torch.Tensor:
    """Commit where acceptance is known one step late: `commit_rows` of the windows before these, which it remembers.

    pending [num_slots] int32 holds the length of every slot's last window and gets that of this one: from
    query_start_loc, or `window_len`. num_accepted_tokens counts tokens of the last window (None: all of it).
    Returns slot_indices (any stride) as a contiguous tensor.
    """
    slots = slot_indices.contiguous()
    real = real_slots(slots, len(cursors), pad_slot_id)
    index = torch.where(real, slots, 0).long()
    last = torch.where(real, pending[index], 0)
    starts = torch.nn.functional.pad(last.cumsum(0, dtype=torch.int32), (1, 0))
    rows = (slots, starts, num_accepted_tokens, None)
    commit_rows(cursors, *rows, buffer_len=buffer_len, ring_len=ring_len, pad_slot_id=pad_slot_id)
    lens = torch.full_like(last, window_len) if query_start_loc is None else query_start_loc.diff()
    pending.index_add_(0, index, torch.where(real, lens - last, 0))
    return slots


def path_lens(paths: torch.Tensor) -> torch.Tensor:
    """[batch]: tokens of each path [batch, depth], up to its first -1."""
    return (paths >= 0).to(torch.int32).cumprod(1).sum(1)


def mark_flushed(cursors: torch.Tensor, slots: torch.Tensor, ring_len: int) -> None:
    """Move the cursors of `slots` [n] int64 after all their committed rows were replayed into the checkpoint."""
    now = cursors[slots]
    start = (now[:, RING_START] + now[:, NUM_COMMITTED]) % ring_len
    flushed = (now[:, NUM_COMMITTED] > 0).to(torch.int32)
    limit = torch.full_like(start, NO_LIMIT)
    cursors[slots] = torch.stack([start, torch.zeros_like(start), limit, now[:, NUM_FLUSHES] + flushed], 1).int()


def take_back(cursors: torch.Tensor, slots: torch.Tensor, num_tokens: torch.Tensor) -> None:
    """Forget the last `num_tokens` [n] committed rows of `slots` [n] int64; counts are held to what is committed."""
    committed = cursors[slots, NUM_COMMITTED]
    cursors[slots, NUM_COMMITTED] = committed - torch.minimum(num_tokens.clamp(min=0), committed)


def reset(
    cursors: torch.Tensor, slots: torch.Tensor, buffer_len: int, *, spread: bool, order: torch.Tensor | None = None
) -> None:
    """Empty the rings of `slots` [n] int64. With `spread` the first window of slot s holds 1 + s % buffer_len rows,

    so that requests which start together flush at different steps; order [n] int64 takes the slot's place there.
    """
    limit = 1 + (slots if order is None else order) % buffer_len if spread else torch.full_like(slots, NO_LIMIT)
    zero = torch.zeros_like(slots)
    cursors[slots] = torch.stack([zero, zero, limit, zero], 1).to(torch.int32)
