"""The programs of a read-copy window step that flush: renew checkpoints and copies."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_read_crew import flush_ranked
from replayssm.ops.delta.gluon_read_window_heads import flush_in_loops
from replayssm.ops.delta.gluon_read_window_kept import flush_kept_heads
from replayssm.ops.gluon_formats import scales_a_row
from replayssm.ops.gluon_read_window_rows import rank_of_rows, ranked_row


@gluon.jit
def flush_windows(
    member, crew, q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors,
    slot_indices, query_start_loc, out, codes, scales, global_scale, state_scales, num_slots, ring_len,
    buffer_len, pad_slot_id, batch, scale, lower_bound, stride_q_token, stride_q_head, stride_k_token, stride_k_head,
    stride_v_token, stride_v_head, stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, stride_out_token,
    stride_out_head, chunks_state_slot, chunks_state_head, stride_rk_slot, stride_rk_head, stride_rv_slot,
    stride_rv_head, stride_ru_slot, stride_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head,
    chunks_codes_slot, stride_scales_slot, stride_global_slot, stride_state_scales_slot,
    HV: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr,
    BLOCK_B: gl.constexpr, ROWS: gl.constexpr, READ: gl.constexpr, COPY: gl.constexpr, KDA: gl.constexpr,
    RAW: gl.constexpr, HAS_BIAS: gl.constexpr, BOUNDED: gl.constexpr, NORM: gl.constexpr, CHUNK_HEADS: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    """Flush every `crew`-th of the (row, v-head) that flush in this step, from number `member` on."""
    WARPS: gl.constexpr = gl.num_warps()
    BITS: gl.constexpr = state.dtype.element_ty.primitive_bitwidth
    LR: gl.constexpr = gl.BlockedLayout([max(1, BLOCK_B // (32 * WARPS))], [32], [WARPS], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    rank, total = rank_of_rows(
        cursors, slot_indices, query_start_loc, num_slots, buffer_len, pad_slot_id, batch, BLOCK_B, LR
    )
    rank_at = gl.allocate_shared_memory(gl.int32, [BLOCK_B], FLAT, rank)
    PARTS: gl.constexpr = HV // max(1, CHUNK_HEADS)
    LOOPED: gl.constexpr = CHUNK_HEADS > 0 and COPY and READ != "fp8" and BITS != 8
    KEPT: gl.constexpr = READ == "nvfp4" and not KDA and BLOCK_V == V
    if LOOPED:
        # Equal shares of all heads, so that no program has more than one more than another.
        begin = member * total * HV // crew
        end = (member + 1) * total * HV // crew
        for item in tl.range(begin // CHUNK_HEADS, (end + CHUNK_HEADS - 1) // CHUNK_HEADS, disable_licm=True):
            token = ranked_row(rank_at, item // PARTS, BLOCK_B, LR)
            first_head = gl.maximum(begin - item * CHUNK_HEADS, 0)
            last_head = gl.minimum(end - item * CHUNK_HEADS, CHUNK_HEADS)
            if KEPT:
                flush_kept_heads(
                    token, item % PARTS, first_head, last_head, state, ring_k, ring_v, ring_g, ring_beta, cursors,
                    slot_indices, codes, scales, global_scale, ring_len, chunks_state_slot, chunks_state_head,
                    stride_rk_slot, stride_rk_head, stride_rv_slot, stride_rv_head, stride_rg_slot, stride_rg_head,
                    stride_rb_slot, stride_rb_head, chunks_codes_slot, stride_scales_slot, stride_global_slot, GROUP,
                    CHUNK_HEADS, K, V, ROWS, NORM, PIECES,
                )  # fmt: skip
            else:
                flush_in_loops(
                    token, item % PARTS, first_head, last_head, state, ring_k, ring_v, ring_g, ring_beta, cursors,
                    slot_indices, codes, scales, global_scale, ring_len, chunks_state_slot, chunks_state_head,
                    stride_rk_slot, stride_rk_head, stride_rv_slot, stride_rv_head, stride_rg_slot, stride_rg_head,
                    stride_rb_slot, stride_rb_head, chunks_codes_slot, stride_scales_slot, stride_global_slot, GROUP,
                    CHUNK_HEADS, K, V, BLOCK_V, ROWS, NORM, READ, KDA,
                )  # fmt: skip
        return
    flush_ranked(
        rank_at, total, member, crew,
        q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices, out,
        codes, scales, global_scale, state_scales, ring_len, scale, lower_bound, stride_q_token, stride_q_head,
        stride_k_token, stride_k_head, stride_v_token, stride_v_head, stride_g_token, stride_g_head, stride_beta_token,
        stride_beta_head, stride_out_token, stride_out_head, chunks_state_slot, chunks_state_head, stride_rk_slot,
        stride_rk_head, stride_rv_slot, stride_rv_head, stride_ru_slot, stride_ru_head, stride_rg_slot, stride_rg_head,
        stride_rb_slot, stride_rb_head, chunks_codes_slot, stride_scales_slot, stride_global_slot,
        stride_state_scales_slot,
        HV, GROUP, K, V, BLOCK_V, ROWS, READ if COPY else "none", KDA, RAW, HAS_BIAS, BOUNDED, NORM,
        scales_a_row(READ, K), CHUNK_HEADS, False, LR,
    )  # fmt: skip
