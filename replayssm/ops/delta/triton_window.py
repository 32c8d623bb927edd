"""GDN and KDA, a window of tokens of every row in one launch: forward substitution, no state per token.

Portable Triton (NVIDIA, AMD, interpreter). Meaning as in `replayssm.ops.delta.reference`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.ops.delta.triton_common import log_decay, replay, ring_row, token_gate, unit


@triton.jit
def seen_rows(r, live, t, parents, TREE: tl.constexpr):
    """Which rows come before token t of the window or are it: the committed ones (r < live), its ancestors, itself."""
    if TREE:
        seen = (r < live) | (r == live + t)
        at = tl.load(parents + t)
        for back in range(t):
            i = t - 1 - back
            hit = at == i
            seen = seen | (hit & (r == live + i))
            at = tl.where(hit, tl.load(parents + i), at)
    else:
        seen = r <= live + t
    return seen


@triton.jit
def gate_rows(
    ring_g, g, A_log, dt_bias, head, r, start, live, T, ring_len, offs_k, mask_k, lower_bound, stride_g_token,
    K: tl.constexpr, KDA: tl.constexpr, RAW: tl.constexpr, HAS_BIAS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Log decays of rows r, [ROWS] or [ROWS, K]: committed ones from the ring, then those of the window, then 0."""
    old = r < live
    new = (r >= live) & (r < live + T)
    row = ring_row(start, r, ring_len)
    if KDA:
        kept = tl.load(ring_g + row[:, None] * K + offs_k[None, :], mask=old[:, None] & mask_k[None, :], other=0.0)
        new = new[:, None] & mask_k[None, :]
        raw = tl.load(g + (r - live)[:, None] * stride_g_token + offs_k[None, :], mask=new, other=0.0).to(tl.float32)
    else:
        kept = tl.load(ring_g + row, mask=old, other=0.0)
        raw = tl.load(g + (r - live) * stride_g_token, mask=new, other=0.0).to(tl.float32)
    if RAW:
        bias = 0.0
        if HAS_BIAS:
            if KDA:
                bias = tl.load(dt_bias + head * K + offs_k, mask=mask_k, other=0.0).to(tl.float32)[None, :]
            else:
                bias = tl.load(dt_bias + head).to(tl.float32)
        raw = log_decay(raw, tl.load(A_log + head).to(tl.float32), bias, lower_bound, BOUNDED)
    return tl.where(new, raw, kept)


