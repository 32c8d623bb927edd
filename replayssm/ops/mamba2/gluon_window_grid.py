"""Which part of a Mamba-2 window step a program of the grid works on.

The programs: those that only flush, a tile each; those of all rows, TILES tiles each; those that append the windows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_flushers import is_taken, nth_flush, survey
from replayssm.ops.gluon_window_parts import settle_row


@gluon.jit
def place_in_grid(PER_ROW: gl.constexpr, TILES: gl.constexpr, FLUSHERS: gl.constexpr):
    """(row, which of its PER_ROW programs) of a program by its place alone.

    Programs that only flush have row -1, those that append at least the number of rows.
    """
    place = gl.program_id(0) - FLUSHERS * PER_ROW * TILES
    return gl.where(place < 0, -1, place // PER_ROW), place % PER_ROW


@gluon.jit
def share_of_window(
    row, part, slot_indices, lengths, cursors, num_rows, num_slots, pad_slot_id, buffer_len,
    PER_ROW: gl.constexpr, TILES: gl.constexpr, FLUSHERS: gl.constexpr, SETTLE: gl.constexpr,
):  # fmt: skip
    """(row, which of its programs, first tile, last tile, whether it only flushes) of a program that does not append.

    The row is `num_rows` if there is nothing to flush.
    """
    begin = 0
    end = TILES
    only = False
    if FLUSHERS > 0:
        only = row < 0
        if only:
            place = gl.program_id(0)
            rows, flushes = survey(slot_indices, lengths, cursors, num_rows, num_slots, pad_slot_id, buffer_len, True)
            row = gl.minimum(nth_flush(place // (PER_ROW * TILES), rows, flushes), num_rows)
            part = place // TILES % PER_ROW
            begin = place % TILES
            end = begin + 1
    elif SETTLE > 0:
        row = settle_row(row, slot_indices, lengths, cursors, num_rows, num_slots, pad_slot_id, buffer_len, SETTLE)
    return row, part, begin, end, only


@gluon.jit
def duties_of(
    row, committed, limit, length, flushes_only, slot_indices, lengths, cursors, num_rows, num_slots, pad_slot_id,
    buffer_len, FLUSHERS: gl.constexpr,
):  # fmt: skip
    """(whether the row flushes, whether the program has nothing to do)."""
    flush = (committed > 0) & (committed + length > gl.minimum(limit, buffer_len))
    idle = (length == 0) & (not flush)
    if FLUSHERS > 0:
        if flush & (not flushes_only):
            idle = is_taken(
                row, slot_indices, lengths, cursors, num_rows, num_slots, pad_slot_id, buffer_len, FLUSHERS, True
            )
    return flush, idle
