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
    slot_indices: torch.Tensor, query_start_loc: torch.Tensor | None, num_slots: int, pad_slot_id: int
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
    return Batch(slots, torch.where(present, first[:, None] + offsets, 0), present)


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


def decay_sums(committed: torch.Tensor, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of log decay between any row and any token of the window, as sums of few terms.

    committed [b, J, ...], window [b, T, ...] -> (total [b, T, ...] since the checkpoint,
    between [b, T, J + T, ...] from each row (its own decay excluded) to each token (included); 0 or positive, and to
    be masked, where the row is later than the token).
    """
    prefix = window.cumsum(1)
    suffix = committed.flip(1).cumsum(1).flip(1)
    before = torch.cat([suffix[:, 1:], torch.zeros_like(suffix[:, :1])], 1)
    older = before[:, None] + prefix[:, :, None]
    inside = prefix[:, :, None] - prefix[:, None, :]
    return committed.sum(1, keepdim=True) + prefix, torch.cat([older, inside], 2)


def causal_mask(committed: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
    """[b, T, J + T] bool: committed rows that are present and window tokens up to and including this one."""
    T = window.shape[1]
    inside = torch.ones(T, T, dtype=torch.bool, device=window.device).tril() & window[:, None, :]
    return torch.cat([committed[:, None, :].expand(-1, T, -1), inside], 2)
