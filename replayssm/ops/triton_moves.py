"""Moving the ring rows of accepted paths: all rings of all layers in one launch."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_slots", "ring_len", "depth", "pad_slot_id"])
def move_rows_kernel(
    table, cursors, slot_indices, paths, num_slots, ring_len, depth, pad_slot_id,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, WORD_BYTES: tl.constexpr,
):
    """Program (row of the batch, entry of `ring_table`): moves the entry's words of every row of the path."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_indices + row).to(tl.int64)
    i = tl.arange(0, DEPTH)
    path = tl.load(paths + row * depth + i, mask=i < depth, other=-1)
    moves = (path >= 0) & (path != i)
    real = (slot != pad_slot_id) & (slot >= 0) & (slot < num_slots)
    if real & (tl.sum(moves.to(tl.int32), 0) > 0):
        entry = table + tl.program_id(1).to(tl.int64) * 6
        address = tl.load(entry)
        if WORD_BYTES == 4:
            ring = address.to(tl.pointer_type(tl.int32))
        else:
            ring = address.to(tl.pointer_type(tl.int16))
        ring += slot * tl.load(entry + 1)
        stride_head = tl.load(entry + 2)
        row_words = tl.load(entry + 3).to(tl.int32)
        first_word = tl.load(entry + 4).to(tl.int32)
        num_words = tl.load(entry + 5).to(tl.int32)
        first_row = tl.load(cursors + slot * 4) + tl.load(cursors + slot * 4 + 1)
        source = (first_row + tl.where(moves, path, i)) % ring_len * row_words
        target = (first_row + i) % ring_len * row_words
        for part in range(0, SPAN, BLOCK):
            word = first_word + part + tl.arange(0, BLOCK)
            head = word // row_words
            at = ring + (head * stride_head + (word - head * row_words))
            mask = moves[:, None] & (word < num_words)[None, :]
            values = tl.load(at[None, :] + source[:, None], mask=mask, other=0)
            # A row that is overwritten may be the source of an earlier one: all reads come before all writes.
            tl.debug_barrier()
            tl.store(at[None, :] + target[:, None], values, mask=mask)
