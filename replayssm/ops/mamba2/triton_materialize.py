"""Mamba-2: write the plain state at a committed token to other storage, or fold the ring in place.

Portable Triton: NVIDIA, AMD, interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.ops.mamba2.triton_math import replay


@triton.jit(do_not_specialize=["num_slots", "num_dst", "pad_slot_id"])
def mamba2_materialize_kernel(
    A_ptr, state_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr, cursors_ptr, slot_indices_ptr, num_tokens_ptr,
    dst_ptr, dst_indices_ptr,
    num_slots, num_dst, pad_slot_id,
    state_slot, state_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head,
    dst_slot, dst_head,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, HAS_NUM_TOKENS: tl.constexpr,
):  # fmt: skip
    """One program: BV rows of one head of one batch row."""
    TILES: tl.constexpr = (P + BV - 1) // BV
    tile = tl.program_id(0) % TILES
    # 64 bits: products with the caller's strides must not overflow.
    h = (tl.program_id(0) // TILES % H).to(tl.int64)
    row = (tl.program_id(0) // (TILES * H)).to(tl.int64)
    slot = tl.load(slot_indices_ptr + row)
    dst = tl.load(dst_indices_ptr + row)
    if (slot == pad_slot_id) | (slot < 0) | (slot >= num_slots) | (dst < 0) | (dst >= num_dst):
        return
    slot = slot.to(tl.int64)
    g = h // (H // G)
    v = tile * BV + tl.arange(0, BV)
    k = tl.arange(0, BK)
    v_ok = v < P
    k_ok = k < N
    tile_ok = v_ok[:, None] & k_ok[None, :]
    inner = v[:, None] * N + k[None, :]
    S = tl.load(state_ptr + slot * state_slot + h * state_head + inner, mask=tile_ok, other=0.0).to(tl.float32)
    start = tl.load(cursors_ptr + slot * 4)
    count = tl.load(cursors_ptr + slot * 4 + 1)
    if HAS_NUM_TOKENS:
        count = tl.minimum(count, tl.load(num_tokens_ptr + row))
    S = replay(
        S, tl.load(A_ptr + h), ring_x_ptr + slot * ring_x_slot + h * ring_x_head,
        ring_B_ptr + slot * ring_B_slot + g * ring_B_group, ring_dt_ptr + slot * ring_dt_slot + h * ring_dt_head,
        start, count, R, P, N, v, k, v_ok, k_ok,
    )  # fmt: skip
    dst_ptrs = dst_ptr + dst.to(tl.int64) * dst_slot + h * dst_head + inner
    tl.store(dst_ptrs, S.to(dst_ptr.dtype.element_ty), mask=tile_ok)
