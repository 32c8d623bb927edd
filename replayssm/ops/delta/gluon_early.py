"""What a program asks of the memory before it may read anything."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_hints import guess_slot, prefetch


@gluon.jit
def give_hints(
    state, ring_k, ring_u, cursors, slot_index, num_slots, ring_len, first_tile, k_head, chunks_state_slot,
    chunks_state_head, stride_rk_slot, stride_rk_head, stride_ru_slot, stride_ru_head,
    GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr, NUM_TILES: gl.constexpr,
    PER_HEAD: gl.constexpr, NUM_HEADS: gl.constexpr, HINT: gl.constexpr, ROWS: gl.constexpr = 0,
):
    """Bring cursors and state (its first ROWS V-rows, if any) to the L2 cache; with HINT 2 also k and u of the ring."""
    SIZE: gl.constexpr = state.dtype.element_ty.primitive_bitwidth // 8
    ACT_SIZE: gl.constexpr = ring_k.dtype.element_ty.primitive_bitwidth // 8
    slot = guess_slot(slot_index)
    head = (k_head * GROUP + first_tile // PER_HEAD).to(gl.int64)
    prefetch(cursors, slot, num_slots, 16, 16)
    if HINT > 1:
        keys = ring_k + k_head.to(gl.int64) * stride_rk_head
        slot_bytes = gl.to_tensor(stride_rk_slot).to(gl.int64) * ACT_SIZE
        prefetch(keys, slot, num_slots, slot_bytes, ring_len * (K * ACT_SIZE))
    state += head * chunks_state_head * (16 // SIZE) + first_tile % PER_HEAD * (BLOCK_V * K)
    slot_bytes = gl.to_tensor(chunks_state_slot).to(gl.int64) * 16
    prefetch(state, slot, num_slots, slot_bytes, (ROWS if ROWS > 0 else NUM_TILES * BLOCK_V) * K * SIZE)
    if HINT > 1:
        slot_bytes = gl.to_tensor(stride_ru_slot).to(gl.int64) * ACT_SIZE
        prefetch(ring_u + head * stride_ru_head, slot, num_slots, slot_bytes, ring_len * (NUM_HEADS * V * ACT_SIZE))
