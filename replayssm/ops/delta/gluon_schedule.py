"""Which row of the batch a program works on."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_flushers import is_taken, share_of_work


@gluon.jit
def flushes(row, slot_indices, cursors, num_slots, pad_slot_id, buffer_len):
    """Whether a row of the batch flushes in this step (one token a row)."""
    slot = gl.load(slot_indices + row).to(gl.int64)
    owned = (slot != pad_slot_id) & (slot >= 0) & (slot < num_slots)
    committed = gl.load(cursors + slot * 4 + 1, mask=owned, other=0)
    limit = gl.minimum(gl.load(cursors + slot * 4 + 2, mask=owned, other=0), buffer_len)
    return (committed > 0) & (committed + 1 > limit)


@gluon.jit
def settle_row(position, slot_indices, cursors, num_rows, num_slots, pad_slot_id, buffer_len, PARTS: gl.constexpr):
    """Row of the batch at a grid position: a flushing row of the last of PARTS trades places with an early row.

    A flush takes longer than a read, so one at the end of the grid would leave the other multiprocessors idle. The
    early rows are those of the second part (of two parts: of the first), as the very first programs all start at once.
    """
    span = num_rows // PARTS
    base = span if PARTS > 2 else 0
    shift = num_rows - span - base
    other = position
    if (position >= base) & (position < base + span):
        other = position + shift
    if position >= num_rows - span:
        other = position - shift
    if other != position:
        late = flushes(gl.maximum(position, other), slot_indices, cursors, num_slots, pad_slot_id, buffer_len)
        early = flushes(gl.minimum(position, other), slot_indices, cursors, num_slots, pad_slot_id, buffer_len)
        position = gl.where(late & (not early), other, position)
    return position


@gluon.jit
def place(num_rows, programs_a_row, slot_indices, cursors, num_slots, pad_slot_id, buffer_len, INTERLEAVE: gl.constexpr,
          SETTLE: gl.constexpr):
    """(row of the batch, which of its programs) of this program.

    Rows go by blocks of INTERLEAVE with the row fastest, so that a flushing row's programs spread over the chip.
    """
    pid = gl.program_id(0)
    if INTERLEAVE == 1:
        row = pid // programs_a_row
        part = pid % programs_a_row
    else:
        block = pid // (INTERLEAVE * programs_a_row)
        inside = pid - block * (INTERLEAVE * programs_a_row)
        block_rows = gl.minimum(INTERLEAVE, num_rows - block * INTERLEAVE)
        part = inside // block_rows
        row = block * INTERLEAVE + inside - part * block_rows
    if SETTLE > 0:
        row = settle_row(row, slot_indices, cursors, num_rows, num_slots, pad_slot_id, buffer_len, SETTLE)
    return row, part


@gluon.jit
def work_of_program(num_rows, programs_a_row, slot_indices, cursors, num_slots, pad_slot_id, buffer_len,
                    TILES: gl.constexpr, INTERLEAVE: gl.constexpr, SETTLE: gl.constexpr, FLUSHERS: gl.constexpr):
    """(row, which of its programs, first tile, last tile, whether it only flushes) of this program.

    The row of a program that has nothing to do is at least the number of rows.
    """
    if FLUSHERS > 0:
        row, part, begin, end, only = share_of_work(slot_indices, slot_indices, cursors, num_rows, num_slots,
                                                    pad_slot_id, buffer_len, programs_a_row, TILES, FLUSHERS, False)
    else:
        row, part = place(num_rows, programs_a_row, slot_indices, cursors, num_slots, pad_slot_id, buffer_len,
                          INTERLEAVE, SETTLE)
        begin = 0
        end = TILES
        only = False
    return row, part, begin, end, only


@gluon.jit
def read_cursors(cursors, slot, buffer_len):
    """(start, committed rows, whether a step of one token flushes) of a slot."""
    start = gl.load(cursors + slot * 4)
    committed = gl.load(cursors + slot * 4 + 1)
    limit = gl.load(cursors + slot * 4 + 2)
    return start, committed, (committed > 0) & (committed + 1 > gl.minimum(limit, buffer_len))


@gluon.jit
def leaves_flush(flush, only_flushes, row, slot_indices, cursors, num_rows, num_slots, pad_slot_id, buffer_len,
                 FLUSHERS: gl.constexpr):
    """Whether a program's row flushes, but by others."""
    leaves = False
    if FLUSHERS > 0:
        if flush & (not only_flushes):
            leaves = is_taken(row, slot_indices, slot_indices, cursors, num_rows, num_slots, pad_slot_id, buffer_len,
                              FLUSHERS, False)
    return leaves
