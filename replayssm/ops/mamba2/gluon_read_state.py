"""A read copy times C on the tensor cores, in the Mamba-2 kernels: codes go in unscaled, sums are scaled.

State rows are the V-rows of a group's heads, one after the other; a tile is 16 of them a warp.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from replayssm.ops.gluon_encode import from_e4m3
from replayssm.ops.gluon_formats import crossed_halves_of_e2m1, half_of_e4m3, half_of_int8
from replayssm.ops.gluon_window_parts import columns_shared, mma_layout


@gluon.constexpr_function
def block_of(read):
    """Elements under one scale along K; 0: a scale a row, or none."""
    return {"nvfp4": 16, "int8": 32}.get(read, 0)


@gluon.constexpr_function
def row_bytes(read, d_state):
    """Elements of the codes' dtype in a state row."""
    return d_state // 2 if read == "nvfp4" else d_state


@gluon.constexpr_function
def operand_layout(which, read, part, warps):
    """Operand of a product of codes: accesses of 16 bytes, or a quarter of a row; both operands permute K alike."""
    return gl.DotOperandLayout(which, mma_layout(warps), min(8 if read == "bf16" else 16, row_bytes(read, part) // 4))


@gluon.constexpr_function
def columns_layout(part, warps):
    """[8 columns, K]: 16-byte accesses."""
    return gl.BlockedLayout([1, 8], [256 // part, part // 8], [warps, 1], [1, 0])


@gluon.jit
def power_of_two(C):
    """A power of two that brings the largest |C| to 2^14 ... 2^15, and its reciprocal.

    So scaled, C is exact in fp16 down to 2^-29 of its maximum.
    """
    exponent = gl.maximum(gl.max((C.to(gl.float32).to(gl.int32, bitcast=True) >> 23) & 0xFF, 0), 15)
    return ((268 - exponent) << 23).to(gl.float32, bitcast=True), ((exponent - 14) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def load_columns(C_ptr, READ: gl.constexpr, N: gl.constexpr, PART: gl.constexpr, STAGED: gl.constexpr = False):
    """C for `stage_columns`, a tensor for each PART elements of K: in column n scale block n alone, zeros elsewhere."""
    BLOCK: gl.constexpr = PART // 8 if STAGED else block_of(READ) if block_of(READ) > 0 else PART
    LB: gl.constexpr = columns_layout(PART, gl.num_warps())
    n = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, LB)), 1)
    k = gl.expand_dims(gl.arange(0, PART, layout=gl.SliceLayout(0, LB)), 0)
    mask = n < 2 if READ == "bf16" else k // BLOCK == n
    parts = ()
    for p in gl.static_range(N // PART):
        parts = parts + (gl.load(C_ptr + p * PART + k + n * 0, mask=mask, other=0.0),)
    return parts


@gluon.jit
def stage_columns(C, factor, READ: gl.constexpr):
    """C as operands [K, 8] of the product with codes (nvfp4: with low and with high codes).

    bf16: column 0 holds C, column 1 what an fp16 C has more.
    """
    PART: gl.constexpr = C.shape[1]
    SHARED: gl.constexpr = columns_shared(8)
    LC: gl.constexpr = operand_layout(1, READ, PART, gl.num_warps())
    C = C.to(gl.float32)
    if READ == "bf16":
        n = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, columns_layout(PART, gl.num_warps()))), 1)
        upper = C.to(gl.bfloat16).to(gl.float32)
        columns = gl.where(n == 0, upper, C - upper).to(gl.bfloat16)
        operand = gl.allocate_shared_memory(gl.bfloat16, [8, PART], SHARED, columns).permute((1, 0)).load(LC)
        return operand, operand
    elif READ == "nvfp4":
        crossed = gl.permute(gl.reshape((C * factor).to(gl.float16), [8, PART // 8, 2, 2, 2]), (0, 1, 3, 2, 4))
        low, high = gl.split(gl.reshape(crossed, [8, PART // 2, 2]))
        staged_low = gl.allocate_shared_memory(gl.float16, [8, PART // 2], SHARED, low)
        staged_high = gl.allocate_shared_memory(gl.float16, [8, PART // 2], SHARED, high)
        return staged_low.permute((1, 0)).load(LC), staged_high.permute((1, 0)).load(LC)
    else:
        half = (C * factor).to(gl.float16)
        operand = gl.allocate_shared_memory(gl.float16, [8, PART], SHARED, half).permute((1, 0)).load(LC)
        return operand, operand


@gluon.jit
def load_codes(codes_ptr, first_k, READ: gl.constexpr, N: gl.constexpr, CHUNK: gl.constexpr):
    """A tile's codes of CHUNK elements of K, from the pointer to its first state row."""
    WARPS: gl.constexpr = gl.num_warps()
    LA: gl.constexpr = operand_layout(0, READ, CHUNK, WARPS)
    WIDTH: gl.constexpr = row_bytes(READ, CHUNK)
    rows = gl.expand_dims(gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, LA)) * row_bytes(READ, N), 1)
    k = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LA)), 0)
    return gl.load(codes_ptr + row_bytes(READ, first_k) + rows + k)


@gluon.jit
def load_scales(scales_ptr, first_k, READ: gl.constexpr, N: gl.constexpr, CHUNK: gl.constexpr):
    """A tile's block scales, laid out as the product's columns."""
    WARPS: gl.constexpr = gl.num_warps()
    BLOCK: gl.constexpr = block_of(READ)
    MMA: gl.constexpr = mma_layout(WARPS)
    rows = gl.expand_dims(gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, MMA)) * (N // BLOCK), 1)
    n = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, MMA)), 0)
    if CHUNK == 8 * BLOCK:
        return gl.load(scales_ptr + first_k // BLOCK + rows + n)
    else:
        return gl.load(scales_ptr + first_k // BLOCK + rows + n, mask=(n + rows * 0) * BLOCK < CHUNK, other=0.0)


@gluon.jit
def multiply(codes, low, high, acc, READ: gl.constexpr):
    """acc + codes times columns."""
    if READ == "nvfp4":
        codes_low, codes_high = crossed_halves_of_e2m1(codes)
        return mma_v2(codes_high, high, mma_v2(codes_low, low, acc))
    elif READ == "fp8":
        return mma_v2(half_of_e4m3(codes), low, acc)
    elif READ == "int8":
        return mma_v2(half_of_int8(codes), low, acc)
    else:
        return mma_v2(codes, low, acc)


@gluon.jit
def scale_sums(acc, scales, READ: gl.constexpr):
    """The columns' sums times their scales."""
    if READ == "nvfp4":
        return acc * from_e4m3(scales, True)
    elif READ == "int8":
        return acc * scales.to(gl.float32)
    else:
        return acc


@gluon.jit
def load_tile(codes_ptr, scales_ptr, tile, READ: gl.constexpr, N: gl.constexpr, PART: gl.constexpr):
    """Codes and scales of a tile, a tensor for each PART elements of K, as tuples."""
    TILE: gl.constexpr = 16 * gl.num_warps()
    BLOCK: gl.constexpr = block_of(READ)
    codes_ptr += tile * (TILE * row_bytes(READ, N))
    codes, scales = (), ()
    for p in gl.static_range(N // PART):
        codes = codes + (load_codes(codes_ptr, p * PART, READ, N, PART),)
        if BLOCK > 0:
            scales = scales + (load_scales(scales_ptr + tile * (TILE * (N // BLOCK)), p * PART, READ, N, PART),)
        else:
            scales = scales + (0.0,)
    return codes, scales


@gluon.jit
def state_sums(
    codes_ptr, scales_ptr, lows, highs,
    TILES: gl.constexpr, GROUP: gl.constexpr, READ: gl.constexpr, N: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """State rows times C, [tiles, TILE], still to be multiplied by what scales a whole row; GROUP tiles are in flight.

    A loop, and a short one: instructions that run once have to be fetched.
    """
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    TILE: gl.constexpr = 16 * gl.num_warps()
    PARTS: gl.constexpr = N // PART
    STACKED: gl.constexpr = max(1 << (TILES - 1).bit_length(), 8)
    column = gl.expand_dims(gl.arange(0, STACKED, layout=gl.SliceLayout(0, MMA)), 0)
    sums = gl.zeros([TILE, STACKED], gl.float32, layout=MMA)
    for first in range(0, TILES, GROUP):
        codes, scales = (), ()
        for i in gl.static_range(GROUP):
            tile_codes, tile_scales = load_tile(codes_ptr, scales_ptr, first + i, READ, N, PART)
            codes, scales = codes + tile_codes, scales + tile_scales
        for i in gl.static_range(GROUP):
            y = gl.zeros([TILE], gl.float32, layout=gl.SliceLayout(1, MMA))
            for p in gl.static_range(PARTS):
                acc = gl.zeros([TILE, 8], gl.float32, layout=MMA)
                acc = multiply(codes[i * PARTS + p], lows[p], highs[p], acc, READ)
                y += gl.sum(scale_sums(acc, scales[i * PARTS + p], READ), 1)
            sums = gl.where(column == first + i, gl.expand_dims(y, 1), sums)
    return gl.permute(sums, [1, 0])
