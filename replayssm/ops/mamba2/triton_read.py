"""Mamba-2, a token or a window of every row in one launch, with a read copy or an fp8 checkpoint.

Portable Triton: NVIDIA, AMD, interpreter. Signature and meaning as in `replayssm.ops.mamba2.reference`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.ops.mamba2.triton_math import finish, replay, softplus
from replayssm.ops.mamba2.triton_read_tiles import load_copy, load_state, write_copy, write_state
from replayssm.ops.mamba2.triton_window import seen_rows
from replayssm.ops.triton_rounding import random_words, write_rounded


@triton.jit(do_not_specialize=["num_slots", "buffer_len", "pad_slot_id", "stream"])
def mamba2_portable_read_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, state_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr,
    cursors_ptr, slot_indices_ptr, query_start_loc_ptr, parents_ptr, out_ptr, state_scales_ptr, codes_ptr, scales_ptr,
    global_ptr, seeds_ptr,
    num_slots, buffer_len, pad_slot_id, stream,
    x_token, x_head, dt_token, B_token, B_group, C_token, C_group, z_token, z_head, out_token, out_head,
    state_slot, state_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head,
    state_scales_slot, codes_slot, scales_slot, global_slot,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, READ: tl.constexpr, CHECKPOINT: tl.constexpr,
    WINDOWS: tl.constexpr, TREE: tl.constexpr, NATIVE: tl.constexpr, STOCHASTIC: tl.constexpr,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """One program: one head of one batch row; READ and CHECKPOINT name the formats ("none" reads the checkpoint).

    The committed rows and the window together fill ROWS rows; without WINDOWS every row has one token.
    """
    # 64 bits: products with the caller's strides must not overflow.
    h = (tl.program_id(0) % H).to(tl.int64)
    row = (tl.program_id(0) // H).to(tl.int64)
    g = h // (H // G)
    v = tl.arange(0, BV)
    k = tl.arange(0, BK)
    v_ok = v < P
    k_ok = k < N
    slot = tl.load(slot_indices_ptr + row)
    if WINDOWS:
        first = tl.load(query_start_loc_ptr + row).to(tl.int64)
        T = (tl.load(query_start_loc_ptr + row + 1) - first).to(tl.int32)
    else:
        first = row
        T = 1
    x_ptr += first * x_token + h * x_head
    dt_ptr += first * dt_token + h
    B_ptr += first * B_token + g * B_group
    C_ptr += first * C_token + g * C_group
    z_ptr += first * z_token + h * z_head
    out_ptr += first * out_token + h * out_head
    if (slot == pad_slot_id) | (slot < 0) | (slot >= num_slots):
        for t in range(T):
            tl.store(out_ptr + t * out_token + v, tl.zeros([BV], tl.float32).to(out_ptr.dtype.element_ty), mask=v_ok)
        return
    slot = slot.to(tl.int64)
    state_ptr += slot * state_slot + h * state_head
    state_scales_ptr += slot * state_scales_slot + h * P
    codes_ptr += slot * codes_slot + h * (P * N // 2 if READ == "nvfp4" else P * N)
    scales_ptr += slot * scales_slot + h * (P if READ == "fp8" else P * N // 32 if READ == "int8" else P * N // 16)
    global_ptr += slot * global_slot + h
    start = tl.load(cursors_ptr + slot * 4)
    committed = tl.load(cursors_ptr + slot * 4 + 1)
    limit = tl.minimum(tl.load(cursors_ptr + slot * 4 + 2), buffer_len)
    flush = (committed > 0) & (committed + T > limit)
    if (T == 0) & (flush == 0):
        return
    ring_x_ptr += slot * ring_x_slot + h * ring_x_head
    ring_B_ptr += slot * ring_B_slot + g * ring_B_group
    ring_dt_ptr += slot * ring_dt_slot + h * ring_dt_head
    A = tl.load(A_ptr + h)
    live = tl.where(flush, 0, committed)
    if flush:
        S = load_state(state_ptr, state_scales_ptr, P, N, BV, BK, CHECKPOINT, NATIVE)
        S = replay(S, A, ring_x_ptr, ring_B_ptr, ring_dt_ptr, start, committed, R, P, N, v, k, v_ok, k_ok)
        if STOCHASTIC:
            number = tl.load(cursors_ptr + slot * 4 + 3)
            words = random_words(tl.load(seeds_ptr + slot), number, stream, h.to(tl.int32) * (P * N), BV, BK, N)
            S = write_rounded(S, words, state_ptr, state_scales_ptr, P, N, CHECKPOINT, NATIVE)
        else:
            S = write_state(S, state_ptr, state_scales_ptr, P, N, CHECKPOINT, NATIVE)
        S = write_copy(S, codes_ptr, scales_ptr, global_ptr, P, N, READ, NATIVE)
    elif READ == "none":
        S = load_state(state_ptr, state_scales_ptr, P, N, BV, BK, CHECKPOINT, NATIVE)
    else:
        S = load_copy(codes_ptr, scales_ptr, global_ptr, P, N, BV, BK, READ, NATIVE)

    r = tl.arange(0, ROWS)
    old = r < live
    i = r - live
    new = (i >= 0) & (i < T)
    position = tl.where(start + r >= R, start + r - R, start + r)
    dt_new = tl.load(dt_ptr + i * dt_token, mask=new, other=0.0).to(tl.float32)
    if HAS_BIAS:
        dt_new += tl.load(dt_bias_ptr + h).to(tl.float32)
    if SOFTPLUS:
        dt_new = softplus(dt_new)
    dt_r = tl.where(new, dt_new, tl.load(ring_dt_ptr + position, mask=old, other=0.0))
    B_new = tl.load(B_ptr + i[:, None] * B_token + k[None, :], mask=new[:, None] & k_ok[None, :], other=0.0)
    x_new = tl.load(x_ptr + i[:, None] * x_token + v[None, :], mask=new[:, None] & v_ok[None, :], other=0.0)
    B_r = tl.load(ring_B_ptr + position[:, None] * N + k[None, :], mask=old[:, None] & k_ok[None, :], other=0.0)
    x_r = tl.load(ring_x_ptr + position[:, None] * P + v[None, :], mask=old[:, None] & v_ok[None, :], other=0.0)
    B_r = tl.where(new[:, None], B_new.to(tl.float32), B_r.to(tl.float32))
    x_r = tl.where(new[:, None], x_new.to(tl.float32), x_r.to(tl.float32))
    D = tl.load(D_ptr + h).to(tl.float32) if HAS_D else 0.0
    for t in range(T):
        seen = seen_rows(r, live, t, parents_ptr + first, TREE)
        C = tl.load(C_ptr + t * C_token + k, mask=k_ok, other=0.0).to(tl.float32)
        dt_seen = tl.where(seen, dt_r, 0.0)
        # A suffix sum, never a difference of prefix sums: its error stays relative to the exponent that matters.
        later = tl.sum(tl.where(r[:, None] < r[None, :], dt_seen[None, :], 0.0), 1)
        weight = tl.exp(A * later) * dt_seen * tl.sum(B_r * C[None, :], 1) + tl.where(r == live + t, D, 0.0)
        y = tl.sum(x_r * tl.where(seen, weight, 0.0)[:, None], 0)
        y += tl.exp(A * tl.sum(dt_seen, 0)) * tl.sum(S * C[None, :], 1)
        y = finish(y, z_ptr + t * z_token, v, v_ok, HAS_Z)
        tl.store(out_ptr + t * out_token + v, y.to(out_ptr.dtype.element_ty), mask=v_ok)

    end = start + committed + i
    end = tl.where(end >= R, end - R, end)
    x_new = x_new.to(ring_x_ptr.dtype.element_ty)
    tl.store(ring_x_ptr + end[:, None] * P + v[None, :], x_new, mask=new[:, None] & v_ok[None, :])
    tl.store(ring_dt_ptr + end, dt_r, mask=new)
    if h % (H // G) == 0:
        B_new = B_new.to(ring_B_ptr.dtype.element_ty)
        tl.store(ring_B_ptr + end[:, None] * N + k[None, :], B_new, mask=new[:, None] & k_ok[None, :])
