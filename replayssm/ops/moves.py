"""Move the ring rows of an accepted path together, so that the committed rows of a slot stay contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from replayssm.cursors import NUM_COMMITTED, RING_START, real_slots

SPAN = 1024  # most words of a row that one entry covers


@dataclass(frozen=True)
class RingTable:
    """Where rings lie, for a kernel that moves rows of all of them: made once, valid as long as the rings live.

    entries [n, 6] int64: address of a ring, its slot and head stride, words of a head's row, and the first and the
    end of the words that the entry covers, counted over all heads' rows. Strides are in words of `word_bytes`.
    """

    entries: torch.Tensor
    word_bytes: int


def ring_table(rings: Sequence[torch.Tensor]) -> RingTable:
    """The table of `rings` [S, heads, R(, dim)], each row contiguous; copied to the device, so not while capturing."""
    word_bytes = 4 if all(_in_words(ring, 4) for ring in rings) else 2
    entries = []
    for ring in rings:
        size = ring.element_size()
        row_words = (ring.shape[3] if ring.dim() == 4 else 1) * size // word_bytes
        slot, head = (stride * size // word_bytes for stride in ring.stride()[:2])
        end = ring.shape[1] * row_words
        entries += [
            (ring.data_ptr(), slot, head, row_words, first, min(first + SPAN, end)) for first in range(0, end, SPAN)
        ]
    return RingTable(torch.tensor(entries, dtype=torch.int64, device=rings[0].device), word_bytes)


def _in_words(ring: torch.Tensor, word_bytes: int) -> bool:
    """Whether every row of a ring starts and ends at a multiple of `word_bytes`."""
    lengths = (*ring.stride()[:2], ring.shape[3] if ring.dim() == 4 else 1)
    return ring.data_ptr() % word_bytes == 0 and all(n * ring.element_size() % word_bytes == 0 for n in lengths)


def move_rows(
    rings: Sequence[torch.Tensor],
    cursors: torch.Tensor,
    slot_indices: torch.Tensor,
    accepted_paths: torch.Tensor,
    table: torch.Tensor | None = None,
    word_bytes: int = 0,
    *,
    pad_slot_id: int,
) -> None:
    """Move row `accepted_paths[r, i]` of each window to row i of it, in every ring, before the cursors move.

    In and out: rings [S, heads, R(, dim)]. In: cursors [S, 4] int32; slot_indices [batch] int32; accepted_paths
    [batch, depth] int32: indices in the window, each larger than the one before, then -1. Row i of a window lies at
    `(ring_start + num_committed + i) % R`. No shape and no path taken depends on what the tensors hold. table and
    word_bytes are those of a `RingTable`, for kernels.
    """
    batch, depth = accepted_paths.shape
    if batch == 0 or depth == 0:
        return
    real = real_slots(slot_indices, len(cursors), pad_slot_id)
    # Whatever has no row to move writes its own rows back; pads write what the first real row of the batch writes.
    row = torch.where(real, torch.arange(batch, device=real.device), real.int().argmax())
    slots = torch.where(real, slot_indices, 0)[row].long()
    offsets = torch.arange(depth, device=real.device)
    sources = torch.where((accepted_paths >= 0) & real[:, None], accepted_paths, offsets)[row]
    first = cursors[slots, RING_START].long() + cursors[slots, NUM_COMMITTED]
    for ring in rings:
        read, write = ((first[:, None] + rows) % ring.shape[2] for rows in (sources, offsets))
        ring[slots[:, None], :, write] = ring[slots[:, None], :, read]
