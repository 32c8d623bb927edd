"""Mamba-2, one token of every row in one launch: read checkpoint and ring, append, flush the rows that are full.

Portable Triton: NVIDIA, AMD, interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.ops.mamba2.triton_math import finish, replay, timestep


@triton.jit(do_not_specialize=["num_items", "num_slots", "buffer_len", "pad_slot_id"])
def mamba2_step_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, state_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr,
    cursors_ptr, slot_indices_ptr, out_ptr,
    num_items, num_slots, buffer_len, pad_slot_id,
    x_token, x_head, dt_token, B_token, B_group, C_token, C_group, z_token, z_head, out_token, out_head,
    state_slot, state_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: BV rows of one head of one batch row."""
    if PDL:
        # Everything below may depend on the kernel before; the kernel after may come on as soon as there is room.
        gdc_wait()
        gdc_launch_dependents()
    TILES: tl.constexpr = (P + BV - 1) // BV
    tile = tl.program_id(0) % TILES
    # 64 bits: products with the caller's strides must not overflow.
    h = (tl.program_id(0) // TILES % H).to(tl.int64)
    row = (tl.program_id(0) // (TILES * H)).to(tl.int64)
    g = h // (H // G)
    v = tile * BV + tl.arange(0, BV)
    k = tl.arange(0, BK)
    v_ok = v < P
    k_ok = k < N
    out_ptr += row * out_token + h * out_head
    slot = tl.load(slot_indices_ptr + row)
    if (slot == pad_slot_id) | (slot < 0) | (slot >= num_slots):
        tl.store(out_ptr + v, tl.zeros([BV], tl.float32).to(out_ptr.dtype.element_ty), mask=v_ok)
        return
    slot = slot.to(tl.int64)
    state_ptrs = state_ptr + slot * state_slot + h * state_head + v[:, None] * N + k[None, :]
    tile_ok = v_ok[:, None] & k_ok[None, :]
    stored = tl.load(state_ptrs, mask=tile_ok, other=0.0)
    start = tl.load(cursors_ptr + slot * 4)
    committed = tl.load(cursors_ptr + slot * 4 + 1)
    limit = tl.minimum(tl.load(cursors_ptr + slot * 4 + 2), buffer_len)
    ring_x_ptr += slot * ring_x_slot + h * ring_x_head
    ring_B_ptr += slot * ring_B_slot + g * ring_B_group
    ring_dt_ptr += slot * ring_dt_slot + h * ring_dt_head
    A = tl.load(A_ptr + h)
    dt = timestep(dt_ptr, dt_bias_ptr, row * dt_token + h, h, HAS_BIAS, SOFTPLUS)
    x_new = tl.load(x_ptr + row * x_token + h * x_head + v, mask=v_ok, other=0.0)
    B_new = tl.load(B_ptr + row * B_token + g * B_group + k, mask=k_ok, other=0.0)
    C = tl.load(C_ptr + row * C_token + g * C_group + k, mask=k_ok, other=0.0).to(tl.float32)

    flush = (committed > 0) & (committed + 1 > limit)
    live = tl.where(flush, 0, committed)
    S = stored.to(tl.float32)
    if flush:
        S = replay(S, A, ring_x_ptr, ring_B_ptr, ring_dt_ptr, start, committed, R, P, N, v, k, v_ok, k_ok)
        folded = S.to(stored.dtype)
        tl.store(state_ptrs, folded, mask=tile_ok)
        S = folded.to(tl.float32)

    r = tl.arange(0, ROWS)
    r_ok = r < live
    position = tl.where(start + r >= R, start + r - R, start + r)
    dt_r = tl.load(ring_dt_ptr + position, mask=r_ok, other=0.0)
    B_r = tl.load(ring_B_ptr + position[:, None] * N + k[None, :], mask=r_ok[:, None] & k_ok[None, :], other=0.0)
    x_r = tl.load(ring_x_ptr + position[:, None] * P + v[None, :], mask=r_ok[:, None] & v_ok[None, :], other=0.0)
    # A suffix sum, never a difference of prefix sums: its error stays relative to the exponent that matters.
    later = tl.sum(tl.where(r[:, None] < r[None, :], dt_r[None, :], 0.0), 1) + dt
    weight = tl.exp(A * later) * dt_r * tl.sum(B_r.to(tl.float32) * C[None, :], 1)
    y = tl.sum(x_r.to(tl.float32) * weight[:, None], 0)
    y += tl.exp(A * (tl.sum(dt_r, 0) + dt)) * tl.sum(S * C[None, :], 1)
    skip = dt * tl.sum(B_new.to(tl.float32) * C, 0)
    if HAS_D:
        skip += tl.load(D_ptr + h).to(tl.float32)
    y += skip * x_new.to(tl.float32)
    y = finish(y, z_ptr + row * z_token + h * z_head, v, v_ok, HAS_Z)
    tl.store(out_ptr + v, y.to(out_ptr.dtype.element_ty), mask=v_ok)

    end = start + committed
    end = tl.where(end >= R, end - R, end)
    tl.store(ring_x_ptr + end * P + v, x_new.to(ring_x_ptr.dtype.element_ty), mask=v_ok)
    if tile == 0:
        tl.store(ring_dt_ptr + end, dt)
        if h % (H // G) == 0:
            tl.store(ring_B_ptr + end * N + k, B_new.to(ring_B_ptr.dtype.element_ty), mask=k_ok)
