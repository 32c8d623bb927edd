"""Mamba-2, a window of tokens of every row in one launch, with a read copy, for NVIDIA GPUs.

Most programs read and a crew of others flushes. Outputs always come from the copy: where a row flushes, the crew's
program that renewed a head's copy reads it as a reading program would, without committed rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.ops.mamba2.gluon_read_window_flush import flush_windows
from replayssm.ops.mamba2.gluon_read_window_row import read_row


@gluon.jit(do_not_specialize=["batch", "crew", "every", "num_slots", "buffer_len", "pad_slot_id"])
def mamba2_read_window_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, state_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr,
    cursors_ptr, slot_indices_ptr, query_start_loc_ptr, parents_ptr, out_ptr, state_scales_ptr, codes_ptr, scales_ptr,
    global_ptr,
    num_slots, buffer_len, pad_slot_id, batch, crew, every,
    x_token, x_head, dt_token, dt_head, B_token, B_group, C_token, C_group, z_token, z_head, out_token, out_head,
    state_slot, state_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head,
    state_scales_slot, codes_slot, scales_slot, global_slot,
    H: gl.constexpr, G: gl.constexpr, P: gl.constexpr, N: gl.constexpr, R: gl.constexpr, HEADS: gl.constexpr,
    TILE: gl.constexpr, FLUSH_HEADS: gl.constexpr, BLOCK_B: gl.constexpr,
    ROWS: gl.constexpr, WINDOW: gl.constexpr, READ: gl.constexpr, CHECKPOINT: gl.constexpr, REPLAY: gl.constexpr,
    TREE: gl.constexpr,
    HAS_D: gl.constexpr, HAS_Z: gl.constexpr, HAS_BIAS: gl.constexpr, SOFTPLUS: gl.constexpr,
):  # fmt: skip
    """A reading program has HEADS heads of one row; READ "none": the copy is the fp8 checkpoint itself."""
    gdc_wait()
    gdc_launch_dependents()
    item = gl.program_id(0)
    if (item % every == 0) & (item < crew * every):
        flush_windows(
            item // every, crew, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, state_ptr,
            ring_x_ptr, ring_B_ptr, ring_dt_ptr, cursors_ptr, slot_indices_ptr, query_start_loc_ptr, parents_ptr,
            out_ptr, state_scales_ptr, codes_ptr, scales_ptr, global_ptr, num_slots, buffer_len, pad_slot_id, batch,
            x_token, x_head, dt_token, dt_head, B_token, B_group, C_token, C_group, z_token, z_head, out_token,
            out_head, state_slot, state_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot,
            ring_dt_head, state_scales_slot, codes_slot, scales_slot, global_slot, H, G, P, N, R, TILE, FLUSH_HEADS,
            BLOCK_B, ROWS, WINDOW, READ, CHECKPOINT, REPLAY, TREE, HAS_D, HAS_Z, HAS_BIAS, SOFTPLUS,
        )  # fmt: skip
        return
    item -= gl.minimum((item + every - 1) // every, crew)
    read_row(
        item // (H // HEADS), (item % (H // HEADS) * HEADS).to(gl.int64), x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr,
        z_ptr, dt_bias_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr, cursors_ptr, slot_indices_ptr, query_start_loc_ptr,
        parents_ptr, out_ptr, codes_ptr, scales_ptr, global_ptr, num_slots, buffer_len, pad_slot_id, x_token,
        x_head, dt_token, dt_head, B_token, B_group, C_token, C_group, z_token, z_head, out_token, out_head,
        ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head, codes_slot, scales_slot,
        global_slot, False, H, G, P, N, R, HEADS, TILE, ROWS, WINDOW, READ, TREE, HAS_D, HAS_Z, HAS_BIAS, SOFTPLUS,
    )  # fmt: skip
