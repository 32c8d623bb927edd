"""A program of the Mamba-2 read kernel that flushes: one head, whole, since nvfp4's scale is the head's."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_chunk import num_parts, rows_shared
from replayssm.ops.gluon_encode import encode_rows, from_e4m3, larger, largest_row
from replayssm.ops.gluon_formats import global_scale, largest_finite
from replayssm.ops.mamba2.gluon_names import barrier
from replayssm.ops.mamba2.gluon_parts import load_timestep
from replayssm.ops.mamba2.gluon_read_chunk import PIECE, chunk_band_layout, replay_band, stage_chunk
from replayssm.ops.mamba2.gluon_read_flush import (
    band_layout,
    keep_band,
    keep_part,
    kept_band,
    kept_shared,
    line_of,
    load_bands,
    put,
    replay_rows,
    stage_rows,
    widen,
    write_nvfp4,
    write_plain,
    write_rounded,
)
from replayssm.ops.mamba2.gluon_read_rows import gated
from replayssm.ops.mamba2.gluon_read_state import block_of, row_bytes


@gluon.jit
def replay_serially(
    bands, start, committed, A, ring_x_ptr, ring_B_ptr, ring_dt_ptr,
    P: gl.constexpr, N: gl.constexpr, R: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Bands of a head in fp32 with its committed rows in them, token by token."""
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    staged_B = gl.allocate_shared_memory(gl.float32, [ROWS, N], LINE)
    staged_x = gl.allocate_shared_memory(gl.float32, [ROWS, 1 << (P - 1).bit_length()], LINE)
    staged_a = gl.allocate_shared_memory(gl.float32, [ROWS, 1], LINE)
    for first in tl.range(0, committed, ROWS, disable_licm=True):
        barrier()
        stage_rows(
            staged_B, staged_x, staged_a, first, start, committed, A, ring_x_ptr, ring_B_ptr, ring_dt_ptr, P, N, R
        )
        barrier()
        bands = replay_rows(bands, staged_B, staged_x, staged_a, gl.minimum(committed - first, ROWS))
    return bands


