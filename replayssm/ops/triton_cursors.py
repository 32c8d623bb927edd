"""Cursor moves of a whole batch in one launch: commit, and taking tokens back."""

import triton
import triton.language as tl


@triton.jit
def window_lens(query_start_loc, row, mask, RAGGED: tl.constexpr):
    """Tokens of each row: from query_start_loc, or one."""
    if RAGGED:
        first = tl.load(query_start_loc + row, mask=mask, other=0)
        lens = tl.load(query_start_loc + row + 1, mask=mask, other=0) - first
    else:
        lens = tl.full(row.shape, 1, tl.int32)
    return lens


@triton.jit
def path_lens(paths, row, mask, depth):
    """Tokens of each path [rows, depth] up to its first -1."""
    count = tl.zeros(row.shape, tl.int32)
    goes_on = mask
    for i in range(depth):
        goes_on = goes_on & (tl.load(paths + row.to(tl.int64) * depth + i, mask=mask, other=-1) >= 0)
        count += goes_on.to(tl.int32)
    return count


@triton.jit
def move_cursors(cursors, slot, real, lens, taken, buffer_len, ring_len):
    """The cursors of real slots past the first `taken` tokens of windows of `lens` tokens."""
    taken = tl.minimum(tl.maximum(taken, 0), lens)
    at = cursors + slot.to(tl.int64) * 4
    start = tl.load(at, mask=real, other=0)
    committed = tl.load(at + 1, mask=real, other=0)
    limit = tl.load(at + 2, mask=real, other=0)
    flushes = tl.load(at + 3, mask=real, other=0)
    flushed = (committed > 0) & (committed + lens > tl.minimum(limit, buffer_len))
    tl.store(at, tl.where(flushed, (start + committed) % ring_len, start), mask=real)
    tl.store(at + 1, tl.where(flushed, 0, committed) + taken, mask=real)
    tl.store(at + 2, tl.where(flushed, 2147483647, limit), mask=real)  # NO_LIMIT
    tl.store(at + 3, flushes + flushed.to(tl.int32), mask=real)


@triton.jit(do_not_specialize=["num_rows", "num_slots", "depth", "buffer_len", "ring_len", "pad_slot_id"])
def commit_kernel(
    cursors, slot_indices, query_start_loc, accepted, num_rows, num_slots, depth, buffer_len, ring_len, pad_slot_id,
    BLOCK: tl.constexpr, RAGGED: tl.constexpr, COUNTS: tl.constexpr, PATHS: tl.constexpr,
):
    """`replayssm.cursors.commit_rows`; `accepted` holds counts [rows], or paths [rows, depth], or is not read."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < num_rows
    slot = tl.load(slot_indices + row, mask=there, other=pad_slot_id)
    real = there & (slot != pad_slot_id) & (slot >= 0) & (slot < num_slots)
    lens = window_lens(query_start_loc, row, there, RAGGED)
    taken = lens
    if PATHS:
        taken = path_lens(accepted, row, there, depth)
    if COUNTS:
        taken = tl.load(accepted + row, mask=there, other=0)
    move_cursors(cursors, slot, real, lens, taken, buffer_len, ring_len)


@triton.jit(
    do_not_specialize=["num_rows", "stride", "num_slots", "window_len", "buffer_len", "ring_len", "pad_slot_id"]
)
def follow_windows_kernel(
    cursors, pending, slot_indices, query_start_loc, accepted, slots, num_rows, stride, num_slots, window_len,
    buffer_len, ring_len, pad_slot_id,
    BLOCK: tl.constexpr, RAGGED: tl.constexpr, COUNTS: tl.constexpr,
):
    """`replayssm.cursors.follow_windows`; slot_indices lie `stride` apart and are gathered in `slots`."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < num_rows
    slot = tl.load(slot_indices + row.to(tl.int64) * stride, mask=there, other=pad_slot_id)
    tl.store(slots + row, slot, mask=there)
    real = there & (slot != pad_slot_id) & (slot >= 0) & (slot < num_slots)
    last = tl.load(pending + slot, mask=real, other=0)
    taken = last
    if COUNTS:
        taken = tl.load(accepted + row, mask=there, other=0)
    move_cursors(cursors, slot, real, last, taken, buffer_len, ring_len)
    lens = tl.full(row.shape, 0, tl.int32) + window_len
    if RAGGED:
        lens = window_lens(query_start_loc, row, there, RAGGED)
    tl.store(pending + slot, lens, mask=real)


@triton.jit(do_not_specialize=["num_rows"])
def take_back_kernel(cursors, slots, num_tokens, num_rows, BLOCK: tl.constexpr):
    """`replayssm.cursors.take_back`."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < num_rows
    at = cursors + tl.load(slots + row, mask=there, other=0).to(tl.int64) * 4 + 1
    committed = tl.load(at, mask=there, other=0)
    count = tl.load(num_tokens + row, mask=there, other=0)
    tl.store(at, committed - tl.minimum(tl.maximum(count, 0), committed), mask=there)
