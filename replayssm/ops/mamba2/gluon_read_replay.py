"""The replay of a flushing head in the Mamba-2 kernels with read copies, from its checkpoint into shared memory."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_chunk import num_parts, rows_shared
from replayssm.ops.gluon_encode import larger
from replayssm.ops.mamba2.gluon_names import barrier
from replayssm.ops.mamba2.gluon_read_chunk import (
    PIECE,
    chunk_band_layout,
    pieces_of,
    replay_band,
    stage_chunk,
    stage_memory,
)
from replayssm.ops.mamba2.gluon_read_flush import (
    band_layout,
    keep_part,
    kept_shared,
    line_of,
    load_bands,
    load_row_scales,
    replay_rows,
    stage_rows,
    widen,
    widen_codes,
    write_plain,
)


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
    if REPLAY == "chunk":
        factors = ()
        for i in gl.static_range(P // HEIGHT):
            factors = factors + (load_row_scales(state_scales_ptr, i * HEIGHT, HEIGHT, L, CHECKPOINT),)
        PARTS: gl.constexpr = num_parts(ring_B_ptr.dtype.element_ty)
        staged_U = stage_memory(P, R)
        staged_B = gl.allocate_shared_memory(gl.bfloat16, [pieces_of(R) * PARTS, PIECE, N], rows_shared())
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
            S = replay_band(widen_codes(S), factors[i] * decay, i * HEIGHT, staged_U, staged_B, committed, P, R, PARTS)
        if CHECKPOINT != "fp8":
            S = write_plain(S, state_ptr, i * HEIGHT, N)
        keep_part(kept, S, i)
        largest = larger(largest, gl.abs(S.to(gl.float32)))
    return kept, gl.reduce(gl.reduce(largest, 1, larger), 0, larger).to(gl.int32, bitcast=True)
