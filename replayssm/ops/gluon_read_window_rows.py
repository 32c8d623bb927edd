"""Which rows of a batch of windows flush, for the programs that share the flushes of a step with a read copy."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_window_parts import add


@gluon.jit
def rank_of_rows(
    cursors, slot_indices, query_start_loc, num_slots, buffer_len, pad_slot_id, batch, BLOCK_B: gl.constexpr,
    L: gl.constexpr,
):  # fmt: skip
    """Each row's number among those that flush in this step, -1 for others [BLOCK_B]; and how many flush."""
    row = gl.arange(0, BLOCK_B, layout=L)
    slot = gl.load(slot_indices + row, mask=row < batch, other=-1).to(gl.int64)
    # All of them beside the slots, so that only the cursors wait for those.
    first = gl.load(query_start_loc + row, mask=row < batch, other=0)
    length = gl.load(query_start_loc + row + 1, mask=row < batch, other=0) - first
    owned = (row < batch) & (slot != pad_slot_id) & (slot >= 0) & (slot < num_slots)
    count = gl.load(cursors + slot * 4 + 1, mask=owned, other=0)
    limit = gl.load(cursors + slot * 4 + 2, mask=owned, other=0)
    flushes = (count > 0) & (count + length > gl.minimum(limit, buffer_len))
    rank = gl.where(flushes, gl.associative_scan(flushes.to(gl.int32), 0, add) - 1, -1)
    return rank, gl.sum(flushes.to(gl.int32), 0)


@gluon.jit
def ranked_row(rank_at, rank, BLOCK_B: gl.constexpr, L: gl.constexpr):
    """The row of a number among those that flush; rank_at: `rank_of_rows` in shared memory."""
    row = gl.arange(0, BLOCK_B, layout=L)
    return gl.sum(gl.where(rank_at.load(L) == rank, row, 0), 0).to(gl.int64)
