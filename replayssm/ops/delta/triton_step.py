"""Portable one-token step: read checkpoint and ring, write the output and one ring row; flush decided per row."""

import triton
import triton.language as tl

from .triton_common import replay, ring_row, token_gate, unit


@triton.jit
def read_ring(
    ring_k, ring_u, ring_g, q, k, decay, start, count, ring_len, offs_k, mask_k, offs_v, mask_v, K: tl.constexpr,
    V: tl.constexpr, BLOCK_L: tl.constexpr, KDA: tl.constexpr, NORM: tl.constexpr,
):
    """Sums over the committed rows seen through q and k, and the log decay from the checkpoint to this token."""
    offs_l = tl.arange(0, BLOCK_L)
    live = offs_l < count
    rows = ring_row(start, offs_l, ring_len)
    last = offs_l == count - 1
    after = ring_row(start, offs_l + 1, ring_len)
    has_after = offs_l + 1 < count
    tile_mask = live[:, None] & mask_k[None, :]
    keys = tl.load(ring_k + rows[:, None] * K + offs_k[None, :], mask=tile_mask, other=0.0).to(tl.float32)
    # Row j decays by the gates of the rows after it and of this token: a suffix sum of gates shifted by one row.
    if KDA:
        shifted = tl.load(
            ring_g + after[:, None] * K + offs_k[None, :], mask=has_after[:, None] & mask_k[None, :], other=0.0
        )
        since = tl.cumsum(tl.where(last[:, None], decay[None, :], shifted), axis=0, reverse=True)
        first = tl.load(ring_g + start * K + offs_k, mask=offs_k < tl.where(count > 0, K, 0), other=0.0)
        total = tl.sum(tl.where(last[:, None], decay[None, :], shifted), axis=0)
        weighted = keys * tl.exp(since)
        seen_k = tl.sum(weighted * k[None, :], axis=1)
        seen_q = tl.sum(weighted * q[None, :], axis=1)
    else:
        shifted = tl.where(last, decay, tl.load(ring_g + after, mask=has_after, other=0.0))
        since = tl.exp(tl.cumsum(shifted, axis=0, reverse=True))
        first = tl.load(ring_g + start, mask=count > 0, other=0.0)
        total = tl.sum(shifted, axis=0)
        seen_k = tl.sum(keys * k[None, :], axis=1) * since
        seen_q = tl.sum(keys * q[None, :], axis=1) * since
    if NORM:
        inverse = tl.rsqrt(tl.sum(keys * keys, axis=1) + 1e-6)
        seen_k = seen_k * inverse
        seen_q = seen_q * inverse
    seen_k = tl.where(live, seen_k, 0.0)
    seen_q = tl.where(live, seen_q, 0.0)
    u = tl.load(ring_u + rows[:, None] * V + offs_v[None, :], mask=live[:, None] & mask_v[None, :], other=0.0)
    u = u.to(tl.float32)
    total = tl.where(count > 0, total + first, decay)
    return tl.sum(u * seen_k[:, None], axis=0), tl.sum(u * seen_q[:, None], axis=0), total


@triton.jit(do_not_specialize=["num_slots", "ring_len", "buffer_len", "pad_slot_id"])
def delta_step_kernel(
    q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices, out,
    num_slots, ring_len, buffer_len, pad_slot_id, scale, lower_bound, stride_q_token, stride_q_head, stride_k_token,
    stride_k_head, stride_v_token, stride_v_head, stride_g_token, stride_g_head, stride_beta_token, stride_beta_head,
    stride_out_token, stride_out_head, stride_state_slot, stride_state_head, stride_rk_slot, stride_rk_head,
    stride_rv_slot, stride_rv_head, stride_ru_slot, stride_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot,
    stride_rb_head, HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_L: tl.constexpr, KDA: tl.constexpr, RAW: tl.constexpr, HAS_BIAS: tl.constexpr,
    BOUNDED: tl.constexpr, NORM: tl.constexpr,
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
        # The state first: nothing it needs waits for the cursors.
        S = tl.load(state_at, mask=tile_mask, other=0.0).to(tl.float32)
        start = tl.load(cursors + slot * 4)
        committed = tl.load(cursors + slot * 4 + 1)
        limit = tl.minimum(tl.load(cursors + slot * 4 + 2), buffer_len)
        flush = (committed > 0) & (committed + 1 > limit)
        k_head = head // GROUP
        rk = ring_k + slot * stride_rk_slot + k_head * stride_rk_head
        rv = ring_v + slot * stride_rv_slot + head * stride_rv_head
        ru = ring_u + slot * stride_ru_slot + head * stride_ru_head
        rg = ring_g + slot * stride_rg_slot + head * stride_rg_head
        rb = ring_beta + slot * stride_rb_slot + head * stride_rb_head

        k_raw = tl.load(k + row * stride_k_token + k_head * stride_k_head + offs_k, mask=mask_k, other=0.0)
        q_raw = tl.load(q + row * stride_q_token + k_head * stride_q_head + offs_k, mask=mask_k, other=0.0)
        v_raw = tl.load(v + row * stride_v_token + head * stride_v_head + offs_v, mask=mask_v, other=0.0)
        k_now = unit(k_raw.to(tl.float32), NORM)
        q_now = unit(q_raw.to(tl.float32), NORM) * scale
        decay, b = token_gate(
            g, beta, A_log, dt_bias, row, head, offs_k, mask_k, lower_bound, stride_g_token, stride_g_head,
            stride_beta_token, stride_beta_head, K, KDA, RAW, HAS_BIAS, BOUNDED,
        )
        if flush:
            S = replay(S, rk, rv, rg, rb, start, committed, ring_len, offs_k, mask_k, offs_v, mask_v, K, V, KDA, NORM)
            stored = S.to(state.dtype.element_ty)
            tl.store(state_at, stored, mask=tile_mask)
            S = stored.to(tl.float32)
        count = tl.where(flush, 0, committed)
        acc_k, acc_q, total = read_ring(
            rk, ru, rg, q_now, k_now, decay, start, count, ring_len, offs_k, mask_k, offs_v, mask_v, K, V, BLOCK_L,
            KDA, NORM,
        )
        # The decay is applied to the state's side for a scalar gate, and inside the product for a vector gate.
        if KDA:
            through = tl.exp(total)
            acc_k += tl.sum(S * (k_now * through)[None, :], axis=1)
            acc_q += tl.sum(S * (q_now * through)[None, :], axis=1)
        else:
            through = tl.exp(total)
            acc_k += through * tl.sum(S * k_now[None, :], axis=1)
            acc_q += through * tl.sum(S * q_now[None, :], axis=1)
        u = b * (v_raw.to(tl.float32) - acc_k)
        o = acc_q + tl.sum(k_now * q_now, axis=0) * u
        tl.store(out_at, o.to(out.dtype.element_ty), mask=mask_v)
        new = ring_row(start, committed, ring_len)
        tl.store(rv + new * V + offs_v, v_raw, mask=mask_v)
        tl.store(ru + new * V + offs_v, u.to(ring_u.dtype.element_ty), mask=mask_v)
        if tile == 0:
            tl.store(rb + new, b)
            if KDA:
                tl.store(rg + new * K + offs_k, decay, mask=mask_k)
            else:
                tl.store(rg + new, decay)
            if head % GROUP == 0:
                tl.store(rk + new * K + offs_k, k_raw, mask=mask_k)
