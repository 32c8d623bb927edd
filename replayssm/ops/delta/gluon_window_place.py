"""Which row of the batch, and which of its tiles, a program of the window kernel works on."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_flushers import is_taken, share_of_work
from replayssm.ops.gluon_window_parts import settle_row


@gluon.jit
def take_place(
    slot_indices, query_start_loc, cursors, num_slots, pad_slot_id, buffer_len,
    PER_ROW: gl.constexpr, TILES: gl.constexpr, FLUSHERS: gl.constexpr, SETTLE: gl.constexpr,
):  # fmt: skip
    """(row of the batch, which of its PER_ROW programs, first tile, last tile, whether it only flushes, rows).

    The row of a program that has nothing to do is at least the number of rows.
    """
    num_rows = gl.num_programs(0) // PER_ROW - FLUSHERS * TILES
    row = gl.program_id(0) // PER_ROW
    part = gl.program_id(0) % PER_ROW
    begin = 0
    end = TILES
    flushes_only = False
    if FLUSHERS > 0:
        row, part, begin, end, flushes_only = share_of_work(
            slot_indices, query_start_loc, cursors, num_rows, num_slots, pad_slot_id, buffer_len, PER_ROW, TILES,
            FLUSHERS, True,
        )  # fmt: skip
    elif SETTLE > 0:
        row = settle_row(
            row, slot_indices, query_start_loc, cursors, num_rows, num_slots, pad_slot_id, buffer_len, SETTLE
        )
    return row, part, begin, end, flushes_only, num_rows


@gluon.jit
def is_elsewhere(
    row, num_rows, flush, flushes_only, slot_indices, query_start_loc, cursors, num_slots, pad_slot_id, buffer_len,
    FLUSHERS: gl.constexpr,
):  # fmt: skip
    """Whether other programs do this program's share, as they do for rows that flush early."""
    elsewhere = False
    if FLUSHERS > 0:
        if flush & (not flushes_only):
            elsewhere = is_taken(
                row, slot_indices, query_start_loc, cursors, num_rows, num_slots, pad_slot_id, buffer_len, FLUSHERS,
                True,
            )  # fmt: skip
    return elsewhere
