"""GDN and KDA, one token of every row in one launch, with a read copy or an fp8 checkpoint; portable Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.ops.delta.triton_common import replay, ring_row, token_gate, unit
from replayssm.ops.delta.triton_step import read_ring
from replayssm.ops.mamba2.triton_read_tiles import load_copy, load_state, write_copy, write_state
from replayssm.ops.triton_rounding import random_words, write_rounded


@triton.jit(do_not_specialize=["num_slots", "ring_len", "buffer_len", "pad_slot_id", "stream"])
def delta_read_step_kernel(
    q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices, out,
    codes, scales, global_scale, state_scales, seeds,
    num_slots, ring_len, buffer_len, pad_slot_id, stream, scale, lower_bound,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, stride_out_token, stride_out_head,
    stride_state_slot, stride_state_head, stride_rk_slot, stride_rk_head, stride_rv_slot, stride_rv_head,
    stride_ru_slot, stride_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head,
    stride_codes_slot, stride_scales_slot, stride_global_slot, stride_state_scales_slot,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_L: tl.constexpr, READ: tl.constexpr, CHECKPOINT: tl.constexpr, NATIVE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    KDA: tl.constexpr, RAW: tl.constexpr, HAS_BIAS: tl.constexpr, BOUNDED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One program: one v-head of one batch row, whole, as nvfp4's scale is; READ "none" reads the checkpoint."""
    head = (tl.program_id(0) % HV).to(tl.int64)
    row = (tl.program_id(0) // HV).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.arange(0, BLOCK_V)
    mask_k = offs_k < K
    mask_v = offs_v < V
    slot = tl.load(slot_indices + row).to(tl.int64)
    out += row * stride_out_token + head * stride_out_head
    if (slot == pad_slot_id) | (slot < 0) | (slot >= num_slots):
        tl.store(out + offs_v, tl.zeros([BLOCK_V], out.dtype.element_ty), mask=mask_v)
        return
    k_head = head // GROUP
    state += slot * stride_state_slot + head * stride_state_head
    state_scales += slot * stride_state_scales_slot + head * V
    codes += slot * stride_codes_slot + head * (V * K // 2 if READ == "nvfp4" else V * K)
    head_scales: tl.constexpr = V if READ == "fp8" else V * K // 32 if READ == "int8" else V * K // 16
    scales += slot * stride_scales_slot + head * head_scales
    global_scale += slot * stride_global_slot + head
    ring_k += slot * stride_rk_slot + k_head * stride_rk_head
    ring_v += slot * stride_rv_slot + head * stride_rv_head
    ring_u += slot * stride_ru_slot + head * stride_ru_head
    ring_g += slot * stride_rg_slot + head * stride_rg_head
    ring_beta += slot * stride_rb_slot + head * stride_rb_head
    start = tl.load(cursors + slot * 4)
    committed = tl.load(cursors + slot * 4 + 1)
    limit = tl.minimum(tl.load(cursors + slot * 4 + 2), buffer_len)
    k_raw = tl.load(k + row * stride_k_token + k_head * stride_k_head + offs_k, mask=mask_k, other=0.0)
    q_raw = tl.load(q + row * stride_q_token + k_head * stride_q_head + offs_k, mask=mask_k, other=0.0)
    v_raw = tl.load(v + row * stride_v_token + head * stride_v_head + offs_v, mask=mask_v, other=0.0)
    k_now = unit(k_raw.to(tl.float32), NORM)
    q_now = unit(q_raw.to(tl.float32), NORM) * scale
    decay, b = token_gate(
        g, beta, A_log, dt_bias, row, head, offs_k, mask_k, lower_bound, stride_g_token, stride_g_head,
        stride_beta_token, stride_beta_head, K, KDA, RAW, HAS_BIAS, BOUNDED,
    )  # fmt: skip
    flush = (committed > 0) & (committed + 1 > limit)
    if flush:
        S = load_state(state, state_scales, V, K, BLOCK_V, BLOCK_K, CHECKPOINT, NATIVE)
        S = replay(S, ring_k, ring_v, ring_g, ring_beta, start, committed, ring_len, offs_k, mask_k, offs_v, mask_v, K,
                   V, KDA, NORM)
        if STOCHASTIC:
            number, first = tl.load(cursors + slot * 4 + 3), head.to(tl.int32) * (V * K)
            words = random_words(tl.load(seeds + slot), number, stream, first, BLOCK_V, BLOCK_K, K)
            S = write_rounded(S, words, state, state_scales, V, K, CHECKPOINT, NATIVE)
        else:
            S = write_state(S, state, state_scales, V, K, CHECKPOINT, NATIVE)
        S = write_copy(S, codes, scales, global_scale, V, K, READ, NATIVE)
    elif READ == "none":
        S = load_state(state, state_scales, V, K, BLOCK_V, BLOCK_K, CHECKPOINT, NATIVE)
    else:
        S = load_copy(codes, scales, global_scale, V, K, BLOCK_V, BLOCK_K, READ, NATIVE)
    acc_k, acc_q, total = read_ring(
        ring_k, ring_u, ring_g, q_now, k_now, decay, start, tl.where(flush, 0, committed), ring_len, offs_k, mask_k,
        offs_v, mask_v, K, V, BLOCK_L, KDA, NORM,
    )  # fmt: skip
    through = tl.exp(total)
    if KDA:
        acc_k += tl.sum(S * (k_now * through)[None, :], axis=1)
        acc_q += tl.sum(S * (q_now * through)[None, :], axis=1)
    else:
        acc_k += through * tl.sum(S * k_now[None, :], axis=1)
        acc_q += through * tl.sum(S * q_now[None, :], axis=1)
    u = b * (v_raw.to(tl.float32) - acc_k)
    o = acc_q + tl.sum(k_now * q_now, axis=0) * u
    tl.store(out + offs_v, o.to(out.dtype.element_ty), mask=mask_v)
    new = ring_row(start, committed, ring_len)
    tl.store(ring_v + new * V + offs_v, v_raw, mask=mask_v)
    tl.store(ring_u + new * V + offs_v, u.to(ring_u.dtype.element_ty), mask=mask_v)
    tl.store(ring_beta + new, b)
    if KDA:
        tl.store(ring_g + new * K + offs_k, decay, mask=mask_k)
    else:
        tl.store(ring_g + new, decay)
    if head % GROUP == 0:
        tl.store(ring_k + new * K + offs_k, k_raw, mask=mask_k)
