"""A read copy on its way through shared memory, in the Mamba-2 kernels: stages of some tiles, several in flight.

All that fit are asked for before the ring is worked on, so that memory does not wait for arithmetic.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from replayssm.ops.gluon_encode import from_e4m3
from replayssm.ops.gluon_window_parts import copy_to_shared, mma_layout
from replayssm.ops.mamba2.gluon_read_state import block_of, multiply, operand_layout, row_bytes


@gluon.jit
def fetch_rows(at, ptr, BITS: gl.constexpr):
    """Start copying contiguous memory to shared memory [rows, row], BITS an access."""
    VECTOR: gl.constexpr = BITS // at.dtype.primitive_bitwidth
    LANES: gl.constexpr = min(32, at.shape[1] // VECTOR)
    L: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    rows = gl.expand_dims(gl.arange(0, at.shape[0], layout=gl.SliceLayout(1, L)) * at.shape[1], 1)
    copy_to_shared(at, ptr + rows + gl.expand_dims(gl.arange(0, at.shape[1], layout=gl.SliceLayout(0, L)), 0))


@gluon.jit
def fetch_stage(
    codes_at, scales_at, codes_ptr, scales_ptr, first_place, first_tile, GROUP: gl.constexpr, READ: gl.constexpr
):
    """Start copying GROUP tiles from `first_tile` on, codes and block scales, to places from `first_place` on."""
    for i in gl.static_range(GROUP):
        tile = first_tile + i
        at = codes_at.index(first_place + i)
        fetch_rows(at, codes_ptr + tile * (at.shape[0] * at.shape[1]), 128)
        if block_of(READ) > 0:
            at = scales_at.index(first_place + i)
            fetch_rows(at, scales_ptr + tile * (at.shape[0] * at.shape[1]), 32)


@gluon.jit
def scaled_sum(acc, scales_at, READ: gl.constexpr, BLOCKS: gl.constexpr):
    """Accumulators [TILE, 8] times their block's scale [TILE, BLOCKS], summed up: neighbours share a block."""
    TILE: gl.constexpr = acc.shape[0]
    if block_of(READ) == 0:
        y = gl.sum(acc, 1)
    else:
        if BLOCKS < 8:
            acc = gl.sum(gl.reshape(acc, [TILE, BLOCKS, 8 // BLOCKS]), 2)
        scales = scales_at.load(acc.type.layout)
        y = gl.sum(acc * (from_e4m3(scales, True) if READ == "nvfp4" else scales.to(gl.float32)), 1)
    return gl.convert_layout(y, gl.SliceLayout(1, mma_layout(gl.num_warps())), assert_trivial=True)


@gluon.jit
def staged_sums(
    sums, codes_at, scales_at, codes_ptr, scales_ptr, lows, highs,
    TILES: gl.constexpr, GROUP: gl.constexpr, DEPTH: gl.constexpr, READ: gl.constexpr, N: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """Put state rows times C into `sums` [tiles, TILE], still to be multiplied by what scales a row; refills stages."""
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    TILE: gl.constexpr = 16 * gl.num_warps()
    BLOCKS: gl.constexpr = N // block_of(READ) if block_of(READ) > 0 else 1
    PARTS: gl.constexpr = N // PART
    WIDTH: gl.constexpr = row_bytes(READ, PART)
    LA: gl.constexpr = operand_layout(0, READ, PART, gl.num_warps())
    for stage in range(TILES // GROUP):
        async_copy.wait_group(DEPTH - 1)
        place = stage % DEPTH * GROUP
        for i in gl.static_range(GROUP):
            y = gl.zeros([TILE], gl.float32, layout=gl.SliceLayout(1, MMA))
            for p in gl.static_range(PARTS):
                codes = codes_at.index(place + i).slice(p * WIDTH, WIDTH, dim=1).load(LA)
                acc = multiply(codes, lows[p], highs[p], gl.zeros([TILE, 8], gl.float32, layout=MMA), READ)
                some = scales_at.index(place + i)
                if block_of(READ) > 0:
                    some = some.slice(p * (BLOCKS // PARTS), BLOCKS // PARTS, dim=1)
                y += scaled_sum(acc, some, READ, BLOCKS // PARTS if block_of(READ) > 0 else 1)
            sums.index(stage * GROUP + i).store(y)
        if DEPTH * GROUP < TILES:
            if stage + DEPTH < TILES // GROUP:
                first_tile = (stage + DEPTH) * GROUP
                fetch_stage(codes_at, scales_at, codes_ptr, scales_ptr, place, first_tile, GROUP, READ)
        async_copy.commit_group()
