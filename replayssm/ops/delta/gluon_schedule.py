"""Which row of the batch a program works on."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
def place(programs_a_row, slot_indices, cursors, num_slots, pad_slot_id, buffer_len, INTERLEAVE: gl.constexpr,
          SETTLE: gl.constexpr):
    """(row of the batch, which of its programs) of this program.

    Rows go by blocks of INTERLEAVE with the row fastest, so that a flushing row's programs spread over the chip.
    """
    pid = gl.program_id(0)
    num_rows = gl.num_programs(0) // programs_a_row
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