@gluon.jit
def replay_head(
    state_ptr, state_scales_ptr, start, committed, A, ring_x_ptr, ring_B_ptr, ring_dt_ptr,
    P: gl.constexpr, N: gl.constexpr, R: gl.constexpr, ROWS: gl.constexpr, CHECKPOINT: gl.constexpr,
    REPLAY: gl.constexpr,
):  # fmt: skip
    """Replay a head's committed rows into its checkpoint.

    Returns what memory holds then, or for fp8 what is to be rounded, in shared memory [bands, lines, line], and the
    `magnitude` of its largest element; of infinity or more if anything is not finite.
    """
    WARPS: gl.constexpr = gl.num_warps()
    HEIGHT: gl.constexpr = 16 if REPLAY == "chunk" else 4 * WARPS
    BITS: gl.constexpr = max(state_ptr.dtype.element_ty.primitive_bitwidth, 16)
    L: gl.constexpr = chunk_band_layout(N, WARPS) if REPLAY == "chunk" else band_layout(BITS, WARPS)
    bands = load_bands(state_ptr, P // HEIGHT, HEIGHT, N, L)
    decay = A
    if REPLAY == "chunk":
        PIECES: gl.constexpr = (R + PIECE - 1) // PIECE
        PARTS: gl.constexpr = num_parts(ring_B_ptr.dtype.element_ty)
        WIDTH: gl.constexpr = 1 << (P - 1).bit_length()
        staged_U = gl.allocate_shared_memory(gl.bfloat16, [PIECES * 3, PIECE, WIDTH], rows_shared())
        staged_B = gl.allocate_shared_memory(gl.bfloat16, [PIECES * PARTS, PIECE, N], rows_shared())
        decay = stage_chunk(staged_U, staged_B, start, committed, A, ring_x_ptr, ring_B_ptr, ring_dt_ptr, P, N, R)
    else:
        wide = ()
        for i in gl.static_range(P // HEIGHT):
            wide = wide + (widen(bands[i], state_scales_ptr, i * HEIGHT, CHECKPOINT),)
        bands = replay_serially(wide, start, committed, A, ring_x_ptr, ring_B_ptr, ring_dt_ptr, P, N, R, ROWS)
    TYPE: gl.constexpr = gl.float32 if CHECKPOINT == "fp8" else state_ptr.dtype.element_ty
    LINE: gl.constexpr = line_of(TYPE.primitive_bitwidth)
    kept = gl.allocate_shared_memory(
        TYPE, [P // (4 * WARPS), 4 * WARPS * N // LINE, LINE], kept_shared(TYPE.primitive_bitwidth)
    )
    largest = gl.zeros([HEIGHT, N], gl.float32, layout=L)
    for i in gl.static_range(P // HEIGHT):
        S = bands[i]
        if REPLAY == "chunk":
            S = widen(S, state_scales_ptr, i * HEIGHT, CHECKPOINT)
            S = replay_band(S, i, staged_U, staged_B, (committed + PIECE - 1) // PIECE, decay, 3, PARTS)
        if CHECKPOINT != "fp8":
            S = write_plain(S, state_ptr, i * HEIGHT, N)
        keep_part(kept, S, i)
        largest = larger(largest, gl.abs(S.to(gl.float32)))
    return kept, gl.reduce(gl.reduce(largest, 1, larger), 0, larger).to(gl.int32, bitcast=True)


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
    largest, doubts = gl.to_tensor(0), gl.to_tensor(0)
    for i in tl.range(kept.shape[0], disable_licm=True):
        S = kept_band(kept.index(i), HEIGHT, N)
        codes, scales, _, doubtful = encode_rows(S, EXACT)
        put(state_ptr + i * HEIGHT * N, codes)
        gl.store(state_scales_ptr + i * HEIGHT + gl.arange(0, HEIGHT, layout=scales.type.layout), scales)
        keep_band(rounded.index(i), codes)
        row_scales.index(i).store(scales)
        largest = gl.maximum(largest, largest_row(S, scales))
        doubts = doubts | gl.max(doubtful.to(gl.int32), 0)
    return largest, doubts


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
    kept, largest = replay_head(
        state_ptr, state_scales_ptr, start, committed, A, ring_x_ptr + base * ring_x_slot + h * ring_x_head,
        ring_B_ptr + base * ring_B_slot + g * ring_B_group, ring_dt_ptr + base * ring_dt_slot + h * ring_dt_head,
        P, N, R, ROWS, CHECKPOINT, REPLAY,
    )  # fmt: skip
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
    k = gl.arange(0, N, layout=gl.SliceLayout(0, LS))
    C = gl.zeros([N], gl.float32, layout=gl.SliceLayout(0, LS))
    decay, skip = A, A
    if OUTPUTS:
        dt = load_timestep(dt_ptr + row * dt_token, dt_bias_ptr, h, HAS_BIAS, SOFTPLUS)
        decay = gl.exp(A * dt)
        D = gl.load(D_ptr + h).to(gl.float32) if HAS_D else A * 0.0
        x_ptr += row * x_token + h * x_head
        z_ptr += row * z_token + h * z_head
        out_ptr += row * out_token + h * out_head
        B_ptr += row * B_token + g * B_group
        C_ptr += row * C_token + g * C_group
        C = gl.load(C_ptr + k).to(gl.float32)
        once = gl.arange(0, N, layout=gl.BlockedLayout([N // 32], [32], [gl.num_warps()], [0]))
        skip = dt * gl.sum(gl.load(B_ptr + once).to(gl.float32) * gl.load(C_ptr + once).to(gl.float32), 0) + D
    doubts = gl.zeros([HEIGHT], gl.int32, layout=gl.SliceLayout(1, LS))
    for i in tl.range(BANDS, disable_licm=True):
        S = stored_band(stored, row_scales, i, HEIGHT, N, CHECKPOINT)
        y, doubtful = write_copy(S, C, codes_ptr, scales_ptr, i * HEIGHT, scale, inverse, N, READ, False)
        doubts = doubts | doubtful
        if OUTPUTS:
            finish_band(y, decay, skip, x_ptr, z_ptr, out_ptr, i * HEIGHT, HAS_Z)
    if (READ == "nvfp4") | (READ == "fp8"):
        if gl.max(doubts, 0) > 0:
            for i in tl.range(BANDS, disable_licm=True):
                S = stored_band(stored, row_scales, i, HEIGHT, N, CHECKPOINT)
                y, _ = write_copy(S, C, codes_ptr, scales_ptr, i * HEIGHT, scale, inverse, N, READ, True)
                if OUTPUTS:
                    finish_band(y, decay, skip, x_ptr, z_ptr, out_ptr, i * HEIGHT, HAS_Z)


@gluon.jit
def write_copy(
    S, C, codes_ptr, scales_ptr, first_v, scale, inverse, N: gl.constexpr, READ: gl.constexpr, EXACT: gl.constexpr
):
    """Round a band to the copy's format and write; what a read gives times C, where `EXACT` might round otherwise."""
    if READ == "nvfp4":
        y, doubtful = write_nvfp4(S, C, codes_ptr, scales_ptr, first_v, scale, inverse, N, EXACT)
    else:
        y, doubtful = write_rounded(S, C, codes_ptr, scales_ptr, first_v, N, READ, EXACT)
    return y, gl.convert_layout(doubtful, y.type.layout, assert_trivial=True)


@gluon.jit
def finish_band(y, decay, skip, x_ptr, z_ptr, out_ptr, first_v, HAS_Z: gl.constexpr):
    """Outputs of a band, from the new read copy times C."""
    v = first_v + gl.arange(0, y.shape[0], layout=y.type.layout)
    y = decay * y + skip * gl.load(x_ptr + v).to(gl.float32)
    if HAS_Z:
        y = gated(y, gl.load(z_ptr + v))
    gl.store(out_ptr + v, y.to(out_ptr.dtype.element_ty))
