"""Move the ring rows of an accepted path together, so that the committed rows of a slot stay contiguous."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replayssm.cursors import NUM_COMMITTED, RING_START, real_slots


def move_rows(
    rings: Sequence[torch.Tensor],
    cursors: torch.Tensor,
    slot_indices: torch.Tensor,
    accepted_paths: torch.Tensor,
    *,
    pad_slot_id: int,
) -> None:
    """Move row `accepted_paths[r, i]` of each window to row i of it, in every ring, before the cursors move.

    In and out: rings [S, heads, R(, dim)]. In: cursors [S, 4] int32; slot_indices [batch] int32; accepted_paths
    [batch, depth] int32: indices in the window, each larger than the one before, then -1. Row i of a window lies at
    `(ring_start + num_committed + i) % R`. No shape and no path taken depends on what the tensors hold.
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
