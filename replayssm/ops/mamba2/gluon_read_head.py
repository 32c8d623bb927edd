"""A program of the Mamba-2 read kernel that flushes: one head, whole, since nvfp4's scale is the head's."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_encode import from_e4m3
from replayssm.ops.gluon_encode_rows import encode_rows, row_magnitudes
from replayssm.ops.gluon_formats import global_scale, largest_finite
from replayssm.ops.mamba2.gluon_names import barrier
from replayssm.ops.mamba2.gluon_read_flush import (
    keep_band,
    kept_band,
    kept_shared,
    put,
    write_nvfp4,
    write_rounded,
)
from replayssm.ops.mamba2.gluon_read_replay import replay_head
from replayssm.ops.mamba2.gluon_read_state import block_of, row_bytes
from replayssm.ops.mamba2.gluon_read_token import FLAT, finish_head, keep_line, load_token, padded, sum_of, timestep


@gluon.jit
def largest_kept(kept, N: gl.constexpr):
    """`largest_finite` of a head."""
    HEIGHT: gl.constexpr = kept.shape[1] * kept.shape[2] // N
    largest = gl.to_tensor(0)
    for i in tl.range(kept.shape[0], disable_licm=True):
        band = kept_band(kept.index(i), HEIGHT, N).to(gl.float32)
        largest = gl.maximum(largest, gl.max(largest_finite(band), 0))
    return largest


@gluon.jit
def round_rows(kept, rounded, row_scales, state_ptr, state_scales_ptr, N: gl.constexpr, EXACT: gl.constexpr):
    """Round a head to fp8, write and keep it; returns its `magnitude`, and whether `EXACT` might round otherwise."""
    HEIGHT: gl.constexpr = kept.shape[1] * kept.shape[2] // N
    LV: gl.constexpr = gl.SliceLayout(1, kept_band(kept.index(0), HEIGHT, N).type.layout)
    # Of all bands first: a maximum over the program in every band would wait for all warps each time.
    largest, doubts = gl.zeros([HEIGHT], gl.int32, layout=LV), gl.zeros([HEIGHT], gl.int32, layout=LV)
    for i in tl.range(kept.shape[0], disable_licm=True):
        S = kept_band(kept.index(i), HEIGHT, N)
        codes, scales, _, doubtful = encode_rows(S, EXACT)
        put(state_ptr + i * HEIGHT * N, codes)
        gl.store(state_scales_ptr + i * HEIGHT + gl.arange(0, HEIGHT, layout=scales.type.layout), scales)
        keep_band(rounded.index(i), codes)
        row_scales.index(i).store(scales)
        largest = gl.maximum(largest, row_magnitudes(S, scales))
        doubts = doubts | doubtful.to(gl.int32)
    return gl.max(largest, 0), gl.max(doubts, 0)


@gluon.jit
def stored_band(kept, row_scales, i, HEIGHT: gl.constexpr, N: gl.constexpr, CHECKPOINT: gl.constexpr):
    """A band of the checkpoint as memory holds it, in fp32."""
    S = kept_band(kept.index(i), HEIGHT, N)
    if CHECKPOINT == "fp8":
        return from_e4m3(S, True) * gl.expand_dims(row_scales.index(i).load(gl.SliceLayout(1, S.type.layout)), 1)
    else:
        return S.to(gl.float32)


@gluon.jit
def flush_head(
    row, h, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, state_ptr,
    ring_x_ptr, ring_B_ptr, ring_dt_ptr, cursors_ptr, slot_indices_ptr, out_ptr,
    state_scales_ptr, codes_ptr, scales_ptr, global_ptr,
    x_token, x_head, dt_token, B_token, B_group, C_token, C_group, z_token, z_head, out_token, out_head,
    state_slot, state_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head,
    state_scales_slot, codes_slot, scales_slot, global_slot,
    H: gl.constexpr, G: gl.constexpr, P: gl.constexpr, N: gl.constexpr, R: gl.constexpr, ROWS: gl.constexpr,
    READ: gl.constexpr, CHECKPOINT: gl.constexpr, REPLAY: gl.constexpr,
    HAS_D: gl.constexpr, HAS_Z: gl.constexpr, HAS_BIAS: gl.constexpr, SOFTPLUS: gl.constexpr, OUTPUTS: gl.constexpr,
):  # fmt: skip
    """Replay a head's ring into its checkpoint, renew its read copy, and (OUTPUTS) compute its output from that."""
    HEIGHT: gl.constexpr = 4 * gl.num_warps()
    BANDS: gl.constexpr = P // HEIGHT
    base = gl.load(slot_indices_ptr + row).to(gl.int64)
    g = h // (H // G)
    state_ptr += base * state_slot + h * state_head
    state_scales_ptr += base * state_scales_slot + h * P
    start = gl.load(cursors_ptr + base * 4)
    committed = gl.load(cursors_ptr + base * 4 + 1)
    A = gl.load(A_ptr + h)
    # A state of more registers in fp32 leaves none for the token.
    EARLY: gl.constexpr = (REPLAY == "chunk") | (P * N <= 64 * 32 * gl.num_warps())
    token = ()
    if OUTPUTS & EARLY:
        token = load_token(
            row, h, g, dt_ptr, dt_bias_ptr, D_ptr, x_ptr, z_ptr, B_ptr, C_ptr, dt_token, x_token, x_head, z_token,
            z_head, B_token, B_group, C_token, C_group, P, N, HAS_D, HAS_Z, HAS_BIAS,
        )  # fmt: skip
    kept, largest = replay_head(
        state_ptr, state_scales_ptr, start, committed, A, ring_x_ptr + base * ring_x_slot + h * ring_x_head,
        ring_B_ptr + base * ring_B_slot + g * ring_B_group, ring_dt_ptr + base * ring_dt_slot + h * ring_dt_head,
        P, N, R, ROWS, CHECKPOINT, REPLAY,
    )  # fmt: skip
    decay, skip = A, A
    kept_x, kept_z, kept_C, kept_BC = kept, kept, kept, kept
    if OUTPUTS:
        if not EARLY:
            token = load_token(
                row, h, g, dt_ptr, dt_bias_ptr, D_ptr, x_ptr, z_ptr, B_ptr, C_ptr, dt_token, x_token, x_head, z_token,
                z_head, B_token, B_group, C_token, C_group, P, N, HAS_D, HAS_Z, HAS_BIAS,
            )  # fmt: skip
        dt, bias, D, x, z, B, C = token
        kept_x, kept_z, kept_C = keep_line(x), keep_line(z), keep_line(C.to(gl.float32))
        kept_BC = keep_line(B.to(gl.float32) * C.to(gl.float32))
    barrier()
    # From here on in loops over shared memory: all bands at once would need more registers than there are.
    stored, row_scales = kept, kept
    if CHECKPOINT == "fp8":
        stored = gl.allocate_shared_memory(gl.uint8, kept.shape, kept_shared(8))
        row_scales = gl.allocate_shared_memory(gl.float32, [BANDS, HEIGHT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        largest, doubts = round_rows(kept, stored, row_scales, state_ptr, state_scales_ptr, N, False)
        # One head in a hundred: again, with sums that round exactly as the format says.
        if doubts > 0:
            largest, _ = round_rows(kept, stored, row_scales, state_ptr, state_scales_ptr, N, True)
        barrier()
    elif READ == "nvfp4":
        if largest >= 0x7F800000:
            largest = largest_kept(kept, N)
    scale, inverse = 1.0, 1.0
    if READ == "nvfp4":
        scale, inverse = global_scale(largest)
        gl.store(global_ptr + base * global_slot + h, scale)
    codes_ptr += base * codes_slot + h * (P * row_bytes(READ, N))
    scales_ptr += base * scales_slot + h * (P * (N // block_of(READ) if block_of(READ) > 0 else 1))
    LS: gl.constexpr = kept_band(stored.index(0), HEIGHT, N).type.layout
    C = gl.zeros([N], gl.float32, layout=gl.SliceLayout(0, LS))
    if OUTPUTS:
        C = kept_C.load(gl.SliceLayout(0, LS))
        dt = timestep(dt, bias, HAS_BIAS, SOFTPLUS)
        decay, skip = gl.exp(A * dt), dt * sum_of(kept_BC)
        if HAS_D:
            skip += D.to(gl.float32)
        out_ptr += row * out_token + h * out_head
    kept_y = kept
    if OUTPUTS:
        kept_y = gl.allocate_shared_memory(gl.float32, [padded(P) // HEIGHT, HEIGHT], FLAT)
    doubts = no_doubts(HEIGHT, N, READ, LS)
    for i in tl.range(BANDS, disable_licm=True):
        S = stored_band(stored, row_scales, i, HEIGHT, N, CHECKPOINT)
        y, doubtful = write_copy(S, C, codes_ptr, scales_ptr, i * HEIGHT, scale, inverse, N, READ, False)
        if OUTPUTS:
            kept_y.index(i).store(y)
        doubts = doubts | doubtful
    if (READ == "nvfp4") | (READ == "fp8"):
        if gl.max(gl.max(doubts, 1) if READ == "nvfp4" else doubts, 0) > 0:
            for i in tl.range(BANDS, disable_licm=True):
                S = stored_band(stored, row_scales, i, HEIGHT, N, CHECKPOINT)
                y, _ = write_copy(S, C, codes_ptr, scales_ptr, i * HEIGHT, scale, inverse, N, READ, True)
                if OUTPUTS:
                    kept_y.index(i).store(y)
    if OUTPUTS:
        barrier()
        finish_head(kept_y, decay, skip, kept_x, kept_z, out_ptr, P, HAS_Z)


@gluon.jit
def no_doubts(HEIGHT: gl.constexpr, N: gl.constexpr, READ: gl.constexpr, L: gl.constexpr):
    """The last result of `write_copy` where nothing is doubtful: nvfp4's is of blocks, others' of rows."""
    none = gl.zeros([HEIGHT, N], gl.int32, layout=L)
    if READ == "nvfp4":
        none = gl.max(gl.reshape(none, [HEIGHT, N // 16, 16]), 2)
    else:
        none = gl.max(none, 1)
    return none


@gluon.jit
def write_copy(
    S, C, codes_ptr, scales_ptr, first_v, scale, inverse, N: gl.constexpr, READ: gl.constexpr, EXACT: gl.constexpr
):
    """Round a band to the copy's format and write; what a read gives times C, where `EXACT` might round otherwise."""
    if READ == "nvfp4":
        y, doubtful = write_nvfp4(S, C, codes_ptr, scales_ptr, first_v, scale, inverse, N, EXACT)
    else:
        y, doubtful = write_rounded(S, C, codes_ptr, scales_ptr, first_v, N, READ, EXACT)
        doubtful = gl.convert_layout(doubtful, y.type.layout, assert_trivial=True)
    return y, doubtful
