"""The crew of a step with a read copy: programs that share the rows that flush, by (row, v-heads)."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_common import add
from replayssm.ops.delta.gluon_layouts import scores_layout, tile_layout
from replayssm.ops.delta.gluon_read_chunk import flush_heads
from replayssm.ops.delta.gluon_read_flush import flush_head
from replayssm.ops.delta.gluon_read_kept import flush_kept
from replayssm.ops.delta.gluon_read_renew import CHUNK, staged_layout
from replayssm.ops.gluon_read_window_rows import ranked_row


@gluon.jit
def flush_ranked(
    rank_at, rows, member, crew,
    q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices, out,
    codes, scales, global_at, state_scales, ring_len, scale, lower_bound, stride_q_token, stride_q_head,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head, stride_g_token, stride_g_head, stride_beta_token,
    stride_beta_head, stride_out_token, stride_out_head, chunks_state_slot, chunks_state_head, stride_rk_slot,
    stride_rk_head, stride_rv_slot, stride_rv_head, stride_ru_slot, stride_ru_head, stride_rg_slot, stride_rg_head,
    stride_rb_slot, stride_rb_head, chunks_codes_slot, stride_scales_slot, stride_global_slot,
    stride_state_scales_slot,
    HV: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr,
    BLOCK_L: gl.constexpr, READ: gl.constexpr, KDA: gl.constexpr, RAW: gl.constexpr, HAS_BIAS: gl.constexpr,
    BOUNDED: gl.constexpr, NORM: gl.constexpr, SCALES: gl.constexpr, CHUNK_HEADS: gl.constexpr, OUTPUTS: gl.constexpr,
    LB: gl.constexpr,
):  # fmt: skip
    """Flush every `crew`-th of the (row, v-heads) of `rows` rows that flush, from number `member` on.

    rank_at: in shared memory, by batch row (layout LB), its number among them. CHUNK_HEADS: v-heads that a program
    flushes together in chunk form; 0: one, serially. OUTPUTS: of one token a row, from the new copy.
    """
    WARPS: gl.constexpr = gl.num_warps()
    BITS: gl.constexpr = state.dtype.element_ty.primitive_bitwidth
    # An fp8 checkpoint is summed in fp32's order.
    TILE: gl.constexpr = tile_layout(32 if BITS == 8 else BITS, BLOCK_V, WARPS)
    SCORES: gl.constexpr = scores_layout(BLOCK_L, K, WARPS, KDA)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    PARTS: gl.constexpr = HV // max(1, CHUNK_HEADS)
    BLOCK_B: gl.constexpr = rank_at.shape[0]
    if CHUNK_HEADS > 0:
        for item in tl.range(member, rows * PARTS, crew, disable_licm=True):
            token = ranked_row(rank_at, item // PARTS, BLOCK_B, LB)
            flush_heads(
                token, item % PARTS, q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g,
                ring_beta, cursors, slot_indices, out, codes, scales, global_at, state_scales, ring_len, scale,
                lower_bound, stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token,
                stride_v_head, stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, stride_out_token,
                stride_out_head, chunks_state_slot, chunks_state_head, stride_rk_slot, stride_rk_head, stride_rv_slot,
                stride_rv_head, stride_ru_slot, stride_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot,
                stride_rb_head, chunks_codes_slot, stride_scales_slot, stride_global_slot, stride_state_scales_slot,
                GROUP, CHUNK_HEADS, K, V, BLOCK_V, BLOCK_L, READ, KDA, RAW, HAS_BIAS, BOUNDED, NORM,
                SCALES, OUTPUTS,
            )  # fmt: skip
        return
    keys_at = gl.allocate_shared_memory(gl.float32, [BLOCK_L * K], FLAT)
    gates_at = keys_at
    if KDA:
        gates_at = gl.allocate_shared_memory(gl.float32, [BLOCK_L * K], FLAT)
    values_at = gl.allocate_shared_memory(ring_v.dtype.element_ty, [BLOCK_L * V], FLAT)
    decay_at = gl.allocate_shared_memory(gl.float32, [BLOCK_L], FLAT)
    beta_at = gl.allocate_shared_memory(gl.float32, [BLOCK_L], FLAT)
    k_at, q_at = decay_at, decay_at
    if OUTPUTS:
        k_at = gl.allocate_shared_memory(gl.float32, [K], FLAT)
        q_at = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    tile_at = gl.allocate_shared_memory(gl.float32, [K // CHUNK, BLOCK_V, CHUNK], staged_layout())
    for item in range(member, rows * PARTS, crew):
        token = ranked_row(rank_at, item // HV, BLOCK_B, LB)
        head = (item % HV).to(gl.int64)
        flush_head(
            token, head, q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors,
            slot_indices, out, codes, scales, global_at, state_scales, ring_len, scale, lower_bound, stride_q_token,
            stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head, stride_g_token, stride_g_head,
            stride_beta_token, stride_beta_head, stride_out_token, stride_out_head, chunks_state_slot,
            chunks_state_head, stride_rk_slot, stride_rk_head, stride_rv_slot, stride_rv_head, stride_ru_slot,
            stride_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head, chunks_codes_slot,
            stride_scales_slot, stride_global_slot, stride_state_scales_slot, keys_at, gates_at, values_at, decay_at,
            beta_at, k_at, q_at, tile_at,
            HV, GROUP, K, V, BLOCK_V, BLOCK_L, READ, KDA, RAW, HAS_BIAS, BOUNDED, NORM, SCALES, BITS, TILE, SCORES,
            OUTPUTS,
        )  # fmt: skip


@gluon.jit
def flush_rows(
    member, q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices,
    out, codes, scales, global_at, state_scales, num_slots, ring_len, buffer_len, pad_slot_id, batch, scale,
    lower_bound, stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, stride_out_token, stride_out_head,
    chunks_state_slot, chunks_state_head, stride_rk_slot, stride_rk_head, stride_rv_slot, stride_rv_head,
    stride_ru_slot, stride_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head,
    chunks_codes_slot, stride_scales_slot, stride_global_slot, stride_state_scales_slot,
    HV: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr,
    CREW, BLOCK_B: gl.constexpr, BLOCK_L: gl.constexpr, READ: gl.constexpr, KDA: gl.constexpr,
    RAW: gl.constexpr, HAS_BIAS: gl.constexpr, BOUNDED: gl.constexpr, NORM: gl.constexpr, SCALES: gl.constexpr,
    CHUNK_HEADS: gl.constexpr,
):  # fmt: skip
    """`flush_ranked` of the rows that flush in this step of one token a row."""
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = gl.BlockedLayout([max(1, BLOCK_B // (32 * WARPS))], [32], [WARPS], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    row = gl.arange(0, BLOCK_B, layout=ROWS)
    slots = gl.load(slot_indices + row, mask=row < batch, other=-1).to(gl.int64)
    owned = (row < batch) & (slots != pad_slot_id) & (slots >= 0) & (slots < num_slots)
    count = gl.load(cursors + slots * 4 + 1, mask=owned, other=0)
    limit = gl.load(cursors + slots * 4 + 2, mask=owned, other=0)
    flushes = (count > 0) & (count + 1 > gl.minimum(limit, buffer_len))
    # Each row's number among those that flush, -1 for others, out of the registers' way.
    rank = gl.where(flushes, gl.associative_scan(flushes.to(gl.int32), 0, add) - 1, -1)
    rank_at = gl.allocate_shared_memory(gl.int32, [BLOCK_B], FLAT, rank)
    # A head and the tables of more rows are more shared memory than some devices have.
    FITS: gl.constexpr = BLOCK_L == 16 and state.dtype.element_ty != gl.uint8
    KEPT: gl.constexpr = READ == "nvfp4" and not KDA and CHUNK_HEADS > 0 and FITS
    if KEPT:
        PARTS: gl.constexpr = HV // CHUNK_HEADS
        for item in tl.range(member, gl.sum(flushes.to(gl.int32), 0) * PARTS, CREW, disable_licm=True):
            token = ranked_row(rank_at, item // PARTS, BLOCK_B, ROWS)
            flush_kept(
                token, item % PARTS, q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g,
                ring_beta, cursors, slot_indices, out, codes, scales, global_at, ring_len, scale, lower_bound,
                stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
                stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, stride_out_token, stride_out_head,
                chunks_state_slot, chunks_state_head, stride_rk_slot, stride_rk_head, stride_rv_slot, stride_rv_head,
                stride_ru_slot, stride_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head,
                chunks_codes_slot, stride_scales_slot, stride_global_slot, GROUP, CHUNK_HEADS, K, V, BLOCK_V, BLOCK_L,
                RAW, HAS_BIAS, BOUNDED, NORM,
            )  # fmt: skip
        return
    flush_ranked(
        rank_at, gl.sum(flushes.to(gl.int32), 0), member, CREW,
        q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices, out,
        codes, scales, global_at, state_scales, ring_len, scale, lower_bound, stride_q_token, stride_q_head,
        stride_k_token, stride_k_head, stride_v_token, stride_v_head, stride_g_token, stride_g_head, stride_beta_token,
        stride_beta_head, stride_out_token, stride_out_head, chunks_state_slot, chunks_state_head, stride_rk_slot,
        stride_rk_head, stride_rv_slot, stride_rv_head, stride_ru_slot, stride_ru_head, stride_rg_slot, stride_rg_head,
        stride_rb_slot, stride_rb_head, chunks_codes_slot, stride_scales_slot, stride_global_slot,
        stride_state_scales_slot,
        HV, GROUP, K, V, BLOCK_V, BLOCK_L, READ, KDA, RAW, HAS_BIAS, BOUNDED, NORM, SCALES, CHUNK_HEADS, True, ROWS,
    )  # fmt: skip
