"""GDN and KDA, a window of tokens of every row with a read copy, for NVIDIA GPUs: two launches that run side by side.

The flushing launch comes first; the reading one starts as soon as its programs have room, since the first lets it go
only after its own wait: everything before both is then done. Outputs always come from the copy, so the second half of
the reading launch has the rows that flush and waits for the flushing launch; what follows both is thereby late enough.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.ops.delta.gluon_read_window_flush import flush_windows
from replayssm.ops.delta.gluon_read_window_row import read_row


@gluon.jit(do_not_specialize=["num_slots", "ring_len", "buffer_len", "pad_slot_id", "batch"])
def delta_read_window_flush_kernel(
    q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices,
    query_start_loc, parents, out, codes, scales, global_scale, state_scales,
    num_slots, ring_len, buffer_len, pad_slot_id, batch, scale, lower_bound,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, stride_out_token, stride_out_head,
    chunks_state_slot, chunks_state_head, stride_rk_slot, stride_rk_head, stride_rv_slot, stride_rv_head,
    stride_ru_slot, stride_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head,
    chunks_codes_slot, stride_scales_slot, stride_global_slot, stride_state_scales_slot,
    HV: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    BLOCK_V: gl.constexpr, BLOCK_B: gl.constexpr, ROWS: gl.constexpr, READ: gl.constexpr, COPY: gl.constexpr,
    KDA: gl.constexpr, RAW: gl.constexpr, HAS_BIAS: gl.constexpr, BOUNDED: gl.constexpr, NORM: gl.constexpr,
    CHUNK_HEADS: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """The rows that flush: checkpoints and copies. READ: the format read: of the copy, or (not COPY) the checkpoint."""
    gdc_wait()
    gdc_launch_dependents()
    flush_windows(
        gl.program_id(0), gl.num_programs(0), q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g,
        ring_beta, cursors, slot_indices, query_start_loc, out, codes, scales, global_scale, state_scales, num_slots,
        ring_len, buffer_len, pad_slot_id, batch, scale, lower_bound, stride_q_token, stride_q_head, stride_k_token,
        stride_k_head, stride_v_token, stride_v_head, stride_g_token, stride_g_head, stride_beta_token,
        stride_beta_head, stride_out_token, stride_out_head, chunks_state_slot, chunks_state_head, stride_rk_slot,
        stride_rk_head, stride_rv_slot, stride_rv_head, stride_ru_slot, stride_ru_head, stride_rg_slot, stride_rg_head,
        stride_rb_slot, stride_rb_head, chunks_codes_slot, stride_scales_slot, stride_global_slot,
        stride_state_scales_slot,
        HV, GROUP, K, V, BLOCK_V, BLOCK_B, ROWS, READ, COPY, KDA, RAW, HAS_BIAS, BOUNDED, NORM, CHUNK_HEADS,
        PIECES,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_slots", "ring_len", "buffer_len", "pad_slot_id", "batch"])
def delta_read_window_kernel(
    q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices,
    query_start_loc, parents, out, codes, scales, global_scale, state_scales,
    num_slots, ring_len, buffer_len, pad_slot_id, batch, scale, lower_bound,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, stride_out_token, stride_out_head,
    chunks_state_slot, chunks_state_head, stride_rk_slot, stride_rk_head, stride_rv_slot, stride_rv_head,
    stride_ru_slot, stride_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head,
    chunks_codes_slot, stride_scales_slot, stride_global_slot, stride_state_scales_slot,
    HV: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, HEADS: gl.constexpr,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, READ: gl.constexpr, TREE: gl.constexpr, KDA: gl.constexpr,
    RAW: gl.constexpr, HAS_BIAS: gl.constexpr, BOUNDED: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """Outputs and appended rows: first of the rows that do not flush, then of those that do."""
    gdc_launch_dependents()
    PARTS: gl.constexpr = HV // HEADS
    row = gl.program_id(0) // PARTS
    late = row >= batch
    read_row(
        gl.where(late, row - batch, row), (gl.program_id(0) % PARTS * HEADS).to(gl.int64), late, q, k, v, g, beta,
        A_log, dt_bias, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices, query_start_loc, parents, out,
        codes, scales, global_scale, num_slots, ring_len, buffer_len, pad_slot_id, scale, lower_bound, stride_q_token,
        stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head, stride_g_token, stride_g_head,
        stride_beta_token, stride_beta_head, stride_out_token, stride_out_head, stride_rk_slot, stride_rk_head,
        stride_rv_slot, stride_rv_head, stride_ru_slot, stride_ru_head, stride_rg_slot, stride_rg_head,
        stride_rb_slot, stride_rb_head, chunks_codes_slot, stride_scales_slot, stride_global_slot, HEADS,
        GROUP, K, V, ROWS, TOKENS, READ, TREE, KDA, RAW, HAS_BIAS, BOUNDED, NORM,
    )  # fmt: skip
    # What follows must find both launches done, whether or not a row flushes.
    if gl.program_id(0) == gl.num_programs(0) - 1:
        gdc_wait()
