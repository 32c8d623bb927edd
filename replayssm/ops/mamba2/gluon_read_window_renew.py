"""A replayed head goes to memory in the Mamba-2 window step with a read copy: its checkpoint and its copy.

A program that flushes several heads asks for the next one's checkpoint band by band, as this one's is read.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from replayssm.ops.gluon_encode import larger
from replayssm.ops.gluon_formats import encode_nvfp4_numbers, global_scale, scales_a_row
from replayssm.ops.gluon_window_parts import copy_to_shared
from replayssm.ops.mamba2.gluon_names import barrier
from replayssm.ops.mamba2.gluon_read_flush import kept_band, kept_shared, line_of, put, write_rounded
from replayssm.ops.mamba2.gluon_read_state import row_bytes


@gluon.constexpr_function
def lines_layout(element_bits, warps):
    """[lines, line] of shared memory: 16-byte accesses, 128 neighbouring bytes by 8 lanes."""
    return gl.BlockedLayout([1, 128 // element_bits], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def blocks_of_band(warps, d_state):
    """[V-rows, blocks] of a band: each thread's own block."""
    return gl.BlockedLayout([1, 1], [512 // d_state, d_state // 16], [warps, 1], [1, 0])


@gluon.jit
def line_offsets(LINES: gl.constexpr, LINE: gl.constexpr, L: gl.constexpr):
    """Where the elements of a band lie behind its first one in memory."""
    lines = gl.expand_dims(gl.arange(0, LINES, layout=gl.SliceLayout(1, L)) * LINE, 1)
    return lines + gl.expand_dims(gl.arange(0, LINE, layout=gl.SliceLayout(0, L)), 0)


@gluon.jit
def allocate_head(TYPE: gl.constexpr, P: gl.constexpr, N: gl.constexpr):
    """Shared memory for a head's checkpoint, [bands, lines, line]."""
    BITS: gl.constexpr = TYPE.primitive_bitwidth
    LINES: gl.constexpr = 512 * gl.num_warps() // line_of(BITS)
    SHAPE: gl.constexpr = [P * N // (LINES * line_of(BITS)), LINES, line_of(BITS)]
    return gl.allocate_shared_memory(TYPE, SHAPE, kept_shared(BITS))


@gluon.jit
def fetch_head(kept, ptr):
    """Start copying a head to shared memory [bands, lines, line]."""
    BANDS: gl.constexpr = kept.shape[0]
    LINES: gl.constexpr = kept.shape[1]
    LINE: gl.constexpr = kept.shape[2]
    ptrs = ptr + line_offsets(LINES, LINE, lines_layout(kept.dtype.primitive_bitwidth, gl.num_warps()))
    for i in gl.static_range(BANDS):
        copy_to_shared(kept.index(i), ptrs + i * (LINES * LINE))
    async_copy.commit_group()


@gluon.jit
def measure_head(kept, N: gl.constexpr):
    """`magnitude` of the largest element of a head in blocks without NaN or infinity."""
    HEIGHT: gl.constexpr = kept.shape[1] * kept.shape[2] // N
    BANDS: gl.constexpr = kept.shape[0]
    L: gl.constexpr = blocks_of_band(gl.num_warps(), N)
    finite = gl.zeros([HEIGHT, N // 16], gl.int32, layout=L)
    for i in gl.static_range(BANDS):
        blocks = gl.reshape(kept_band(kept.index(i), HEIGHT, N).to(gl.float32), [HEIGHT, N // 16, 16])
        largest = gl.convert_layout(gl.reduce(gl.abs(blocks), 2, larger), L, assert_trivial=True)
        bits = largest.to(gl.int32, bitcast=True)
        finite = gl.maximum(finite, gl.where(bits < 0x7F800000, bits, 0))
    return gl.max(gl.max(finite, 1), 0)


@gluon.jit
def write_band(S, codes_ptr, scales_ptr, scale, inverse, READ: gl.constexpr, EXACT: gl.constexpr):
    """Round a band to the copy's format and write; returns where `EXACT` might round otherwise."""
    if READ == "nvfp4":
        codes, scales, _, _, doubtful = encode_nvfp4_numbers(S, scale, inverse, EXACT, True)
        put(codes_ptr, codes)
        put(scales_ptr, scales)
    else:
        nothing = gl.zeros([S.shape[1]], gl.float32, layout=gl.SliceLayout(0, S.type.layout))
        _, doubtful = write_rounded(S, nothing, codes_ptr, scales_ptr, 0, S.shape[1], READ, EXACT)
    return doubtful.to(gl.int32)


@gluon.jit
def no_doubts(HEIGHT: gl.constexpr, N: gl.constexpr, L: gl.constexpr, READ: gl.constexpr):
    """Zeros for what `write_band` returns for bands in layout L: of blocks, or of rows."""
    zero = gl.zeros([HEIGHT, N], gl.int32, layout=L)
    if READ == "nvfp4":
        return gl.max(gl.reshape(zero, [HEIGHT, N // 16, 16]), 2)
    else:
        return gl.max(zero, 1)


@gluon.jit
def write_bands(
    kept, state_ptr, next_ptr, codes_ptr, scales_ptr, scale, inverse, N: gl.constexpr, READ: gl.constexpr,
    MORE: gl.constexpr,
):  # fmt: skip
    """Write a replayed head and its copy; with MORE start copying the next head in its place. Returns the doubts."""
    LINES: gl.constexpr = kept.shape[1]
    LINE: gl.constexpr = kept.shape[2]
    HEIGHT: gl.constexpr = LINES * LINE // N
    L: gl.constexpr = lines_layout(kept.dtype.primitive_bitwidth, gl.num_warps())
    CODES: gl.constexpr = HEIGHT * row_bytes(READ, N)
    SCALES: gl.constexpr = HEIGHT * scales_a_row(READ, N)
    LS: gl.constexpr = kept_band(kept.index(0), HEIGHT, N).type.layout
    doubts = no_doubts(HEIGHT, N, LS, READ)
    state_ptrs = state_ptr + line_offsets(LINES, LINE, L)
    next_ptrs = next_ptr + line_offsets(LINES, LINE, L)
    for i in tl.range(kept.shape[0], disable_licm=True):
        S = kept_band(kept.index(i), HEIGHT, N).to(gl.float32)
        gl.store(state_ptrs + i * (LINES * LINE), kept.index(i).load(L))
        if MORE:
            barrier()
            copy_to_shared(kept.index(i), next_ptrs + i * (LINES * LINE))
        codes, scales = codes_ptr + i * CODES, scales_ptr + i * SCALES
        doubts |= write_band(S, codes, scales, scale, inverse, READ, False)
    return doubts


@gluon.jit
def renew_copy(
    kept, largest, state_ptr, next_ptr, more, codes_ptr, scales_ptr, global_ptr, N: gl.constexpr, READ: gl.constexpr
):
    """Write a replayed head and its copy; where there is `more`, start copying the next head in its place."""
    BANDS: gl.constexpr = kept.shape[0]
    HEIGHT: gl.constexpr = kept.shape[1] * kept.shape[2] // N
    CODES: gl.constexpr = HEIGHT * row_bytes(READ, N)
    SCALES: gl.constexpr = HEIGHT * scales_a_row(READ, N)
    LS: gl.constexpr = kept_band(kept.index(0), HEIGHT, N).type.layout
    scale, inverse = 1.0, 1.0
    if READ == "nvfp4":
        scale, inverse = global_scale(largest)
        gl.store(global_ptr, scale)
    if more:
        doubts = write_bands(kept, state_ptr, next_ptr, codes_ptr, scales_ptr, scale, inverse, N, READ, True)
    else:
        doubts = write_bands(kept, state_ptr, next_ptr, codes_ptr, scales_ptr, scale, inverse, N, READ, False)
    async_copy.commit_group()
    if (READ == "nvfp4") | (READ == "fp8"):
        any_doubt = gl.max(gl.max(doubts, 1), 0) if READ == "nvfp4" else gl.max(doubts, 0)
        # One head in a hundred: again, with sums that round exactly as the format says.
        if any_doubt > 0:
            v = gl.expand_dims(gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, LS)) * N, 1)
            at = state_ptr + (v + gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, LS)), 0))
            for i in tl.range(BANDS, disable_licm=True):
                S = kept_band(kept.index(i), HEIGHT, N)
                if more:
                    # The next head is in its place; other threads have written it to memory.
                    S = gl.load(at + i * (HEIGHT * N))
                codes, scales = codes_ptr + i * CODES, scales_ptr + i * SCALES
                write_band(S.to(gl.float32), codes, scales, scale, inverse, READ, True)
