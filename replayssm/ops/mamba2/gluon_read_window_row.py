"""The window of one row of the batch from the read copy: of a row that does not flush, or of one that does."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_window_parts import zero_rows
from replayssm.ops.mamba2.gluon_read_window_part import read_window


@gluon.jit
def read_row(
    row, first_h, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr,
    cursors_ptr, slot_indices_ptr, query_start_loc_ptr, parents_ptr, out_ptr, codes_ptr, scales_ptr, global_ptr,
    num_slots, buffer_len, pad_slot_id, x_token, x_head, dt_token, dt_head, B_token, B_group, C_token, C_group,
    z_token, z_head, out_token, out_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot,
    ring_dt_head, codes_slot, scales_slot, global_slot,
    TIME: gl.constexpr, H: gl.constexpr, G: gl.constexpr, P: gl.constexpr, N: gl.constexpr, R: gl.constexpr,
    HEADS: gl.constexpr, TILE: gl.constexpr, ROWS: gl.constexpr, WINDOW: gl.constexpr, READ: gl.constexpr,
    TREE: gl.constexpr, HAS_D: gl.constexpr, HAS_Z: gl.constexpr, HAS_BIAS: gl.constexpr, SOFTPLUS: gl.constexpr,
):  # fmt: skip
    """`read_window` of a row of the batch.

    TIME "early": unless it flushes; "late": if it does, once the flushing launch is done; "flushed": it just was.
    """
    # After a flush there are the window's rows alone.
    SEEN: gl.constexpr = ROWS if TIME == "early" else 16
    slot = gl.load(slot_indices_ptr + row).to(gl.int64)
    first = gl.load(query_start_loc_ptr + row)
    length = gl.load(query_start_loc_ptr + row + 1) - first
    first = first.to(gl.int64)
    if (slot == pad_slot_id) | (slot < 0) | (slot >= num_slots):
        if TIME != "early":
            length = 0
        out_ptr += first * out_token + first_h * out_head
        zero_rows(out_ptr, length, 0, out_token, out_head, 16, HEADS * (P // 16), P // 16)
    else:
        start = gl.load(cursors_ptr + slot * 4)
        committed = gl.load(cursors_ptr + slot * 4 + 1)
        limit = gl.load(cursors_ptr + slot * 4 + 2)
        stays = (committed == 0) | (committed + length <= gl.minimum(limit, buffer_len))
        if TIME == "late":
            stays = not stays
        elif TIME == "flushed":
            stays = length > 0
        if stays & (length > 0):
            read_window(
                slot, first, length, start, committed, committed if TIME == "early" else 0, first_h // (H // G),
                first_h, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, ring_x_ptr, ring_B_ptr,
                ring_dt_ptr, parents_ptr, out_ptr, codes_ptr, scales_ptr, global_ptr, x_token, x_head, dt_token,
                dt_head, B_token, B_group, C_token, C_group, z_token, z_head, out_token, out_head, ring_x_slot,
                ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head, codes_slot, scales_slot,
                global_slot, H, G, P, N, R, HEADS, TILE, SEEN, WINDOW, "fp8" if READ == "none" else READ, TREE, HAS_D,
                HAS_Z, HAS_BIAS, SOFTPLUS, TIME == "late",
            )  # fmt: skip
