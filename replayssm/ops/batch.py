"""A ragged batch of windows as padded tensors, for the vectorised torch backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm.cursors import NUM_COMMITTED, RING_START, real_slots


@dataclass(frozen=True)
class Batch:
    """The rows of a step that are not pads: b rows, T = longest window."""

    slots: torch.Tensor  # [b] int64
    tokens: torch.Tensor  # [b, T] int64: index of each token in the packed inputs (0 where absent)
    present: torch.Tensor  # [b, T] bool
    parents: torch.Tensor | None  # [b, T] int64: index in the window, -1 for the last committed token; None: chains

    @property
    def window_lens(self) -> torch.Tensor:
        """[b] int64: tokens of each row."""
        return self.present.sum(1)

    def take(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[T_total, ...] -> [b, T, ...] in `dtype`, zero where absent (NaN there does not pass)."""
        return mask_rows(packed[self.tokens].to(dtype), self.present)

    def put(self, packed: torch.Tensor, values: torch.Tensor) -> None:
        """Write [b, T, ...] values to their tokens."""
        packed[self.tokens[self.present]] = values[self.present].to(packed.dtype)


def make_batch(
    slot_indices: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    num_slots: int,
    pad_slot_id: int,
    parents: torch.Tensor | None = None,
) -> Batch:
    """Leave out pad rows (and slots out of range) and lay out the windows of the others."""
    slots = slot_indices.long()
    if query_start_loc is None:
        first, lens = torch.arange(len(slots), device=slots.device), torch.ones_like(slots)
    else:
        first, lens = query_start_loc[:-1].long(), query_start_loc.diff().long()
    real = real_slots(slots, num_slots, pad_slot_id)
    slots, first, lens = slots[real], first[real], lens[real]
    offsets = torch.arange(int(lens.max()) if len(lens) else 0, device=slots.device)
    present = offsets < lens[:, None]
    tokens = torch.where(present, first[:, None] + offsets, 0)
    if parents is not None:
        parents = torch.where(present, parents[tokens].long(), -1)
    return Batch(slots, tokens, present, parents)


def mask_rows(values: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Zero `values` [*keep.shape, ...] where `keep` is False."""
    return torch.where(keep.reshape(keep.shape + (1,) * (values.dim() - keep.dim())), values, 0)


@dataclass(frozen=True)
class Committed:
    """The committed ring rows of b slots, oldest first, padded to the longest: index [b, J] and presence [b, J]."""

    slots: torch.Tensor
    positions: torch.Tensor
    present: torch.Tensor

    def take(self, ring: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """ring [S, heads, R, ...] -> [b, J, heads, ...] in `dtype`, zero where absent."""
        rows = ring[self.slots[:, None], :, self.positions]
        return mask_rows(rows.to(dtype), self.present)


def committed_rows(slots: torch.Tensor, cursors: torch.Tensor, counts: torch.Tensor, ring_len: int) -> Committed:
    """Rows `(ring_start + j) % ring_len`, j < counts, of every slot; cursors [b, 4] are those of `slots` [b]."""
    offsets = torch.arange(int(counts.max()) if len(counts) else 0, device=slots.device)
    positions = (cursors[:, RING_START].long()[:, None] + offsets) % ring_len
    return Committed(slots, positions, offsets < counts[:, None])


def append_positions(cursors: torch.Tensor, window: int, ring_len: int) -> torch.Tensor:
    """[b, window] int64: where the tokens of this step go."""
    first = (cursors[:, RING_START] + cursors[:, NUM_COMMITTED]).long()
    return (first[:, None] + torch.arange(window, device=cursors.device)) % ring_len


def append(ring: torch.Tensor, batch: Batch, positions: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows [b, T, heads, ...] at [b, T] positions of their slots, where present."""
    keep = batch.present
    slots = batch.slots[:, None].expand_as(positions)[keep]
    ring[slots, :, positions[keep]] = rows[keep].to(ring.dtype)


def decay_sums(
    committed: torch.Tensor, window: torch.Tensor, parents: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of log decay along the path from any row to any token of the window, each added up token by token.

    committed [b, J, ...], window [b, T, ...], parents as in `Batch` -> (total [b, T, ...] since the checkpoint,
    between [b, T, J + T, ...] from each row (its own decay excluded) to each token (included)); to be masked where
    the row is not an ancestor of the token.
    """
    (b, J), T = committed.shape[:2], window.shape[1]
    suffix = committed.flip(1).cumsum(1).flip(1)
    # Node i + 1 holds token i's sums: from J committed rows, from T tokens, and since the checkpoint.
    nodes = window.new_zeros(b, T + 1, J + T + 1, *window.shape[2:])
    if J:
        nodes[:, 0, : J - 1] = suffix[:, 1:]
        nodes[:, 0, -1] = suffix[:, 0]
    every = torch.arange(b, device=window.device)
    for i in range(T):
        nodes[:, i + 1] = nodes[every, _parent(parents, i) + 1] + window[:, i, None]
        nodes[:, i + 1, J + i] = 0
    return nodes[:, 1:, -1], nodes[:, 1:, :-1]


def seen_rows(committed: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[b, T, J + T] bool: what each token reads: the committed rows [b, J] that are present, its ancestors, itself."""
    b, T = batch.present.shape
    every, ancestors = torch.arange(b, device=committed.device), batch.present.new_zeros(b, T + 1, T)
    for i in range(T):
        ancestors[:, i + 1] = ancestors[every, _parent(batch.parents, i) + 1]
        ancestors[:, i + 1, i] = True
    inside = ancestors[:, 1:] & batch.present[:, None, :]
    return torch.cat([committed[:, None, :].expand(-1, T, -1), inside], 2)


def _parent(parents: torch.Tensor | None, i: int) -> torch.Tensor | int:
    """Parent of token i in every row."""
    return i - 1 if parents is None else parents[:, i]
