"""The programs of a Mamba-2 read-copy window step that flush: renew heads' checkpoints and copies, then read those."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_read_window_rows import rank_of_rows
from replayssm.ops.mamba2.gluon_names import barrier
from replayssm.ops.mamba2.gluon_read_head import flush_head
from replayssm.ops.mamba2.gluon_read_window_row import read_row


@gluon.jit
def flush_windows(
    member, crew, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, state_ptr, ring_x_ptr, ring_B_ptr,
    ring_dt_ptr, cursors_ptr, slot_indices_ptr, query_start_loc_ptr, parents_ptr, out_ptr, state_scales_ptr, codes_ptr,
    scales_ptr, global_ptr, num_slots, buffer_len, pad_slot_id, batch,
    x_token, x_head, dt_token, dt_head, B_token, B_group, C_token, C_group, z_token, z_head, out_token, out_head,
    state_slot, state_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head,
    state_scales_slot, codes_slot, scales_slot, global_slot,
    H: gl.constexpr, G: gl.constexpr, P: gl.constexpr, N: gl.constexpr, R: gl.constexpr, TILE: gl.constexpr,
    FLUSH_HEADS: gl.constexpr, BLOCK_B: gl.constexpr, ROWS: gl.constexpr, WINDOW: gl.constexpr,
    READ: gl.constexpr, CHECKPOINT: gl.constexpr, REPLAY: gl.constexpr, TREE: gl.constexpr,
    HAS_D: gl.constexpr, HAS_Z: gl.constexpr, HAS_BIAS: gl.constexpr, SOFTPLUS: gl.constexpr,
):  # fmt: skip
    """Flush every `crew`-th of the (row, FLUSH_HEADS heads) that flush in this step, from number `member` on."""
    WARPS: gl.constexpr = gl.num_warps()
    LR: gl.constexpr = gl.BlockedLayout([max(1, BLOCK_B // (32 * WARPS))], [32], [WARPS], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rank, total = rank_of_rows(
        cursors_ptr, slot_indices_ptr, query_start_loc_ptr, num_slots, buffer_len, pad_slot_id, batch, BLOCK_B, LR
    )
    rank_at = gl.allocate_shared_memory(gl.int32, [BLOCK_B], FLAT, rank)
    PARTS: gl.constexpr = H // FLUSH_HEADS
    for item in range(member, total * PARTS, crew):
        row = gl.arange(0, BLOCK_B, layout=LR)
        row = gl.sum(gl.where(rank_at.load(LR) == item // PARTS, row, 0), 0).to(gl.int64)
        h = (item % PARTS * FLUSH_HEADS).to(gl.int64)
        for i in range(FLUSH_HEADS):
            # What the last head's tables were read for is over.
            barrier()
            flush_head(
                row, h + i, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, state_ptr, ring_x_ptr,
                ring_B_ptr, ring_dt_ptr, cursors_ptr, slot_indices_ptr, out_ptr, state_scales_ptr, codes_ptr,
                scales_ptr, global_ptr, x_token, x_head, dt_token, B_token, B_group, C_token, C_group, z_token, z_head,
                out_token, out_head, state_slot, state_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group,
                ring_dt_slot, ring_dt_head, state_scales_slot, codes_slot, scales_slot, global_slot,
                H, G, P, N, R, ROWS, READ, CHECKPOINT, REPLAY, HAS_D, HAS_Z, HAS_BIAS, SOFTPLUS, False,
            )  # fmt: skip
        # The copy was written by other threads of this program.
        barrier()
        read_row(
            row, h, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr,
            cursors_ptr, slot_indices_ptr, query_start_loc_ptr, parents_ptr, out_ptr, codes_ptr, scales_ptr, global_ptr,
            num_slots, buffer_len, pad_slot_id, x_token, x_head, dt_token, dt_head, B_token, B_group, C_token, C_group,
            z_token, z_head, out_token, out_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot,
            ring_dt_head, codes_slot, scales_slot, global_slot,
            True, H, G, P, N, R, FLUSH_HEADS, TILE, ROWS, WINDOW, READ, TREE, HAS_D, HAS_Z, HAS_BIAS, SOFTPLUS,
        )  # fmt: skip
