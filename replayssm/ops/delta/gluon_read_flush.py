"""A v-head of a flush token by token: replay the ring, round the checkpoint, renew the read copy."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_common import (
    barrier,
    inverse_norm,
    log_decay,
    recur,
    row_of,
    sigmoid,
    stage_rows,
    wrap,
)
from replayssm.ops.delta.gluon_read_renew import renew_tile, round_fp8, stage_tile, tile_most
from replayssm.ops.gluon_encode import from_e4m3
from replayssm.ops.gluon_formats import global_scale


@gluon.jit
def load_tile(state, scales, first_row, inner, K: gl.constexpr, BLOCK_V: gl.constexpr, TILE: gl.constexpr):
    """A tile of the checkpoint in fp32; the pointers are of the head."""
    S = gl.load(state + first_row * K + inner)
    if state.dtype.element_ty == gl.uint8:
        rows = first_row + gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, TILE))
        S = from_e4m3(S, True) * gl.expand_dims(gl.load(scales + rows), 1)
    return S.to(gl.float32)


@gluon.jit
def replay_tile(
    S, keys_at, values_at, gates_at, decay_at, beta_at, count, tile,
    K: gl.constexpr, BLOCK_V: gl.constexpr, TILES: gl.constexpr, BLOCK_L: gl.constexpr, KDA: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """`gluon_common.replay_rows`, with the values of all tiles staged."""
    IN_K: gl.constexpr = gl.SliceLayout(0, TILE)
    IN_V: gl.constexpr = gl.SliceLayout(1, TILE)
    # Before the loop, else the compiler puts a barrier into every iteration.
    barrier()
    v = row_of(values_at, (count - 1) * TILES + tile, BLOCK_L * TILES, BLOCK_V).load(IN_V)
    beta = row_of(beta_at, count - 1, BLOCK_L, 1).load(IN_V)
    for j in range(count):
        n = count - 1 - j
        older = gl.maximum(n - 1, 0)
        v_next = row_of(values_at, older * TILES + tile, BLOCK_L * TILES, BLOCK_V).load(IN_V)
        beta_next = row_of(beta_at, older, BLOCK_L, 1).load(IN_V)
        if KDA:
            decay = gl.expand_dims(row_of(gates_at, n, BLOCK_L, K).load(IN_K), 0)
        else:
            decay = gl.expand_dims(row_of(decay_at, n, BLOCK_L, 1).load(IN_V), 1)
        S = recur(S, decay, row_of(keys_at, n, BLOCK_L, K).load(IN_K), v.to(gl.float32), beta, TILE)
        v = v_next
        beta = beta_next
    return S


@gluon.jit
def flush_head(
    token, head, q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors,
    slot_indices, out, codes, scales, global_at, state_scales, ring_len, scale, lower_bound, stride_q_token,
    stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head, stride_g_token, stride_g_head,
    stride_beta_token, stride_beta_head, stride_out_token, stride_out_head, chunks_state_slot, chunks_state_head,
    stride_rk_slot, stride_rk_head, stride_rv_slot, stride_rv_head, stride_ru_slot, stride_ru_head, stride_rg_slot,
    stride_rg_head, stride_rb_slot, stride_rb_head, chunks_codes_slot, stride_scales_slot, stride_global_slot,
    stride_state_scales_slot, keys_at, gates_at, values_at, decay_at, beta_at, k_at, q_at, tile_at,
    HV: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr,
    BLOCK_L: gl.constexpr, READ: gl.constexpr, KDA: gl.constexpr, RAW: gl.constexpr, HAS_BIAS: gl.constexpr,
    BOUNDED: gl.constexpr, NORM: gl.constexpr, SCALES: gl.constexpr, BITS: gl.constexpr, TILE: gl.constexpr,
    SCORES: gl.constexpr, OUTPUTS: gl.constexpr,
):  # fmt: skip
    """Flush a v-head, token by token; OUTPUTS: and append this token and compute its outputs from the new copy."""
    TILES: gl.constexpr = V // BLOCK_V
    CODE_BITS: gl.constexpr = codes.dtype.element_ty.primitive_bitwidth
    HEAD_CODES: gl.constexpr = V * K // 2 if READ == "nvfp4" else V * K
    LV: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = gl.load(slot_indices + token).to(gl.int64)
    start = gl.load(cursors + slot * 4)
    count = gl.load(cursors + slot * 4 + 1)
    k_head = head // GROUP
    state += (slot * chunks_state_slot + head * chunks_state_head) * (128 // BITS)
    state_scales += slot * stride_state_scales_slot + head * V
    codes += slot * chunks_codes_slot * (128 // CODE_BITS) + head * HEAD_CODES
    scales += slot * stride_scales_slot + head * (V * SCALES)
    ring_k += slot * stride_rk_slot + k_head * stride_rk_head
    ring_v += slot * stride_rv_slot + head * stride_rv_head
    ring_u += slot * stride_ru_slot + head * stride_ru_head
    ring_g += slot * stride_rg_slot + head * stride_rg_head
    ring_beta += slot * stride_rb_slot + head * stride_rb_head
    v += token * stride_v_token + head * stride_v_head
    out += token * stride_out_token + head * stride_out_head
    rows = gl.expand_dims(gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, TILE)), 1)
    inner = rows * K + gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, TILE)), 0)
    cols = gl.arange(0, K, layout=gl.SliceLayout(0, SCORES))
    offs_v = gl.arange(0, V, layout=LV)
    b = 0.0
    if OUTPUTS:
        k_raw = gl.load(k + token * stride_k_token + k_head * stride_k_head + cols)
        q_raw = gl.load(q + token * stride_q_token + k_head * stride_q_head + cols)
        v_raw = gl.load(v + offs_v)
        b = gl.load(beta + token * stride_beta_token + head * stride_beta_head).to(gl.float32)
        g += token * stride_g_token + head * stride_g_head
        a_log = 0.0
        bias = 0.0
        if RAW:
            a_log = gl.load(A_log + head).to(gl.float32)
        if KDA:
            decay = gl.load(g + cols).to(gl.float32)
            if HAS_BIAS:
                bias = gl.load(dt_bias + head * K + cols).to(gl.float32)
        else:
            decay = gl.load(g).to(gl.float32)
            if HAS_BIAS:
                bias = gl.load(dt_bias + head).to(gl.float32)
        if RAW:
            decay = log_decay(decay, a_log, bias, lower_bound, BOUNDED)
            b = sigmoid(b)
    # What the last item's tables were read for is over.
    barrier()
    stage_rows(keys_at, values_at, gates_at, decay_at, beta_at, ring_k, ring_v, ring_g, ring_beta, start, 0, count,
               ring_len, K, V, V, BLOCK_L, KDA, NORM)
    kq = 0.0
    through = 1.0
    if OUTPUTS:
        k_now = k_raw.to(gl.float32)
        q_now = q_raw.to(gl.float32)
        k_now = k_now * inverse_norm(k_now, 0, NORM)
        q_now = q_now * (inverse_norm(q_now, 0, NORM) * scale)
        kq = gl.sum(k_now * q_now, axis=0)
        if KDA:
            k_now = k_now * gl.exp(decay)
            q_now = q_now * gl.exp(decay)
        else:
            through = gl.exp(decay)
        k_at.store(k_now)
        q_at.store(q_now)
        new = wrap(start + count, ring_len)
        gl.store(ring_v + new * V + offs_v, v_raw)
        gl.store(ring_beta + new, b)
        if KDA:
            gl.store(ring_g + new * K + cols, decay)
        else:
            gl.store(ring_g + new, decay)
        if head % GROUP == 0:
            gl.store(ring_k + new * K + cols, k_raw)
        ring_u += new * V

    largest = 0
    S = load_tile(state, state_scales, 0, inner, K, BLOCK_V, TILE)
    for t in range(TILES):
        first = t * BLOCK_V
        S = replay_tile(S, keys_at, values_at, gates_at, decay_at, beta_at, count, t, K, BLOCK_V, TILES, BLOCK_L, KDA,
                        TILE)
        if BITS == 8:
            largest = gl.maximum(largest, round_fp8(S, tile_at, first, state, state_scales, K, TILE))
        else:
            stored = S.to(state.dtype.element_ty)
            gl.store(state + first * K + inner, stored)
            S = stored.to(gl.float32)
            if READ == "nvfp4":
                largest = gl.maximum(largest, tile_most(S))
            else:
                stage_tile(S, tile_at, TILE)
        if TILES > 1:
            # The next tile travels while this one is encoded.
            if t + 1 < TILES:
                S = load_tile(state, state_scales, first + BLOCK_V, inner, K, BLOCK_V, TILE)
        if READ != "nvfp4":
            renew_tile(tile_at, first, 1.0, 1.0, codes, scales, k_at, q_at, kq, through, b, v, ring_u, out, READ, K,
                       BLOCK_V, OUTPUTS)
    if READ == "nvfp4":
        power, inverse_power = global_scale(largest)
        gl.store(global_at + slot * stride_global_slot + head, power)
        for i in range(TILES):
            first = (TILES - 1 - i) * BLOCK_V
            if BITS != 8:
                stage_tile(S, tile_at, TILE)
            elif i > 0:
                stage_tile(S, tile_at, TILE)
            renew_tile(tile_at, first, power, inverse_power, codes, scales, k_at, q_at, kq, through, b, v, ring_u, out,
                       READ, K, BLOCK_V, OUTPUTS)
            if TILES > 1:
                if i + 1 < TILES:
                    S = load_tile(state, state_scales, first - BLOCK_V, inner, K, BLOCK_V, TILE)
