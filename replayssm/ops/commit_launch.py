"""Launches the kernels that move cursors and ring rows; the arguments are those of the torch functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from replayssm.ops.moves import SPAN, ring_table
from replayssm.ops.triton_cursors import commit_kernel, follow_windows_kernel, take_back_kernel
from replayssm.ops.triton_moves import move_rows_kernel

ROWS = 128  # of the batch, a program


def commit(
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
    """See `replayssm.cursors.commit_rows`."""
    batch = slot_indices.shape[0]
    if batch == 0:
        return
    accepted = num_accepted_tokens if accepted_paths is None else accepted_paths.contiguous()
    depth = 0 if accepted_paths is None else accepted_paths.shape[1]
    commit_kernel[(triton.cdiv(batch, ROWS),)](
        cursors,
        slot_indices,
        slot_indices if query_start_loc is None else query_start_loc,
        slot_indices if accepted is None else accepted,
        *(batch, cursors.shape[0], depth, buffer_len, ring_len, pad_slot_id),
        BLOCK=ROWS,
        RAGGED=query_start_loc is not None,
        COUNTS=num_accepted_tokens is not None and accepted_paths is None,
        PATHS=accepted_paths is not None,
        num_warps=4,
    )


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
    """See `replayssm.cursors.follow_windows`."""
    batch = slot_indices.shape[0]
    slots = torch.empty(batch, dtype=torch.int32, device=cursors.device)
    if batch == 0:
        return slots
    follow_windows_kernel[(triton.cdiv(batch, ROWS),)](
        *(cursors, pending, slot_indices),
        slots if query_start_loc is None else query_start_loc,
        slots if num_accepted_tokens is None else num_accepted_tokens,
        *(slots, batch, slot_indices.stride(0), cursors.shape[0], window_len, buffer_len, ring_len, pad_slot_id),
        BLOCK=ROWS,
        RAGGED=query_start_loc is not None,
        COUNTS=num_accepted_tokens is not None,
        num_warps=4,
    )
    return slots


def take_back(cursors: torch.Tensor, slots: torch.Tensor, num_tokens: torch.Tensor) -> None:
    """See `replayssm.cursors.take_back`."""
    if len(slots):
        take_back_kernel[(triton.cdiv(len(slots), ROWS),)](cursors, slots, num_tokens, len(slots), BLOCK=ROWS)


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
    """See `replayssm.ops.moves.move_rows`; without the table of the rings it is made here, which synchronises."""
    batch, depth = accepted_paths.shape
    if batch == 0 or depth == 0 or not rings:
        return
    if table is None:
        made = ring_table(rings)
        table, word_bytes = made.entries, made.word_bytes
    padded = triton.next_power_of_2(depth)
    move_rows_kernel[(batch, len(table))](
        *(table, cursors, slot_indices, accepted_paths.contiguous()),
        *(cursors.shape[0], rings[0].shape[2], depth, pad_slot_id),
        SPAN=SPAN,
        BLOCK=max(16, min(SPAN, 1024 // padded)),
        DEPTH=padded,
        WORD_BYTES=word_bytes,
        num_warps=4,
    )
