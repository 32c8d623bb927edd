"""One-token step with a read copy in two launches: rows that flush, and rows that read, by programs of one warp.

The flushing launch comes first. The reading one starts as soon as its programs have room, since the first lets it go
only after its own wait: everything before both is then done. What follows must wait for both, so the reading launch's
last program waits for the flushing launch before it ends.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.ops.delta.gluon_read_crew import flush_rows
from replayssm.ops.delta.gluon_read_warp import read_heads_alone
from replayssm.ops.gluon_formats import scales_a_row


@gluon.jit(do_not_specialize=["num_slots", "ring_len", "buffer_len", "pad_slot_id", "batch"])
def delta_read_flush_kernel(
    q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices, out,
    words, codes, scales, global_scale, state_scales,
    num_slots, ring_len, buffer_len, pad_slot_id, batch, scale, lower_bound,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, stride_out_token, stride_out_head,
    chunks_state_slot, chunks_state_head, stride_rk_slot, stride_rk_head, chunks_rv_slot, chunks_rv_head,
    chunks_ru_slot, chunks_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head,
    chunks_codes_slot, stride_scales_slot, stride_global_slot, stride_state_scales_slot,
    HV: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    BLOCK_V: gl.constexpr, BLOCK_B: gl.constexpr, BLOCK_L: gl.constexpr,
    READ: gl.constexpr, COPY: gl.constexpr, KDA: gl.constexpr, RAW: gl.constexpr,
    HAS_BIAS: gl.constexpr, BOUNDED: gl.constexpr, NORM: gl.constexpr, CHUNK_HEADS: gl.constexpr,
):  # fmt: skip
    """The rows that flush: each program takes its share of the (row, v-heads)."""
    ACT: gl.constexpr = ring_u.dtype.element_ty
    ACT_CHUNK: gl.constexpr = 128 // ACT.primitive_bitwidth
    gdc_wait()
    gdc_launch_dependents()
    flush_rows(
        gl.program_id(0), q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors,
        slot_indices, out, codes, scales, global_scale, state_scales, num_slots, ring_len, buffer_len, pad_slot_id,
        batch, scale, lower_bound, stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token,
        stride_v_head, stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, stride_out_token,
        stride_out_head, chunks_state_slot, chunks_state_head, stride_rk_slot, stride_rk_head,
        chunks_rv_slot * ACT_CHUNK, chunks_rv_head * ACT_CHUNK, chunks_ru_slot * ACT_CHUNK, chunks_ru_head * ACT_CHUNK,
        stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head, chunks_codes_slot, stride_scales_slot,
        stride_global_slot, stride_state_scales_slot,
        HV, GROUP, K, V, BLOCK_V, gl.num_programs(0), BLOCK_B, BLOCK_L, READ if COPY else "none", KDA, RAW, HAS_BIAS,
        BOUNDED, NORM, scales_a_row(READ, K), CHUNK_HEADS,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_slots", "ring_len", "buffer_len", "pad_slot_id", "batch"])
def delta_read_alone_kernel(
    q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices, out,
    words, codes, scales, global_scale, state_scales,
    num_slots, ring_len, buffer_len, pad_slot_id, batch, scale, lower_bound,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, stride_out_token, stride_out_head,
    chunks_state_slot, chunks_state_head, stride_rk_slot, stride_rk_head, chunks_rv_slot, chunks_rv_head,
    chunks_ru_slot, chunks_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head,
    chunks_codes_slot, stride_scales_slot, stride_global_slot, stride_state_scales_slot,
    HV: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, HEADS: gl.constexpr,
    BLOCK_L: gl.constexpr, READ: gl.constexpr, SPLIT: gl.constexpr, KDA: gl.constexpr, RAW: gl.constexpr,
    HAS_BIAS: gl.constexpr, BOUNDED: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """The rows that read; READ: the format that is read, of the copy or of an fp8 checkpoint itself."""
    gdc_launch_dependents()
    pid = gl.program_id(0)
    read_heads_alone(
        pid, q, k, v, g, beta, A_log, dt_bias, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices, out,
        words, scales, global_scale, num_slots, ring_len, buffer_len, pad_slot_id, scale, lower_bound, stride_q_token,
        stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head, stride_g_token, stride_g_head,
        stride_beta_token, stride_beta_head, stride_out_token, stride_out_head, stride_rk_slot, stride_rk_head,
        chunks_rv_slot, chunks_rv_head, chunks_ru_slot, chunks_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot,
        stride_rb_head, chunks_codes_slot, stride_scales_slot, stride_global_slot,
        HV, GROUP, K, V, HEADS, BLOCK_L, READ, SPLIT, KDA, RAW, HAS_BIAS, BOUNDED, NORM,
    )  # fmt: skip
    if pid == gl.num_programs(0) - 1:
        gdc_wait()