@triton.jit
def read_tokens(
    S, q, k, v, g, beta, A_log, dt_bias, rk, rv, ru, rg, rb, parents, out, first, T, head, start, committed, live,
    whole, ring_len, scale, lower_bound, stride_q_token, stride_k_token, stride_v_token, stride_g_token, stride_g_head,
    stride_beta_token, stride_beta_head, stride_out_token, offs_k, mask_k, offs_v, mask_v,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, TREE: tl.constexpr, KDA: tl.constexpr,
    RAW: tl.constexpr, HAS_BIAS: tl.constexpr, BOUNDED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Outputs and ring rows of a window from the state S [V, K] and `live` committed rows.

    The pointers to q, k, v, out and parents are of the window's first token, those to the rings of the slot's head.
    whole: append what all V-rows of a head share too.
    """
    r = tl.arange(0, ROWS)
    old = r < live
    new = (r >= live) & (r < live + T)
    row = ring_row(start, r, ring_len)
    keys = tl.load(rk + row[:, None] * K + offs_k[None, :], mask=old[:, None] & mask_k[None, :], other=0.0)
    fresh = k + (r - live)[:, None] * stride_k_token + offs_k[None, :]
    fresh = tl.load(fresh, mask=new[:, None] & mask_k[None, :], other=0.0)
    keys = tl.where(new[:, None], fresh.to(tl.float32), keys.to(tl.float32))
    if NORM:
        keys = keys * tl.rsqrt(tl.sum(keys * keys, axis=1) + 1e-6)[:, None]
    U = tl.load(ru + row[:, None] * V + offs_v[None, :], mask=old[:, None] & mask_v[None, :], other=0.0).to(tl.float32)
    # Row r decays by the gates of the later rows that the token sees: those of row r + 1 stand at r, and are summed up
    # from the end, never as a difference.
    g_head = g + first * stride_g_token + head * stride_g_head
    after = gate_rows(
        rg, g_head, A_log, dt_bias, head, r + 1, start, live, T, ring_len, offs_k, mask_k, lower_bound, stride_g_token,
        K, KDA, RAW, HAS_BIAS, BOUNDED,
    )  # fmt: skip
    here = gate_rows(
        rg, g_head, A_log, dt_bias, head, r, start, live, T, ring_len, offs_k, mask_k, lower_bound, stride_g_token,
        K, KDA, RAW, HAS_BIAS, BOUNDED,
    )  # fmt: skip
    for t in range(T):
        seen = seen_rows(r, live, t, parents, TREE)
        before = seen & (r != live + t)
        sees_next = seen_rows(r + 1, live, t, parents, TREE)
        k_raw = tl.load(k + t * stride_k_token + offs_k, mask=mask_k, other=0.0)
        q_now = unit(tl.load(q + t * stride_q_token + offs_k, mask=mask_k, other=0.0).to(tl.float32), NORM) * scale
        k_now = unit(k_raw.to(tl.float32), NORM)
        v_raw = tl.load(v + t * stride_v_token + offs_v, mask=mask_v, other=0.0)
        decay, b = token_gate(
            g, beta, A_log, dt_bias, first + t, head, offs_k, mask_k, lower_bound,
            stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, K, KDA, RAW, HAS_BIAS, BOUNDED,
        )  # fmt: skip
        if KDA:
            weighted = keys * tl.exp(tl.cumsum(tl.where(sees_next[:, None], after, 0.0), axis=0, reverse=True))
            through = tl.exp(tl.sum(tl.where(seen[:, None], here, 0.0), axis=0))
            seen_k = tl.sum(weighted * k_now[None, :], axis=1)
            seen_q = tl.sum(weighted * q_now[None, :], axis=1)
            acc_k = tl.sum(S * (k_now * through)[None, :], axis=1)
            acc_q = tl.sum(S * (q_now * through)[None, :], axis=1)
        else:
            fade = tl.exp(tl.cumsum(tl.where(sees_next, after, 0.0), axis=0, reverse=True))
            through = tl.exp(tl.sum(tl.where(seen, here, 0.0), axis=0))
            seen_k = tl.sum(keys * k_now[None, :], axis=1) * fade
            seen_q = tl.sum(keys * q_now[None, :], axis=1) * fade
            acc_k = tl.sum(S * k_now[None, :], axis=1) * through
            acc_q = tl.sum(S * q_now[None, :], axis=1) * through
        acc_k += tl.sum(U * tl.where(before, seen_k, 0.0)[:, None], axis=0)
        acc_q += tl.sum(U * tl.where(before, seen_q, 0.0)[:, None], axis=0)
        u = b * (v_raw.to(tl.float32) - acc_k)
        o = acc_q + tl.sum(k_now * q_now, axis=0) * u
        U = tl.where((r == live + t)[:, None], u[None, :], U)
        tl.store(out + t * stride_out_token + offs_v, o.to(out.dtype.element_ty), mask=mask_v)
        at = ring_row(start, committed + t, ring_len)
        tl.store(rv + at * V + offs_v, v_raw, mask=mask_v)
        tl.store(ru + at * V + offs_v, u.to(ru.dtype.element_ty), mask=mask_v)
        if whole:
            tl.store(rb + at, b)
            if KDA:
                tl.store(rg + at * K + offs_k, decay, mask=mask_k)
            else:
                tl.store(rg + at, decay)
            if head % GROUP == 0:
                tl.store(rk + at * K + offs_k, k_raw, mask=mask_k)


@triton.jit(do_not_specialize=["num_slots", "ring_len", "buffer_len", "pad_slot_id"])
def delta_window_kernel(
    q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices,
    query_start_loc, parents, out,
    num_slots, ring_len, buffer_len, pad_slot_id, scale, lower_bound,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, stride_out_token, stride_out_head,
    stride_state_slot, stride_state_head, stride_rk_slot, stride_rk_head, stride_rv_slot, stride_rv_head,
    stride_ru_slot, stride_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, TREE: tl.constexpr,
    KDA: tl.constexpr, RAW: tl.constexpr, HAS_BIAS: tl.constexpr, BOUNDED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V rows of one head of one batch row; committed rows and window together fill ROWS rows."""
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    tile = pid % TILES
    # 64 bits: products with the caller's strides must not overflow.
    head = ((pid // TILES) % HV).to(tl.int64)
    batch_row = pid // (TILES * HV)
    k_head = head // GROUP
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
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
    state_at = state + slot * stride_state_slot + head * stride_state_head + offs_v[:, None] * K + offs_k[None, :]
    tile_mask = mask_v[:, None] & mask_k[None, :]
    S = tl.load(state_at, mask=tile_mask, other=0.0).to(tl.float32)
    q += first * stride_q_token + k_head * stride_q_head
    k += first * stride_k_token + k_head * stride_k_head
    v += first * stride_v_token + head * stride_v_head
    rk = ring_k + slot * stride_rk_slot + k_head * stride_rk_head
    rv = ring_v + slot * stride_rv_slot + head * stride_rv_head
    ru = ring_u + slot * stride_ru_slot + head * stride_ru_head
    rg = ring_g + slot * stride_rg_slot + head * stride_rg_head
    rb = ring_beta + slot * stride_rb_slot + head * stride_rb_head
    if flush:
        S = replay(S, rk, rv, rg, rb, start, committed, ring_len, offs_k, mask_k, offs_v, mask_v, K, V, KDA, NORM)
        stored = S.to(state.dtype.element_ty)
        tl.store(state_at, stored, mask=tile_mask)
        S = stored.to(tl.float32)
    read_tokens(
        S, q, k, v, g, beta, A_log, dt_bias, rk, rv, ru, rg, rb, parents + first, out, first, T, head, start, committed,
        tl.where(flush, 0, committed), tile == 0, ring_len, scale, lower_bound, stride_q_token, stride_k_token,
        stride_v_token, stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, stride_out_token, offs_k,
        mask_k, offs_v, mask_v, GROUP, K, V, ROWS, TREE, KDA, RAW, HAS_BIAS, BOUNDED, NORM,
    )  # fmt: skip
