"""Plain state at a committed token, written elsewhere (or in place): checkpoint plus the first rows of the ring."""

import triton
import triton.language as tl

from .triton_common import replay


@triton.jit(do_not_specialize=["num_slots", "num_dst_slots", "ring_len", "pad_slot_id"])
def delta_materialize_kernel(
    state, ring_k, ring_v, ring_g, ring_beta, cursors, slot_indices, num_tokens, dst, dst_indices, num_slots,
    num_dst_slots, ring_len, pad_slot_id, stride_state_slot, stride_state_head, stride_rk_slot, stride_rk_head,
    stride_rv_slot, stride_rv_head, stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head, stride_dst_slot,
    stride_dst_head, HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, KDA: tl.constexpr, NORM: tl.constexpr, ALL_ROWS: tl.constexpr,
):
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    tile = pid % TILES
    head = ((pid // TILES) % HV).to(tl.int64)
    row = (pid // (TILES * HV)).to(tl.int64)
    slot = tl.load(slot_indices + row).to(tl.int64)
    target = tl.load(dst_indices + row).to(tl.int64)
    owned = (slot != pad_slot_id) & (slot >= 0) & (slot < num_slots)
    if owned & (target >= 0) & (target < num_dst_slots):
        offs_k = tl.arange(0, BLOCK_K)
        offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        mask_k = offs_k < K
        mask_v = offs_v < V
        tile_mask = mask_v[:, None] & mask_k[None, :]
        inner = offs_v[:, None] * K + offs_k[None, :]
        S = tl.load(state + slot * stride_state_slot + head * stride_state_head + inner, mask=tile_mask, other=0.0)
        start = tl.load(cursors + slot * 4)
        count = tl.load(cursors + slot * 4 + 1)
        if not ALL_ROWS:
            count = tl.minimum(count, tl.load(num_tokens + row))
        S = replay(
            S.to(tl.float32), ring_k + slot * stride_rk_slot + (head // GROUP) * stride_rk_head,
            ring_v + slot * stride_rv_slot + head * stride_rv_head,
            ring_g + slot * stride_rg_slot + head * stride_rg_head,
            ring_beta + slot * stride_rb_slot + head * stride_rb_head, start, count, ring_len, offs_k, mask_k, offs_v,
            mask_v, K, V, KDA, NORM,
        )
        tl.store(
            dst + target * stride_dst_slot + head * stride_dst_head + inner, S.to(dst.dtype.element_ty), mask=tile_mask
        )
