"""Mamba-2, a window of tokens of every row with a read copy, for NVIDIA GPUs: two launches that run side by side.

The flushing launch comes first; the reading one starts as soon as its programs have room, since the first lets it go
only after its own wait: everything before both is then done. Outputs always come from the copy, so the last programs of
the reading launch have the rows that flush and wait for the flushing launch; what follows both is thereby late enough.
In small batches one launch does both: a second one would cost more than it hides.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.ops.mamba2.gluon_names import barrier
from replayssm.ops.mamba2.gluon_read_window_flush import flush_windows, stream_windows, streams
from replayssm.ops.mamba2.gluon_read_window_joint import flush_and_read
from replayssm.ops.mamba2.gluon_read_window_row import read_row


@gluon.jit(do_not_specialize=["batch", "num_slots", "buffer_len", "pad_slot_id"])
def mamba2_read_window_flush_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, state_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr,
    cursors_ptr, slot_indices_ptr, query_start_loc_ptr, parents_ptr, out_ptr, state_scales_ptr, codes_ptr, scales_ptr,
    global_ptr, num_slots, buffer_len, pad_slot_id, batch,
    x_token, x_head, dt_token, dt_head, B_token, B_group, C_token, C_group, z_token, z_head, out_token, out_head,
    state_slot, state_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head,
    state_scales_slot, codes_slot, scales_slot, global_slot,
    H: gl.constexpr, G: gl.constexpr, P: gl.constexpr, N: gl.constexpr, R: gl.constexpr, FLUSH_HEADS: gl.constexpr,
    BLOCK_B: gl.constexpr, ROWS: gl.constexpr, READ: gl.constexpr, CHECKPOINT: gl.constexpr, REPLAY: gl.constexpr,
):  # fmt: skip
    """The rows that flush: checkpoints and copies."""
    gdc_wait()
    gdc_launch_dependents()
    if streams(CHECKPOINT, REPLAY, P, N, gl.num_warps()):
        stream_windows(
            gl.program_id(0), gl.num_programs(0), A_ptr, state_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr, cursors_ptr,
            slot_indices_ptr, query_start_loc_ptr, codes_ptr, scales_ptr, global_ptr, num_slots, buffer_len,
            pad_slot_id, batch, state_slot, state_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group,
            ring_dt_slot, ring_dt_head, codes_slot, scales_slot, global_slot, H, G, P, N, R, FLUSH_HEADS, BLOCK_B, ROWS,
            READ, REPLAY,
        )  # fmt: skip
    else:
        flush_windows(
            x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, state_ptr, ring_x_ptr, ring_B_ptr,
            ring_dt_ptr, cursors_ptr, slot_indices_ptr, query_start_loc_ptr, out_ptr, state_scales_ptr, codes_ptr,
            scales_ptr, global_ptr, num_slots, buffer_len, pad_slot_id, batch, x_token, x_head, dt_token, B_token,
            B_group, C_token, C_group, z_token, z_head, out_token, out_head, state_slot, state_head, ring_x_slot,
            ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head, state_scales_slot, codes_slot,
            scales_slot, global_slot, H, G, P, N, R, FLUSH_HEADS, BLOCK_B, ROWS, READ, CHECKPOINT, REPLAY,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["batch", "num_slots", "buffer_len", "pad_slot_id"])
def mamba2_read_window_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, state_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr,
    cursors_ptr, slot_indices_ptr, query_start_loc_ptr, parents_ptr, out_ptr, state_scales_ptr, codes_ptr, scales_ptr,
    global_ptr, num_slots, buffer_len, pad_slot_id, batch,
    x_token, x_head, dt_token, dt_head, B_token, B_group, C_token, C_group, z_token, z_head, out_token, out_head,
    state_slot, state_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head,
    state_scales_slot, codes_slot, scales_slot, global_slot,
    H: gl.constexpr, G: gl.constexpr, P: gl.constexpr, N: gl.constexpr, R: gl.constexpr, HEADS: gl.constexpr,
    TILE: gl.constexpr, TURNS: gl.constexpr, ROWS: gl.constexpr, WINDOW: gl.constexpr, READ: gl.constexpr,
    TREE: gl.constexpr, HAS_D: gl.constexpr, HAS_Z: gl.constexpr, HAS_BIAS: gl.constexpr, SOFTPLUS: gl.constexpr,
):  # fmt: skip
    """Outputs and appended rows, HEADS heads of one row a program: first of the rows that do not flush.

    Then of those that do, TURNS times as many heads. READ "none": the copy is the fp8 checkpoint itself.
    """
    gdc_launch_dependents()
    PARTS: gl.constexpr = H // HEADS
    item = gl.program_id(0)
    if item < batch * PARTS:
        first_h = (item % PARTS * HEADS).to(gl.int64)
        read_row(
            item // PARTS, first_h, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, ring_x_ptr,
            ring_B_ptr, ring_dt_ptr, cursors_ptr, slot_indices_ptr, query_start_loc_ptr, parents_ptr, out_ptr,
            codes_ptr, scales_ptr, global_ptr, num_slots, buffer_len, pad_slot_id, x_token, x_head, dt_token, dt_head,
            B_token, B_group, C_token, C_group, z_token, z_head, out_token, out_head, ring_x_slot, ring_x_head,
            ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head, codes_slot, scales_slot, global_slot, "early", H, G,
            P, N, R, HEADS, TILE, ROWS, WINDOW, READ, TREE, HAS_D, HAS_Z, HAS_BIAS, SOFTPLUS,
        )  # fmt: skip
    else:
        item -= batch * PARTS
        row = item // (PARTS // TURNS)
        for turn in tl.range(TURNS, disable_licm=True):
            # What the last heads' tables were read for is over.
            barrier()
            late_h = ((item % (PARTS // TURNS) * TURNS + turn) * HEADS).to(gl.int64)
            read_row(
                row, late_h, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, ring_x_ptr, ring_B_ptr,
                ring_dt_ptr, cursors_ptr, slot_indices_ptr, query_start_loc_ptr, parents_ptr, out_ptr, codes_ptr,
                scales_ptr, global_ptr, num_slots, buffer_len, pad_slot_id, x_token, x_head, dt_token, dt_head, B_token,
                B_group, C_token, C_group, z_token, z_head, out_token, out_head, ring_x_slot, ring_x_head, ring_B_slot,
                ring_B_group, ring_dt_slot, ring_dt_head, codes_slot, scales_slot, global_slot, "late", H, G, P, N, R,
                HEADS, TILE, ROWS, WINDOW, READ, TREE, HAS_D, HAS_Z, HAS_BIAS, SOFTPLUS,
            )  # fmt: skip
    # What follows must find both launches done, whether or not a row flushes.
    if gl.program_id(0) == gl.num_programs(0) - 1:
        gdc_wait()


@gluon.jit(do_not_specialize=["batch", "num_slots", "buffer_len", "pad_slot_id"])
def mamba2_read_window_joint_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, state_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr,
    cursors_ptr, slot_indices_ptr, query_start_loc_ptr, parents_ptr, out_ptr, state_scales_ptr, codes_ptr, scales_ptr,
    global_ptr, num_slots, buffer_len, pad_slot_id, batch,
    x_token, x_head, dt_token, dt_head, B_token, B_group, C_token, C_group, z_token, z_head, out_token, out_head,
    state_slot, state_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head,
    state_scales_slot, codes_slot, scales_slot, global_slot,
    H: gl.constexpr, G: gl.constexpr, P: gl.constexpr, N: gl.constexpr, R: gl.constexpr, HEADS: gl.constexpr,
    TILE: gl.constexpr, BLOCK_B: gl.constexpr, ROWS: gl.constexpr, WINDOW: gl.constexpr, READ: gl.constexpr,
    REPLAY: gl.constexpr, TREE: gl.constexpr, HAS_D: gl.constexpr, HAS_Z: gl.constexpr, HAS_BIAS: gl.constexpr,
    SOFTPLUS: gl.constexpr,
):  # fmt: skip
    """Both launches in one, for small batches: the first programs flush heads and read them, the others read."""
    gdc_wait()
    gdc_launch_dependents()
    PARTS: gl.constexpr = H // HEADS
    crew = gl.num_programs(0) - batch * PARTS
    item = gl.program_id(0) - crew
    if item < 0:
        flush_and_read(
            gl.program_id(0), crew, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, state_ptr,
            ring_x_ptr, ring_B_ptr, ring_dt_ptr, cursors_ptr, slot_indices_ptr, query_start_loc_ptr, parents_ptr,
            out_ptr, codes_ptr, scales_ptr, global_ptr, num_slots, buffer_len, pad_slot_id, batch, x_token, x_head,
            dt_token, dt_head, B_token, B_group, C_token, C_group, z_token, z_head, out_token, out_head, state_slot,
            state_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head, codes_slot,
            scales_slot, global_slot, H, G, P, N, R, TILE, BLOCK_B, ROWS, WINDOW, READ, REPLAY, TREE, HAS_D, HAS_Z,
            HAS_BIAS, SOFTPLUS,
        )  # fmt: skip
    else:
        first_h = (item % PARTS * HEADS).to(gl.int64)
        read_row(
            item // PARTS, first_h, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, ring_x_ptr,
            ring_B_ptr, ring_dt_ptr, cursors_ptr, slot_indices_ptr, query_start_loc_ptr, parents_ptr, out_ptr,
            codes_ptr, scales_ptr, global_ptr, num_slots, buffer_len, pad_slot_id, x_token, x_head, dt_token, dt_head,
            B_token, B_group, C_token, C_group, z_token, z_head, out_token, out_head, ring_x_slot, ring_x_head,
            ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head, codes_slot, scales_slot, global_slot, "early", H, G,
            P, N, R, HEADS, TILE, ROWS, WINDOW, READ, TREE, HAS_D, HAS_Z, HAS_BIAS, SOFTPLUS,
        )  # fmt: skip
