"""What a Mamba-2 program asks of the memory before it may read anything."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_hints import guess_slot, prefetch


@gluon.jit
def give_hints(
    state_ptr, cursors_ptr, slot_index_ptr, num_slots, first_h, first_v, state_slot, state_head,
    N: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Bring cursors and ROWS V-rows from each of HEADS heads on to the L2 cache."""
    SIZE: gl.constexpr = state_ptr.dtype.element_ty.primitive_bitwidth // 8
    slot = guess_slot(slot_index_ptr)
    prefetch(cursors_ptr, slot, num_slots, 16, 16)
    for i in gl.static_range(HEADS):
        at = state_ptr + (first_h + i) * state_head + first_v * N
        prefetch(at, slot, num_slots, gl.to_tensor(state_slot).to(gl.int64) * SIZE, ROWS * N * SIZE)
