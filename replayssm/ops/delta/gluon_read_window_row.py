"""The window of one row of the batch from the read copy: at once, or after the flush that runs beside this launch."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_read_window_part import read_window
from replayssm.ops.gluon_window_parts import zero_rows


@gluon.jit
def read_row(
    row, head, late, q, k, v, g, beta, A_log, dt_bias, ring_k, ring_v, ring_u, ring_g,
    ring_beta, cursors, slot_indices, query_start_loc, parents, out, codes, scales, global_scale, num_slots, ring_len,
    buffer_len, pad_slot_id, scale, lower_bound, stride_q_token, stride_q_head, stride_k_token, stride_k_head,
    stride_v_token, stride_v_head, stride_g_token, stride_g_head, stride_beta_token, stride_beta_head,
    stride_out_token, stride_out_head, stride_rk_slot, stride_rk_head, stride_rv_slot, stride_rv_head, stride_ru_slot,
    stride_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head, chunks_codes_slot,
    stride_scales_slot, stride_global_slot,
    HEADS: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, READ: gl.constexpr, TREE: gl.constexpr, KDA: gl.constexpr,
    RAW: gl.constexpr, HAS_BIAS: gl.constexpr, BOUNDED: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """`read_window` of a row of the batch that flushes (late: once that is done), or of one that does not."""
    slot = gl.load(slot_indices + row).to(gl.int64)
    first = gl.load(query_start_loc + row)
    length = gl.load(query_start_loc + row + 1) - first
    first = first.to(gl.int64)
    if (slot == pad_slot_id) | (slot < 0) | (slot >= num_slots):
        if not late:
            out += first * stride_out_token + head * stride_out_head
            zero_rows(out, length, 0, stride_out_token, stride_out_head, V, HEADS, 1)
    else:
        start = gl.load(cursors + slot * 4)
        committed = gl.load(cursors + slot * 4 + 1)
        limit = gl.load(cursors + slot * 4 + 2)
        flushes = (committed > 0) & (committed + length > gl.minimum(limit, buffer_len))
        if (flushes == late) & (length > 0):
            read_window(
                slot, head, late, first, length, start, committed, gl.where(late, 0, committed), q, k, v, g, beta,
                A_log, dt_bias, ring_k, ring_v, ring_u, ring_g, ring_beta, parents, out, codes, scales, global_scale,
                ring_len, scale, lower_bound, stride_q_token, stride_q_head, stride_k_token, stride_k_head,
                stride_v_token, stride_v_head, stride_g_token, stride_g_head, stride_beta_token, stride_beta_head,
                stride_out_token, stride_out_head, stride_rk_slot, stride_rk_head, stride_rv_slot, stride_rv_head,
                stride_ru_slot, stride_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head,
                chunks_codes_slot, stride_scales_slot, stride_global_slot,
                HEADS, GROUP, K, V, ROWS, TOKENS, READ, TREE, KDA, RAW, HAS_BIAS, BOUNDED, NORM,
            )  # fmt: skip
