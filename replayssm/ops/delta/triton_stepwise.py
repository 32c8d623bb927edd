"""Portable stepwise decoding: read, update and write the state every token. The baseline, and the oracle of flush."""

import triton
import triton.language as tl

from .triton_common import recur, token_gate, unit


@triton.jit(do_not_specialize=["num_slots", "pad_slot_id"])
def delta_stepwise_kernel(
    q, k, v, g, beta, A_log, dt_bias, state, slot_indices, out, num_slots, pad_slot_id, scale, lower_bound,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head, stride_g_token,
    stride_g_head, stride_beta_token, stride_beta_head, stride_out_token, stride_out_head, stride_state_slot,
    stride_state_head, HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, KDA: tl.constexpr, RAW: tl.constexpr, HAS_BIAS: tl.constexpr, BOUNDED: tl.constexpr,
    NORM: tl.constexpr,
):
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    tile = pid % TILES
    head = ((pid // TILES) % HV).to(tl.int64)
    row = (pid // (TILES * HV)).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = offs_k < K
    mask_v = offs_v < V
    slot = tl.load(slot_indices + row).to(tl.int64)
    out_at = out + row * stride_out_token + head * stride_out_head + offs_v
    if (slot == pad_slot_id) | (slot < 0) | (slot >= num_slots):
        tl.store(out_at, tl.zeros([BLOCK_V], out.dtype.element_ty), mask=mask_v)
    else:
        state_at = state + slot * stride_state_slot + head * stride_state_head + offs_v[:, None] * K + offs_k[None, :]
        tile_mask = mask_v[:, None] & mask_k[None, :]
        S = tl.load(state_at, mask=tile_mask, other=0.0).to(tl.float32)
        k_head = head // GROUP
        k_now = tl.load(k + row * stride_k_token + k_head * stride_k_head + offs_k, mask=mask_k, other=0.0)
        q_now = tl.load(q + row * stride_q_token + k_head * stride_q_head + offs_k, mask=mask_k, other=0.0)
        v_now = tl.load(v + row * stride_v_token + head * stride_v_head + offs_v, mask=mask_v, other=0.0)
        k_now = unit(k_now.to(tl.float32), NORM)
        q_now = unit(q_now.to(tl.float32), NORM) * scale
        decay, b = token_gate(
            g, beta, A_log, dt_bias, row, head, offs_k, mask_k, lower_bound, stride_g_token, stride_g_head,
            stride_beta_token, stride_beta_head, K, KDA, RAW, HAS_BIAS, BOUNDED,
        )
        decay = tl.exp(decay)
        if KDA:
            S = recur(S, decay[None, :], k_now, v_now.to(tl.float32), b)
        else:
            S = recur(S, decay, k_now, v_now.to(tl.float32), b)
        tl.store(state_at, S.to(state.dtype.element_ty), mask=tile_mask)
        o = tl.sum(S * q_now[None, :], axis=1)
        tl.store(out_at, o.to(out.dtype.element_ty), mask=mask_v)
