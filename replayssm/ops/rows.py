"""What the reference ops agree on: which tokens a row has, which slots are pads, in which dtype they compute."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def compute_dtype(state: torch.Tensor) -> torch.dtype:
    """float32, or float64 if the checkpoint is float64."""
    return torch.float64 if state.dtype == torch.float64 else torch.float32


def is_pad(slot: int, num_slots: int, pad_slot_id: int) -> bool:
    """Whether a row with this slot index is padding: its outputs are zero and nothing is touched."""
    return slot == pad_slot_id or not 0 <= slot < num_slots


def iterate_rows(slot_indices: torch.Tensor, query_start_loc: torch.Tensor | None) -> Iterator[tuple[int, range]]:
    """Yield (slot, token range) of every row; without `query_start_loc` row r is token r."""
    bounds = list(range(len(slot_indices) + 1)) if query_start_loc is None else query_start_loc.tolist()
    for row, slot in enumerate(slot_indices.tolist()):
        yield slot, range(bounds[row], bounds[row + 1])
