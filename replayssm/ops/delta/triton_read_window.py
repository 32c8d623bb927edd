"""GDN and KDA, a window of tokens of every row in one launch, with a read copy or fp8 checkpoint; portable Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.ops.delta.triton_common import replay
from replayssm.ops.delta.triton_window import read_tokens
from replayssm.ops.mamba2.triton_read_tiles import load_copy, load_state, write_copy, write_state
from replayssm.ops.triton_rounding import random_words, write_rounded


@triton.jit(do_not_specialize=["num_slots", "ring_len", "buffer_len", "pad_slot_id", "stream"])
def delta_portable_read_window_kernel(
    q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices,
    query_start_loc, parents, out, codes, scales, global_scale, state_scales, seeds,
    num_slots, ring_len, buffer_len, pad_slot_id, stream, scale, lower_bound,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, stride_out_token, stride_out_head,
    stride_state_slot, stride_state_head, stride_rk_slot, stride_rk_head, stride_rv_slot, stride_rv_head,
    stride_ru_slot, stride_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head,
    stride_codes_slot, stride_scales_slot, stride_global_slot, stride_state_scales_slot,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, ROWS: tl.constexpr, READ: tl.constexpr, CHECKPOINT: tl.constexpr, NATIVE: tl.constexpr,
    STOCHASTIC: tl.constexpr, TREE: tl.constexpr,
    KDA: tl.constexpr, RAW: tl.constexpr, HAS_BIAS: tl.constexpr, BOUNDED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One program: one v-head of one batch row, whole, as nvfp4's scale is; READ "none" reads the checkpoint.

    Committed rows and window together fill ROWS rows.
    """
    head = (tl.program_id(0) % HV).to(tl.int64)
    batch_row = tl.program_id(0) // HV
    k_head = head // GROUP
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.arange(0, BLOCK_V)
    mask_k = offs_k < K
    mask_v = offs_v < V
    slot = tl.load(slot_indices + batch_row).to(tl.int64)
    first = tl.load(query_start_loc + batch_row).to(tl.int64)
    T = (tl.load(query_start_loc + batch_row + 1) - first).to(tl.int32)
    out += first * stride_out_token + head * stride_out_head
    if (slot == pad_slot_id) | (slot < 0) | (slot >= num_slots):
        for t in range(T):
            tl.store(out + t * stride_out_token + offs_v, tl.zeros([BLOCK_V], out.dtype.element_ty), mask=mask_v)
        return
    start = tl.load(cursors + slot * 4)
    committed = tl.load(cursors + slot * 4 + 1)
    limit = tl.minimum(tl.load(cursors + slot * 4 + 2), buffer_len)
    flush = (committed > 0) & (committed + T > limit)
    if (T == 0) & (flush == 0):
        return
    state += slot * stride_state_slot + head * stride_state_head
    state_scales += slot * stride_state_scales_slot + head * V
    codes += slot * stride_codes_slot + head * (V * K // 2 if READ == "nvfp4" else V * K)
    head_scales: tl.constexpr = V if READ == "fp8" else V * K // 32 if READ == "int8" else V * K // 16
    scales += slot * stride_scales_slot + head * head_scales
    global_scale += slot * stride_global_slot + head
    q += first * stride_q_token + k_head * stride_q_head
    k += first * stride_k_token + k_head * stride_k_head
    v += first * stride_v_token + head * stride_v_head
    rk = ring_k + slot * stride_rk_slot + k_head * stride_rk_head
    rv = ring_v + slot * stride_rv_slot + head * stride_rv_head
    ru = ring_u + slot * stride_ru_slot + head * stride_ru_head
    rg = ring_g + slot * stride_rg_slot + head * stride_rg_head
    rb = ring_beta + slot * stride_rb_slot + head * stride_rb_head
    if flush:
        S = load_state(state, state_scales, V, K, BLOCK_V, BLOCK_K, CHECKPOINT, NATIVE)
        S = replay(S, rk, rv, rg, rb, start, committed, ring_len, offs_k, mask_k, offs_v, mask_v, K, V, KDA, NORM)
        if STOCHASTIC:
            number, first_word = tl.load(cursors + slot * 4 + 3), head.to(tl.int32) * (V * K)
            words = random_words(tl.load(seeds + slot), number, stream, first_word, BLOCK_V, BLOCK_K, K)
            S = write_rounded(S, words, state, state_scales, V, K, CHECKPOINT, NATIVE)
        else:
            S = write_state(S, state, state_scales, V, K, CHECKPOINT, NATIVE)
        S = write_copy(S, codes, scales, global_scale, V, K, READ, NATIVE)
    elif READ == "none":
        S = load_state(state, state_scales, V, K, BLOCK_V, BLOCK_K, CHECKPOINT, NATIVE)
    else:
        S = load_copy(codes, scales, global_scale, V, K, BLOCK_V, BLOCK_K, READ, NATIVE)
    read_tokens(
        S, q, k, v, g, beta, A_log, dt_bias, rk, rv, ru, rg, rb, parents + first, out, first, T, head, start, committed,
        tl.where(flush, 0, committed), True, ring_len, scale, lower_bound, stride_q_token, stride_k_token,
        stride_v_token, stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, stride_out_token, offs_k,
        mask_k, offs_v, mask_v, GROUP, K, V, ROWS, TREE, KDA, RAW, HAS_BIAS, BOUNDED, NORM,
    )  # fmt: skip
