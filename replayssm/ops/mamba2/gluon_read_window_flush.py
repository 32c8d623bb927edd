"""The programs of a Mamba-2 read-copy window step that flush: renew heads' checkpoints and copies."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from replayssm.ops.gluon_formats import scales_a_row
from replayssm.ops.gluon_read_window_rows import rank_of_rows, ranked_row
from replayssm.ops.mamba2.gluon_names import barrier
from replayssm.ops.mamba2.gluon_read_head import flush_head
from replayssm.ops.mamba2.gluon_read_state import row_bytes
from replayssm.ops.mamba2.gluon_read_window_renew import allocate_head, fetch_head, measure_head, renew_copy
from replayssm.ops.mamba2.gluon_read_window_replay import allocate_x, load_rows, replay_by_chunks, replay_serially


@gluon.constexpr_function
def streams(checkpoint, replay, head_dim, d_state, warps):
    """Whether `stream_windows` can serve a layer; the chunk form has bands of 16 V-rows."""
    height = 512 * warps // d_state
    return checkpoint != "fp8" and head_dim % height == 0 and (replay == "serial" or height == 16)


@gluon.jit
def stream_windows(
    member, crew, A_ptr, state_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr, cursors_ptr, slot_indices_ptr,
    query_start_loc_ptr, codes_ptr, scales_ptr, global_ptr, num_slots, buffer_len, pad_slot_id, batch, state_slot,
    state_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head, codes_slot,
    scales_slot, global_slot,
    H: gl.constexpr, G: gl.constexpr, P: gl.constexpr, N: gl.constexpr, R: gl.constexpr, FLUSH_HEADS: gl.constexpr,
    BLOCK_B: gl.constexpr, ROWS: gl.constexpr, READ: gl.constexpr, REPLAY: gl.constexpr,
):  # fmt: skip
    """`flush_windows` for checkpoints that are not fp8: the next head is on its way while one is worked on."""
    WARPS: gl.constexpr = gl.num_warps()
    LR: gl.constexpr = gl.BlockedLayout([max(1, BLOCK_B // (32 * WARPS))], [32], [WARPS], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PARTS: gl.constexpr = H // FLUSH_HEADS
    # Heads start at multiples of 16 bytes.
    UNIT: gl.constexpr = 128 // state_ptr.dtype.element_ty.primitive_bitwidth
    slot_units, head_units = state_slot // UNIT, state_head // UNIT
    rank, total = rank_of_rows(
        cursors_ptr, slot_indices_ptr, query_start_loc_ptr, num_slots, buffer_len, pad_slot_id, batch, BLOCK_B, LR
    )
    end = total * PARTS
    if member < end:
        rank_at = gl.allocate_shared_memory(gl.int32, [BLOCK_B], FLAT, rank)
        kept = allocate_head(state_ptr.dtype.element_ty, P, N)
        row = ranked_row(rank_at, member // PARTS, BLOCK_B, LR)
        base = gl.load(slot_indices_ptr + row).to(gl.int64)
        h = (member % PARTS * FLUSH_HEADS).to(gl.int64)
        state = state_ptr + (base * slot_units + h * head_units) * UNIT
        fetch_head(kept, state)
        start = gl.load(cursors_ptr + base * 4)
        committed = gl.load(cursors_ptr + base * 4 + 1)
        ring_x = ring_x_ptr + base * ring_x_slot + h * ring_x_head
        ring_dt = ring_dt_ptr + base * ring_dt_slot + h * ring_dt_head
        x, dt = load_rows(0, start, committed, ring_x, ring_dt, P, R, ROWS)
        for item in tl.range(member, end, crew, disable_licm=True):
            first_h = (item % PARTS * FLUSH_HEADS).to(gl.int64)
            this_start, this_committed = start, committed
            ring_B = ring_B_ptr + base * ring_B_slot + first_h // (H // G) * ring_B_group
            codes = codes_ptr + base * codes_slot + first_h * (P * row_bytes(READ, N))
            scales = scales_ptr + base * scales_slot + first_h * (P * scales_a_row(READ, N))
            head_scale = global_ptr + base * global_slot + first_h
            staged_B = gl.allocate_shared_memory(gl.float32, [ROWS, N], FLAT)
            staged_x = allocate_x(P, ROWS)
            staged_a = gl.allocate_shared_memory(gl.float32, [ROWS, 1], FLAT)
            if item + crew < end:
                row = ranked_row(rank_at, (item + crew) // PARTS, BLOCK_B, LR)
                base = gl.load(slot_indices_ptr + row).to(gl.int64)
                start = gl.load(cursors_ptr + base * 4)
                committed = gl.load(cursors_ptr + base * 4 + 1)
            for i in tl.range(FLUSH_HEADS, disable_licm=True):
                A = gl.load(A_ptr + first_h + i)
                async_copy.wait_group(0)
                barrier()
                if REPLAY == "chunk":
                    replay_by_chunks(kept, this_start, this_committed, A, ring_x, ring_B, ring_dt, P, N, R)
                else:
                    replay_serially(
                        kept, staged_B, staged_x, staged_a, x, dt, A, this_start, this_committed, i == 0,
                        ring_x, ring_B, ring_dt, P, N, R,
                    )  # fmt: skip
                largest = gl.to_tensor(0)
                if READ == "nvfp4":
                    largest = measure_head(kept, N)
                # The next head: of this item, or of the next; after all, any.
                next_state, ring_x, ring_dt = state + head_units * UNIT, ring_x + ring_x_head, ring_dt + ring_dt_head
                next_start, next_committed = this_start, this_committed
                if i == FLUSH_HEADS - 1:
                    h = ((item + crew) % PARTS * FLUSH_HEADS).to(gl.int64)
                    next_state = state_ptr + (base * slot_units + h * head_units) * UNIT
                    ring_x = ring_x_ptr + base * ring_x_slot + h * ring_x_head
                    ring_dt = ring_dt_ptr + base * ring_dt_slot + h * ring_dt_head
                    next_start, next_committed = start, committed
                x, dt = load_rows(0, next_start, next_committed, ring_x, ring_dt, P, R, ROWS)
                barrier()
                more = (i < FLUSH_HEADS - 1) | (item + crew < end)
                renew_copy(kept, largest, state, next_state, more, codes, scales, head_scale, N, READ)
                state, head_scale = next_state, head_scale + 1
                codes += P * row_bytes(READ, N)
                scales += P * scales_a_row(READ, N)


@gluon.jit
def flush_windows(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, state_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr,
    cursors_ptr, slot_indices_ptr, query_start_loc_ptr, out_ptr, state_scales_ptr, codes_ptr, scales_ptr, global_ptr,
    num_slots, buffer_len, pad_slot_id, batch, x_token, x_head, dt_token, B_token, B_group, C_token, C_group, z_token,
    z_head, out_token, out_head, state_slot, state_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group,
    ring_dt_slot, ring_dt_head, state_scales_slot, codes_slot, scales_slot, global_slot,
    H: gl.constexpr, G: gl.constexpr, P: gl.constexpr, N: gl.constexpr, R: gl.constexpr, FLUSH_HEADS: gl.constexpr,
    BLOCK_B: gl.constexpr, ROWS: gl.constexpr, READ: gl.constexpr, CHECKPOINT: gl.constexpr, REPLAY: gl.constexpr,
):  # fmt: skip
    """Flush every n-th of the (row, FLUSH_HEADS heads) that flush in this step, n being the number of programs."""
    WARPS: gl.constexpr = gl.num_warps()
    LR: gl.constexpr = gl.BlockedLayout([max(1, BLOCK_B // (32 * WARPS))], [32], [WARPS], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rank, total = rank_of_rows(
        cursors_ptr, slot_indices_ptr, query_start_loc_ptr, num_slots, buffer_len, pad_slot_id, batch, BLOCK_B, LR
    )
    rank_at = gl.allocate_shared_memory(gl.int32, [BLOCK_B], FLAT, rank)
    PARTS: gl.constexpr = H // FLUSH_HEADS
    for item in range(gl.program_id(0), total * PARTS, gl.num_programs(0)):
        row = ranked_row(rank_at, item // PARTS, BLOCK_B, LR)
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
                H, G, P, N, R, ROWS, READ, CHECKPOINT, REPLAY, False, False, False, False, False,
            )  # fmt: skip
