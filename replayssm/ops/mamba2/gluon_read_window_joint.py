"""The programs of a Mamba-2 read-copy window step of a small batch that flush a head and read its new copy."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from replayssm.ops.gluon_formats import scales_a_row
from replayssm.ops.gluon_read_window_rows import rank_of_rows, ranked_row
from replayssm.ops.mamba2.gluon_names import barrier
from replayssm.ops.mamba2.gluon_read_state import row_bytes
from replayssm.ops.mamba2.gluon_read_window_renew import allocate_head, fetch_head, measure_head, renew_copy
from replayssm.ops.mamba2.gluon_read_window_replay import allocate_x, load_rows, replay_by_chunks, replay_serially
from replayssm.ops.mamba2.gluon_read_window_row import read_row


@gluon.jit
def flush_and_read(
    member, crew, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, state_ptr, ring_x_ptr, ring_B_ptr,
    ring_dt_ptr, cursors_ptr, slot_indices_ptr, query_start_loc_ptr, parents_ptr, out_ptr, codes_ptr, scales_ptr,
    global_ptr, num_slots, buffer_len, pad_slot_id, batch, x_token, x_head, dt_token, dt_head, B_token, B_group,
    C_token, C_group, z_token, z_head, out_token, out_head, state_slot, state_head, ring_x_slot, ring_x_head,
    ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head, codes_slot, scales_slot, global_slot,
    H: gl.constexpr, G: gl.constexpr, P: gl.constexpr, N: gl.constexpr, R: gl.constexpr, TILE: gl.constexpr,
    BLOCK_B: gl.constexpr, ROWS: gl.constexpr, WINDOW: gl.constexpr, READ: gl.constexpr, REPLAY: gl.constexpr,
    TREE: gl.constexpr, HAS_D: gl.constexpr, HAS_Z: gl.constexpr, HAS_BIAS: gl.constexpr, SOFTPLUS: gl.constexpr,
):  # fmt: skip
    """Take every `crew`-th of the heads that flush in this step, from number `member` on."""
    WARPS: gl.constexpr = gl.num_warps()
    LR: gl.constexpr = gl.BlockedLayout([max(1, BLOCK_B // (32 * WARPS))], [32], [WARPS], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    UNIT: gl.constexpr = 128 // state_ptr.dtype.element_ty.primitive_bitwidth
    rank, total = rank_of_rows(
        cursors_ptr, slot_indices_ptr, query_start_loc_ptr, num_slots, buffer_len, pad_slot_id, batch, BLOCK_B, LR
    )
    rank_at = gl.allocate_shared_memory(gl.int32, [BLOCK_B], FLAT, rank)
    for item in tl.range(member, total * H, crew, disable_licm=True):
        # What the last head's tables were read for is over.
        barrier()
        row = ranked_row(rank_at, item // H, BLOCK_B, LR)
        base = gl.load(slot_indices_ptr + row).to(gl.int64)
        h = (item % H).to(gl.int64)
        # Heads start at multiples of 16 bytes.
        state = state_ptr + (base * (state_slot // UNIT) + h * (state_head // UNIT)) * UNIT
        kept = allocate_head(state_ptr.dtype.element_ty, P, N)
        fetch_head(kept, state)
        start = gl.load(cursors_ptr + base * 4)
        committed = gl.load(cursors_ptr + base * 4 + 1)
        A = gl.load(A_ptr + h)
        ring_x = ring_x_ptr + base * ring_x_slot + h * ring_x_head
        ring_B = ring_B_ptr + base * ring_B_slot + h // (H // G) * ring_B_group
        ring_dt = ring_dt_ptr + base * ring_dt_slot + h * ring_dt_head
        x, dt = load_rows(0, start, committed, ring_x, ring_dt, P, R, ROWS)
        async_copy.wait_group(0)
        barrier()
        if REPLAY == "chunk":
            replay_by_chunks(kept, start, committed, A, ring_x, ring_B, ring_dt, P, N, R)
        else:
            staged_B = gl.allocate_shared_memory(gl.float32, [ROWS, N], FLAT)
            staged_a = gl.allocate_shared_memory(gl.float32, [ROWS, 1], FLAT)
            replay_serially(
                kept, staged_B, allocate_x(P, ROWS), staged_a, x, dt, A, start, committed, True, ring_x, ring_B,
                ring_dt, P, N, R,
            )  # fmt: skip
        largest = gl.to_tensor(0)
        if READ == "nvfp4":
            largest = measure_head(kept, N)
        barrier()
        codes = codes_ptr + base * codes_slot + h * (P * row_bytes(READ, N))
        scales = scales_ptr + base * scales_slot + h * (P * scales_a_row(READ, N))
        renew_copy(kept, largest, state, state, False, codes, scales, global_ptr + base * global_slot + h, N, READ)
        # The copy was written by other threads of this program.
        barrier()
        read_row(
            row, h, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr,
            cursors_ptr, slot_indices_ptr, query_start_loc_ptr, parents_ptr, out_ptr, codes_ptr, scales_ptr, global_ptr,
            num_slots, buffer_len, pad_slot_id, x_token, x_head, dt_token, dt_head, B_token, B_group, C_token, C_group,
            z_token, z_head, out_token, out_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot,
            ring_dt_head, codes_slot, scales_slot, global_slot, "flushed", H, G, P, N, R, 1, TILE, ROWS, WINDOW, READ,
            TREE, HAS_D, HAS_Z, HAS_BIAS, SOFTPLUS,
        )  # fmt: skip
