"""Mamba-2, one token of every row in one launch, with a read copy or an fp8 checkpoint, for NVIDIA GPUs.

Programs that read and programs that flush are of two kinds: where a row flushes, its readers end at once, and elsewhere
the flushing ones do. Flushes come first, since they take longest.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.ops.gluon_flushers import opaque
from replayssm.ops.mamba2.gluon_append import append_token
from replayssm.ops.mamba2.gluon_read_flush import rows_to_flush
from replayssm.ops.mamba2.gluon_read_head import flush_head
from replayssm.ops.mamba2.gluon_read_program import hint_reads, read_program


@gluon.jit
def lowest_bit(x):
    """The number of x's lowest bit that is set."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 r; brev.b32 r, $1; clz.b32 $0, r; }", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def task_of(program, num_flushers, num_readers, EVERY: gl.constexpr):
    """A program's task, numbered flushes, reads, appends: every EVERY-th of the grid's first programs flushes."""
    task = program
    if EVERY > 1:
        groups = gl.minimum(num_flushers, num_readers // (EVERY - 1))
        group = program // EVERY
        place = program % EVERY
        mixed = gl.where(place == 0, group, num_flushers + group * (EVERY - 1) + place - 1)
        first = groups * EVERY
        rest = program - first + groups
        task = gl.where(program < first, mixed, gl.where(rest < num_flushers, rest, program))
    return task


@gluon.jit(do_not_specialize=["batch", "num_flushers", "num_readers", "num_slots", "buffer_len", "pad_slot_id"])
def mamba2_read_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, state_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr,
    cursors_ptr, slot_indices_ptr, out_ptr, state_scales_ptr, codes_ptr, scales_ptr, global_ptr,
    num_slots, buffer_len, pad_slot_id,
    x_token, x_head, dt_token, B_token, B_group, C_token, C_group, z_token, z_head, out_token, out_head,
    state_slot, state_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head,
    state_scales_slot, codes_slot, scales_slot, global_slot,
    batch, num_flushers, num_readers,
    H: gl.constexpr, G: gl.constexpr, P: gl.constexpr, N: gl.constexpr, R: gl.constexpr,
    TILES: gl.constexpr, GROUP: gl.constexpr, DEPTH: gl.constexpr, FLUSH_ROWS: gl.constexpr, EVERY: gl.constexpr,
    APPENDERS: gl.constexpr, AHEAD: gl.constexpr, HINT: gl.constexpr,
    ROWS: gl.constexpr, READ: gl.constexpr, CHECKPOINT: gl.constexpr, REPLAY: gl.constexpr,
    HAS_D: gl.constexpr, HAS_Z: gl.constexpr, HAS_BIAS: gl.constexpr, SOFTPLUS: gl.constexpr,
):  # fmt: skip
    """Programs flush, each a head of FLUSH_ROWS rows, or read; the last append, APPENDERS a row."""
    if HINT:
        guess = task_of(gl.program_id(0), num_flushers, num_readers, EVERY) - num_flushers
        if (guess >= 0) & (guess < num_readers):
            hint_reads(
                guess, ring_x_ptr, ring_B_ptr, cursors_ptr, slot_indices_ptr, codes_ptr, scales_ptr, num_slots,
                ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, codes_slot, scales_slot,
                H, G, P, N, R, 16 * gl.num_warps() * TILES, "fp8" if READ == "none" else READ,
            )  # fmt: skip
    gdc_wait()
    gdc_launch_dependents()
    item = task_of(gl.program_id(0), num_flushers, num_readers, EVERY)
    if item < num_flushers:
        todo = rows_to_flush(
            item // H * FLUSH_ROWS, batch, slot_indices_ptr, cursors_ptr, num_slots, buffer_len, pad_slot_id, FLUSH_ROWS
        )
        # Nothing else may live through a flush or be computed before: it would be spilled, and small writes among
        # large reads are dear.
        while tl.condition(todo != 0, disable_licm=True):
            at = task_of(opaque(gl.program_id(0)), num_flushers, num_readers, EVERY)
            row = at // H * FLUSH_ROWS + lowest_bit(todo)
            todo = todo & (todo - 1)
            flush_head(
                row.to(gl.int64), (at % H).to(gl.int64), x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr,
                z_ptr, dt_bias_ptr, state_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr, cursors_ptr,
                slot_indices_ptr, out_ptr, state_scales_ptr, codes_ptr, scales_ptr, global_ptr,
                x_token, x_head, dt_token, B_token, B_group, C_token, C_group, z_token, z_head, out_token,
                out_head, state_slot, state_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group,
                ring_dt_slot, ring_dt_head, state_scales_slot, codes_slot, scales_slot, global_slot,
                H, G, P, N, R, ROWS, READ, CHECKPOINT, REPLAY, HAS_D, HAS_Z, HAS_BIAS, SOFTPLUS, True,
            )  # fmt: skip
        return
    item -= num_flushers
    if item >= num_readers:
        row = ((item - num_readers) // APPENDERS).to(gl.int64)
        append_token(
            row, (item - num_readers) % APPENDERS, x_ptr + row * x_token, dt_ptr + row * dt_token,
            B_ptr + row * B_token, dt_bias_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr, cursors_ptr, slot_indices_ptr,
            num_slots, pad_slot_id, x_head, B_group, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group,
            ring_dt_slot, ring_dt_head, H, G, P, N, R, H // APPENDERS, HAS_BIAS, SOFTPLUS, gl.num_warps(),
        )  # fmt: skip
        return
    read_program(
        item, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr,
        ring_x_ptr, ring_B_ptr, ring_dt_ptr, cursors_ptr, slot_indices_ptr, out_ptr, codes_ptr, scales_ptr, global_ptr,
        num_slots, buffer_len, pad_slot_id,
        x_token, x_head, dt_token, B_token, B_group, C_token, C_group, z_token, z_head, out_token, out_head,
        ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head, codes_slot, scales_slot,
        global_slot, H, G, P, N, R, TILES, GROUP, DEPTH, AHEAD, HINT, ROWS,
        "fp8" if READ == "none" else READ, HAS_D, HAS_Z, HAS_BIAS, SOFTPLUS,
    )  # fmt: skip
