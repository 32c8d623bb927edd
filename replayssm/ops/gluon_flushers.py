"""Programs that do nothing but flush: a tile each, of the first few rows of a small batch that flush.

A program that reads several tiles would replay them one after the other. In a small batch nothing hides that, so the
first programs of the grid take a tile each and the programs of such a row leave at once. Rows that flush beyond those
are flushed by their own programs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Rows of a batch that a warp surveys; larger batches have no such programs.
MOST_ROWS = gl.constexpr(64)


@gluon.jit
def survey(slot_indices, lengths, cursors, num_rows, num_slots, pad_slot_id, buffer_len, WINDOWS: gl.constexpr):
    """The rows of the batch, and which of them flush; `lengths` is query_start_loc (WINDOWS) or not used."""
    L: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    row = gl.arange(0, MOST_ROWS, layout=L)
    inside = row < num_rows
    slot = gl.load(slot_indices + row, mask=inside, other=-1).to(gl.int64)
    length = 1
    if WINDOWS:
        length = gl.load(lengths + row + 1, mask=inside, other=0) - gl.load(lengths + row, mask=inside, other=0)
    owned = inside & (slot != pad_slot_id) & (slot >= 0) & (slot < num_slots)
    committed = gl.load(cursors + slot * 4 + 1, mask=owned, other=0)
    limit = gl.minimum(gl.load(cursors + slot * 4 + 2, mask=owned, other=0), buffer_len)
    return row, (committed > 0) & (committed + length > limit)


@gluon.jit
def nth_flush(n, row, flushes):
    """The row that flushes as the n-th of its batch; MOST_ROWS if there is none."""
    found = gl.to_tensor(-1)
    for _ in range(n + 1):
        found = gl.min(gl.where(flushes & (row > found), row, MOST_ROWS), 0)
    return found


@gluon.jit
def share_of_work(
    slot_indices, lengths, cursors, num_rows, num_slots, pad_slot_id, buffer_len,
    PER_ROW: gl.constexpr, TILES: gl.constexpr, FLUSHERS: gl.constexpr, WINDOWS: gl.constexpr,
):  # fmt: skip
    """(row of the batch, which of its PER_ROW programs, first tile, last tile, whether it only flushes) of a program.

    The row of a program that has nothing to do is at least `num_rows`. Programs after those that flush may be more than
    the rows have.
    """
    place = gl.program_id(0)
    item = place - FLUSHERS * PER_ROW * TILES
    only = item < 0
    row = item // PER_ROW
    begin = 0
    end = TILES
    if only:
        rows, flushes = survey(slot_indices, lengths, cursors, num_rows, num_slots, pad_slot_id, buffer_len, WINDOWS)
        row = nth_flush(place // (PER_ROW * TILES), rows, flushes)
        item = place // TILES
        begin = place % TILES
        end = begin + 1
    return row, item % PER_ROW, begin, end, only


@gluon.jit
def is_taken(
    row, slot_indices, lengths, cursors, num_rows, num_slots, pad_slot_id, buffer_len, FLUSHERS: gl.constexpr,
    WINDOWS: gl.constexpr,
):  # fmt: skip
    """Whether other programs flush a row that flushes."""
    rows, flushes = survey(slot_indices, lengths, cursors, num_rows, num_slots, pad_slot_id, buffer_len, WINDOWS)
    return gl.sum(gl.where(flushes & (rows < row), 1, 0), 0) < FLUSHERS


@gluon.jit
def opaque(x):
    """x, hidden from the compiler, which would compute what follows from it before a loop and spill registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
