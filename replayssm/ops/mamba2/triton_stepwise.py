"""Mamba-2, ordinary decoding: read, update and write the state of every row for one token.

The baseline, the fall-back, and the oracle of a flush: both call the same `update`, so checkpoints agree bit for bit.
Portable Triton: NVIDIA, AMD, interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.ops.mamba2.triton_math import finish, timestep, update


@triton.jit(do_not_specialize=["num_slots", "pad_slot_id"])
def mamba2_stepwise_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, state_ptr, slot_indices_ptr, out_ptr,
    num_slots, pad_slot_id,
    x_token, x_head, dt_token, B_token, B_group, C_token, C_group, z_token, z_head, out_token, out_head,
    state_slot, state_head,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, PDL: tl.constexpr,
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
    state_ptrs = state_ptr + slot.to(tl.int64) * state_slot + h * state_head + v[:, None] * N + k[None, :]
    tile_ok = v_ok[:, None] & k_ok[None, :]
    stored = tl.load(state_ptrs, mask=tile_ok, other=0.0)
    A = tl.load(A_ptr + h)
    dt = timestep(dt_ptr, dt_bias_ptr, row * dt_token + h, h, HAS_BIAS, SOFTPLUS)
    x = tl.load(x_ptr + row * x_token + h * x_head + v, mask=v_ok, other=0.0).to(tl.float32)
    B = tl.load(B_ptr + row * B_token + g * B_group + k, mask=k_ok, other=0.0).to(tl.float32)
    C = tl.load(C_ptr + row * C_token + g * C_group + k, mask=k_ok, other=0.0).to(tl.float32)
    S = update(stored.to(tl.float32), A, dt, B, x)
    tl.store(state_ptrs, S.to(stored.dtype), mask=tile_ok)
    y = tl.sum(S * C[None, :], 1)
    if HAS_D:
        y += tl.load(D_ptr + h).to(tl.float32) * x
    y = finish(y, z_ptr + row * z_token + h * z_head, v, v_ok, HAS_Z)
    tl.store(out_ptr + v, y.to(out_ptr.dtype.element_ty), mask=v_ok)
