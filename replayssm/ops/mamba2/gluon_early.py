"""What a Mamba-2 program asks of the memory before it may read anything."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_hints import guess_slot, prefetch


@gluon.jit
def give_hints(
    state_ptr, ring_x_ptr, ring_B_ptr, cursors_ptr, slot_index_ptr, num_slots, first_h, first_v, g, state_slot,
    state_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group,
    P: gl.constexpr, N: gl.constexpr, R: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr, HINT: gl.constexpr,
):  # fmt: skip
    """Bring cursors and ROWS V-rows from each of HEADS heads on to the L2 cache; with HINT 2 also rows of the ring."""
    SIZE: gl.constexpr = state_ptr.dtype.element_ty.primitive_bitwidth // 8
    ACT_SIZE: gl.constexpr = ring_x_ptr.dtype.element_ty.primitive_bitwidth // 8
    slot = guess_slot(slot_index_ptr)
    prefetch(cursors_ptr, slot, num_slots, 16, 16)
    if HINT > 1:
        ring_B_ptr += g * ring_B_group
        prefetch(ring_B_ptr, slot, num_slots, gl.to_tensor(ring_B_slot).to(gl.int64) * ACT_SIZE, R * N * ACT_SIZE)
    for i in gl.static_range(HEADS):
        at = state_ptr + (first_h + i) * state_head + first_v * N
        prefetch(at, slot, num_slots, gl.to_tensor(state_slot).to(gl.int64) * SIZE, ROWS * N * SIZE)
    if HINT > 1:
        for i in gl.static_range(HEADS):
            at = ring_x_ptr + (first_h + i) * ring_x_head
            slot_bytes = gl.to_tensor(ring_x_slot).to(gl.int64) * ACT_SIZE
            prefetch(at, slot, num_slots, slot_bytes, (ROWS + P - 1) // P * R * P * ACT_SIZE)
