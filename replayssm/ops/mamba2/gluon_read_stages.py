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


@gluon.constexpr_function
def tiles_together(group):
    """Tiles of a stage that are copied at once: as many as a tensor of them may have rows."""
    return group if group & (group - 1) == 0 else 1


@gluon.jit
def fetch_stage(codes_at, scales_at, codes_ptr, scales_ptr, place, stage, GROUP: gl.constexpr, READ: gl.constexpr):
    """Start copying the GROUP tiles of a stage, codes and block scales, to one of the places."""
    PARTS: gl.constexpr = GROUP // tiles_together(GROUP)
    for i in gl.static_range(PARTS):
        at = codes_at.index(place * PARTS + i)
        fetch_rows(at, codes_ptr + (stage * PARTS + i) * (at.shape[0] * at.shape[1]), 128)
        if block_of(READ) > 0:
            at = scales_at.index(place * PARTS + i)
            fetch_rows(at, scales_ptr + (stage * PARTS + i) * (at.shape[0] * at.shape[1]), 32)


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
    TOGETHER: gl.constexpr = tiles_together(GROUP)
    for stage in range(TILES // GROUP):
        async_copy.wait_group(DEPTH - 1)
        place = stage % DEPTH
        # Everything is read before anything is written, or the tiles would go one after the other.
        sums_of_tiles = ()
        for i in gl.static_range(GROUP):
            y = gl.zeros([TILE], gl.float32, layout=gl.SliceLayout(1, MMA))
            tile_at = codes_at.index(place * (GROUP // TOGETHER) + i // TOGETHER).slice(i % TOGETHER * TILE, TILE)
            some_at = scales_at.index(place * (GROUP // TOGETHER) + i // TOGETHER).slice(i % TOGETHER * TILE, TILE)
            for p in gl.static_range(PARTS):
                codes = tile_at.slice(p * WIDTH, WIDTH, dim=1).load(LA)
                acc = multiply(codes, lows[p], highs[p], gl.zeros([TILE, 8], gl.float32, layout=MMA), READ)
                some = some_at
                if block_of(READ) > 0:
                    some = some_at.slice(p * (BLOCKS // PARTS), BLOCKS // PARTS, dim=1)
                y += scaled_sum(acc, some, READ, BLOCKS // PARTS if block_of(READ) > 0 else 1)
            sums_of_tiles = sums_of_tiles + (y,)
        for i in gl.static_range(GROUP):
            sums.index(stage * GROUP + i).store(sums_of_tiles[i])
        if DEPTH * GROUP < TILES:
            if stage + DEPTH < TILES // GROUP:
                fetch_stage(codes_at, scales_at, codes_ptr, scales_ptr, place, stage + DEPTH, GROUP, READ)
        async_copy.commit_group()
