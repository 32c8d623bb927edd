"""One-token step with a read copy for NVIDIA GPUs: most programs read, a crew of others flushes, in one launch.

A reading program multiplies the codes of a few v-heads by k and q on the tensor cores, straight from the registers
that they were loaded to. Reading leaves few registers and little shared memory in use; the crew's programs share the
rows that flush among them by (row, v-head).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.ops.delta.gluon_read_crew import flush_rows
from replayssm.ops.delta.gluon_read_part import read_heads
from replayssm.ops.gluon_formats import scales_a_row


@gluon.jit(do_not_specialize=["num_slots", "ring_len", "buffer_len", "pad_slot_id", "batch"])
def delta_read_step_kernel(
    q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices, out,
    words, codes, scales, global_scale, state_scales,
    num_slots, ring_len, buffer_len, pad_slot_id, batch, scale, lower_bound,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, stride_out_token, stride_out_head,
    chunks_state_slot, chunks_state_head, stride_rk_slot, stride_rk_head, chunks_rv_slot, chunks_rv_head,
    chunks_ru_slot, chunks_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head,
    chunks_codes_slot, stride_scales_slot, stride_global_slot, stride_state_scales_slot,
    HV: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, HEADS: gl.constexpr,
    BLOCK_V: gl.constexpr, CREW: gl.constexpr, EVERY: gl.constexpr, BLOCK_B: gl.constexpr, BLOCK_L: gl.constexpr,
    READ: gl.constexpr, COPY: gl.constexpr, SPLIT: gl.constexpr, KDA: gl.constexpr, RAW: gl.constexpr,
    HAS_BIAS: gl.constexpr, BOUNDED: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """READ: the format that is read: of the copy, or (not COPY) of an fp8 checkpoint itself."""
    ACT: gl.constexpr = ring_u.dtype.element_ty
    ACT_CHUNK: gl.constexpr = 128 // ACT.primitive_bitwidth
    SCALES: gl.constexpr = scales_a_row(READ, K)

    gdc_wait()
    gdc_launch_dependents()
    pid = gl.program_id(0)
    of_crew = (pid % EVERY == 0) & (pid < CREW * EVERY)
    if of_crew:
        flush_rows(
            pid // EVERY, q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors,
            slot_indices, out, codes, scales, global_scale, state_scales, num_slots, ring_len, buffer_len, pad_slot_id,
            batch, scale, lower_bound, stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token,
            stride_v_head, stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, stride_out_token,
            stride_out_head, chunks_state_slot, chunks_state_head, stride_rk_slot, stride_rk_head,
            chunks_rv_slot * ACT_CHUNK, chunks_rv_head * ACT_CHUNK, chunks_ru_slot * ACT_CHUNK,
            chunks_ru_head * ACT_CHUNK, stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head,
            chunks_codes_slot, stride_scales_slot, stride_global_slot, stride_state_scales_slot,
            HV, GROUP, K, V, BLOCK_V, CREW, BLOCK_B, BLOCK_L, READ if COPY else "none", KDA, RAW, HAS_BIAS, BOUNDED,
            NORM, SCALES, 0,
        )  # fmt: skip
        return
    pid -= gl.minimum((pid + EVERY - 1) // EVERY, CREW)
    read_heads(
        pid, q, k, v, g, beta, A_log, dt_bias, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices, out,
        words, scales, global_scale, num_slots, ring_len, buffer_len, pad_slot_id, scale, lower_bound, stride_q_token,
        stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head, stride_g_token, stride_g_head,
        stride_beta_token, stride_beta_head, stride_out_token, stride_out_head, stride_rk_slot, stride_rk_head,
        chunks_rv_slot, chunks_rv_head, chunks_ru_slot, chunks_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot,
        stride_rb_head, chunks_codes_slot, stride_scales_slot, stride_global_slot,
        HV, GROUP, K, V, HEADS, BLOCK_L, READ, SPLIT, KDA, RAW, HAS_BIAS, BOUNDED, NORM,
    )  # fmt: skip
