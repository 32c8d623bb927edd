"""One-token step for NVIDIA GPUs: a program streams the state tiles of one row and k-head through shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .gluon_early import give_hints
from .gluon_row import step_row
from .gluon_schedule import place, work_of_program


@gluon.jit(do_not_specialize=["num_slots", "ring_len", "buffer_len", "pad_slot_id"])
def delta_step_kernel(
    q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices, out,
    num_slots, ring_len, buffer_len, pad_slot_id, scale, lower_bound,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, stride_out_token, stride_out_head,
    chunks_state_slot, chunks_state_head, stride_rk_slot, stride_rk_head, chunks_rv_slot, chunks_rv_head,
    chunks_ru_slot, chunks_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head,
    HV: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr,
    NUM_TILES: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr, SETTLE: gl.constexpr,
    INTERLEAVE: gl.constexpr, HINT: gl.constexpr, HINT_ROWS: gl.constexpr, HINT_PROGRAMS: gl.constexpr,
    FLUSHERS: gl.constexpr, LATE: gl.constexpr, TENSOR_CORES: gl.constexpr, BLOCK_L: gl.constexpr, KDA: gl.constexpr,
    RAW: gl.constexpr, HAS_BIAS: gl.constexpr, BOUNDED: gl.constexpr, NORM: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    ACT_CHUNK: gl.constexpr = 128 // q.dtype.element_ty.primitive_bitwidth
    PER_HEAD: gl.constexpr = V // BLOCK_V
    CHUNKS: gl.constexpr = GROUP * PER_HEAD // NUM_TILES
    NUM_HEADS: gl.constexpr = (NUM_TILES + PER_HEAD - 1) // PER_HEAD
    A_ROW: gl.constexpr = CHUNKS * (HV // GROUP)
    num_rows = gl.num_programs(0) // A_ROW - FLUSHERS * NUM_TILES
    if HINT > 0:
        # For the reader of the same place in the grid; this program may do nothing but flush.
        row, part = place(num_rows, A_ROW, slot_indices, cursors, num_slots, pad_slot_id, buffer_len, INTERLEAVE, 0)
        EVERY: gl.constexpr = FLUSHERS == 0 and HINT_PROGRAMS == 0
        places = num_rows * A_ROW if HINT_PROGRAMS == 0 else gl.minimum(num_rows * A_ROW, HINT_PROGRAMS)
        if True if EVERY else gl.program_id(0) < places:
            give_hints(state, ring_k, ring_u, cursors, slot_indices + row, num_slots, ring_len,
                       part % CHUNKS * NUM_TILES, part // CHUNKS, chunks_state_slot, chunks_state_head, stride_rk_slot,
                       stride_rk_head, chunks_ru_slot * ACT_CHUNK, chunks_ru_head * ACT_CHUNK, GROUP, K, V, BLOCK_V,
                       NUM_TILES, PER_HEAD, NUM_HEADS, HINT, HINT_ROWS)
    gdc_wait()
    gdc_launch_dependents()
    row, part, begin, end, only_flushes = work_of_program(
        num_rows, A_ROW, slot_indices, cursors, num_slots, pad_slot_id, buffer_len, NUM_TILES, INTERLEAVE, SETTLE,
        FLUSHERS)
    if FLUSHERS > 0:
        if row >= num_rows:
            return
    step_row(
        row, part, begin, end, only_flushes, num_rows,
        q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices, out,
        num_slots, ring_len, buffer_len, pad_slot_id, scale, lower_bound,
        stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
        stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, stride_out_token, stride_out_head,
        chunks_state_slot, chunks_state_head, stride_rk_slot, stride_rk_head, chunks_rv_slot, chunks_rv_head,
        chunks_ru_slot, chunks_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head,
        GROUP, K, V, BLOCK_V, NUM_TILES, STAGES, EARLY, FLUSHERS, LATE, TENSOR_CORES, BLOCK_L, KDA, RAW, HAS_BIAS,
        BOUNDED, NORM, CHUNK)
