"""Programs of a read-copy step that flush in chunk form: some v-heads of a row and k-head."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_chunk_gdn import chunk_tables, load_keys, solve_operands, stage_keys
from replayssm.ops.delta.gluon_chunk_kda import kda_chunk_tables
from replayssm.ops.delta.gluon_common import barrier, inverse_norm, log_decay, row_of, sigmoid, wrap
from replayssm.ops.delta.gluon_read_blocks import COLUMNS, chunk_width, columns_shared, stage_columns
from replayssm.ops.delta.gluon_read_head import flush_tiles, prefetch
from replayssm.ops.gluon_chunk import PIECE, num_parts, rows_shared
from replayssm.ops.gluon_flushers import opaque
from replayssm.ops.gluon_window_parts import mma_layout


@gluon.jit
def append_gates(
    beta_at, fade_at, beta, g, A_log, dt_bias, ring_beta, ring_g, lower_bound, stride_beta_head, stride_g_head,
    stride_rb_head, stride_rg_head,
    HEADS: gl.constexpr, KDA: gl.constexpr, RAW: gl.constexpr, HAS_BIAS: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """Append this token's beta and (GDN) log decay of some v-heads; put them, the decay as such, into shared memory."""
    h = gl.arange(0, HEADS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    b = gl.load(beta + h * stride_beta_head).to(gl.float32)
    if RAW:
        b = sigmoid(b)
    if not KDA:
        decay = gl.load(g + h * stride_g_head).to(gl.float32)
        if RAW:
            biases = 0.0
            if HAS_BIAS:
                biases = gl.load(dt_bias + h).to(gl.float32)
            decay = log_decay(decay, gl.load(A_log + h).to(gl.float32), biases, lower_bound, BOUNDED)
        gl.store(ring_g + h * stride_rg_head, decay)
        fade_at.store(gl.exp(decay))
    gl.store(ring_beta + h * stride_rb_head, b)
    beta_at.store(b)


@gluon.jit
def flush_heads(
    token, part, q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors,
    slot_indices, out, codes, scales, global_at, state_scales, ring_len, scale, lower_bound, stride_q_token,
    stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head, stride_g_token, stride_g_head,
    stride_beta_token, stride_beta_head, stride_out_token, stride_out_head, chunks_state_slot, chunks_state_head,
    stride_rk_slot, stride_rk_head, stride_rv_slot, stride_rv_head, stride_ru_slot, stride_ru_head, stride_rg_slot,
    stride_rg_head, stride_rb_slot, stride_rb_head, chunks_codes_slot, stride_scales_slot, stride_global_slot,
    stride_state_scales_slot,
    GROUP: gl.constexpr, HEADS: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr,
    ROWS: gl.constexpr, READ: gl.constexpr, KDA: gl.constexpr, RAW: gl.constexpr, HAS_BIAS: gl.constexpr,
    BOUNDED: gl.constexpr, NORM: gl.constexpr, SCALES: gl.constexpr, OUTPUTS: gl.constexpr,
):  # fmt: skip
    """Flush HEADS v-heads of one k-head of a row (KDA: one); OUTPUTS: and append this token and compute its outputs.

    Without OUTPUTS nothing is touched but the checkpoint and its copy.
    """
    WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = mma_layout(WARPS)
    WIDTH: gl.constexpr = chunk_width(READ)
    BITS: gl.constexpr = state.dtype.element_ty.primitive_bitwidth
    ACT: gl.constexpr = ring_k.dtype.element_ty
    CODE_BITS: gl.constexpr = codes.dtype.element_ty.primitive_bitwidth
    HEAD_CODES: gl.constexpr = V * K // 2 if READ == "nvfp4" else V * K
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    LC: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 8], [256 // K, K // 8], [WARPS, 1], [1, 0]))
    slot = gl.load(slot_indices + token)
    start = gl.load(cursors + slot.to(gl.int64) * 4)
    count = gl.load(cursors + slot.to(gl.int64) * 4 + 1)
    k_head = part * HEADS // GROUP
    at_k = ring_k + slot.to(gl.int64) * stride_rk_slot + k_head * stride_rk_head
    first = slot.to(gl.int64) * chunks_state_slot + (part * HEADS).to(gl.int64) * chunks_state_head
    prefetch(state + first * (128 // BITS), BLOCK_V * K * BITS // 8)
    at_v = ring_v + slot.to(gl.int64) * stride_rv_slot + part * HEADS * stride_rv_head
    prefetch(at_v, ring_len * (V * ACT.primitive_bitwidth // 8))
    columns_at = gl.allocate_shared_memory(gl.bfloat16, [K // PIECE, COLUMNS, PIECE], columns_shared())
    beta_at = gl.allocate_shared_memory(gl.float32, [HEADS], FLAT)
    fade_at = gl.allocate_shared_memory(gl.float32, [HEADS], FLAT)
    # What the last item's tables were read for is over.
    barrier()
    if not KDA:
        keys = load_keys(at_k, start, count, ring_len, K, ROWS)
    kq = 0.0
    if OUTPUTS:
        # Loads before stores: those are not moved past these.
        cols = gl.arange(0, K, layout=LC)
        k_raw = gl.load(k + token * stride_k_token + k_head * stride_k_head + cols)
        q_raw = gl.load(q + token * stride_q_token + k_head * stride_q_head + cols)
        at_head = part * HEADS
        append_gates(
            beta_at, fade_at, beta + token * stride_beta_token + at_head * stride_beta_head,
            g + token * stride_g_token + at_head * stride_g_head, A_log + at_head, dt_bias + at_head,
            ring_beta + slot.to(gl.int64) * stride_rb_slot + at_head * stride_rb_head + wrap(start + count, ring_len),
            ring_g + slot.to(gl.int64) * stride_rg_slot + at_head * stride_rg_head + wrap(start + count, ring_len),
            lower_bound, stride_beta_head, stride_g_head, stride_rb_head, stride_rg_head, HEADS, KDA, RAW, HAS_BIAS,
            BOUNDED,
        )  # fmt: skip
        k_now = k_raw.to(gl.float32)
        q_now = q_raw.to(gl.float32)
        k_now = k_now * inverse_norm(k_now, 0, NORM)
        q_now = q_now * (inverse_norm(q_now, 0, NORM) * scale)
        kq = gl.sum(k_now * q_now, axis=0)
        if part * HEADS % GROUP == 0:
            gl.store(at_k + wrap(start + count, ring_len) * K + cols, k_raw)
        if KDA:
            gates = gl.load(g + token * stride_g_token + k_head * stride_g_head + cols).to(gl.float32)
            if RAW:
                biases = 0.0
                if HAS_BIAS:
                    biases = gl.load(dt_bias + k_head * K + cols).to(gl.float32)
                gates = log_decay(gates, gl.load(A_log + k_head).to(gl.float32), biases, lower_bound, BOUNDED)
            at_g = ring_g + slot.to(gl.int64) * stride_rg_slot + k_head * stride_rg_head
            gl.store(at_g + wrap(start + count, ring_len) * K + cols, gates)
            k_now *= gl.exp(gates)
            q_now *= gl.exp(gates)
        stage_columns(columns_at, k_now, q_now, WIDTH)
    gates_of = ring_g + slot.to(gl.int64) * stride_rg_slot + part * HEADS * stride_rg_head
    beta_of = ring_beta + slot.to(gl.int64) * stride_rb_slot + part * HEADS * stride_rb_head
    if KDA:
        seen_at, left_at, solve_at, last_at = kda_chunk_tables(
            at_k, gates_of, beta_of, start, count, ring_len, K, ROWS, NORM, WIDTH
        )
        through_at = last_at
    else:
        seen_at = gl.allocate_shared_memory(gl.bfloat16, [num_parts(ACT), ROWS, K], rows_shared())
        left_at = seen_at
        norm_at = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)
        through_at = gl.allocate_shared_memory(gl.float32, [HEADS * ROWS], FLAT)
        last_at = gl.allocate_shared_memory(gl.float32, [HEADS], FLAT)
        solve_at = gl.allocate_shared_memory(gl.bfloat16, [3, HEADS * ROWS, ROWS], PLAIN)
        stage_keys(seen_at, norm_at, keys, WIDTH, NORM)
        chunk_tables(
            solve_at,
            through_at,
            last_at,
            seen_at,
            norm_at,
            gates_of,
            beta_of,
            start,
            count,
            ring_len,
            stride_rg_head,
            stride_rb_head,
            HEADS,
            ROWS,
            K,
        )
    for h in tl.range(HEADS, disable_licm=True):
        head = (opaque(part * HEADS) + h).to(gl.int64)
        s = opaque(slot).to(gl.int64)
        t = opaque(token.to(gl.int32)).to(gl.int64)
        new = wrap(start + count, ring_len)
        at_state = state + (s * chunks_state_slot + head * chunks_state_head) * (128 // BITS)
        b = 0.0
        fade = 1.0
        if OUTPUTS:
            b = row_of(beta_at, h, HEADS, 1).load(gl.SliceLayout(1, MMA))
            if not KDA:
                fade = row_of(fade_at, h, HEADS, 1).load(gl.SliceLayout(1, MMA))
        if KDA:
            through = 1.0
            last = 1.0
        else:
            through = row_of(through_at, h, HEADS, ROWS).load(gl.SliceLayout(0, MMA))
            last = gl.expand_dims(row_of(last_at, h, HEADS, 1).load(gl.SliceLayout(1, MMA)), 1)
        flush_tiles(
            at_state,
            state_scales + s * stride_state_scales_slot + head * V,
            codes + s * chunks_codes_slot * (128 // CODE_BITS) + head * HEAD_CODES,
            scales + s * stride_scales_slot + head * (V * SCALES), global_at + s * stride_global_slot + head,
            ring_v + s * stride_rv_slot + head * stride_rv_head, v + t * stride_v_token + head * stride_v_head,
            ring_u + s * stride_ru_slot + head * stride_ru_head + new * V,
            out + t * stride_out_token + head * stride_out_head, seen_at, left_at, last_at, columns_at, through,
            last, solve_operands(solve_at, h, HEADS, ROWS), start, count, ring_len, kq, fade, b,
            K, V, BLOCK_V, ROWS, READ, SCALES, WIDTH, MMA, KDA, OUTPUTS,
        )  # fmt: skip
