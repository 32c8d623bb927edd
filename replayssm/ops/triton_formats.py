"""Storage formats of `replayssm.quant` inside kernels, bit for bit: encoders and decoders of register tiles [V, K].

Pure functions of tiles, so that Gluon kernels can use them too (`gluon_formats`). 8-bit floats are bytes (uint8).
NATIVE: use sm_89's conversions and approximations that a Newton step makes exact; without it every target will do.
An encoder returns codes, scales and the fp32 values that a later read of them gives.
"""

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.ops.triton_numbers import (
    decode_blocks,
    from_e4m3,
    magnitude,
    nearest_integer,
    reciprocal,
    squared_error,
    to_e4m3,
)
from replayssm.ops.triton_nvfp4 import (
    decode_nvfp4,
    encode_nvfp4,
    encode_nvfp4_numbers,
    from_e2m1,
    global_scale,
    largest_finite,
    nearest_e2m1,
    pack_e2m1,
)

__all__ = [
    "decode_blocks",
    "decode_nvfp4",
    "encode_fp8",
    "encode_int8",
    "encode_nvfp4",
    "encode_nvfp4_numbers",
    "from_e2m1",
    "from_e4m3",
    "global_scale",
    "largest_finite",
    "magnitude",
    "nearest_e2m1",
    "nearest_integer",
    "pack_e2m1",
    "reciprocal",
    "row_scale",
    "squared_error",
    "to_e4m3",
]


@triton.jit
def encode_int8(x, NATIVE: tl.constexpr):
    """(codes int8 [V, K], scales fp16 [V, K / 32], values fp32 [V, K]) of fp32 x; see `quant.encoders.encode_int8`."""
    V: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    blocks = tl.reshape(x, [V, K // 32, 32])
    bits = tl.max(magnitude(blocks), 2)
    finite = bits < 0x7F800000
    largest = tl.where(finite, bits, 0x3F800000).to(tl.float32, bitcast=True)
    wanted = tl.minimum(tl.maximum(largest * (1.0 / 127.0), 5.9604644775390625e-08), 65504.0)
    half = wanted.to(tl.float16)
    half = (half.to(tl.int16, bitcast=True) + (half.to(tl.float32) < wanted).to(tl.int16)).to(tl.float16, bitcast=True)
    inverse = tl.expand_dims(reciprocal(half.to(tl.float32), NATIVE), 2)
    clean = tl.where(tl.expand_dims(finite, 2), blocks, 0.0)
    scaled = tl.minimum(tl.maximum(clean * inverse, -127.0), 127.0) + 12582912.0
    scales = tl.where(finite, half, float("nan"))
    values = (scaled - 12582912.0) * tl.expand_dims(scales.to(tl.float32), 2)
    codes = scaled.to(tl.int32, bitcast=True).to(tl.int8)
    return tl.reshape(codes, [V, K]), scales, tl.reshape(values, [V, K])


@triton.jit
def row_scale(largest, TARGET: tl.constexpr, NATIVE: tl.constexpr):
    """fp8's scale that brings `largest` to TARGET, and its reciprocal."""
    bits = tl.maximum(largest * (1.0 / TARGET), 7.888609052210118e-31).to(tl.int32, bitcast=True)
    scale = ((bits + 0x80) & -256).to(tl.float32, bitcast=True)
    return scale, reciprocal(scale, NATIVE)


@triton.jit
def encode_fp8(x, NATIVE: tl.constexpr):
    """(e4m3 bytes [V, K], scales fp32 [V], values fp32 [V, K]) of fp32 x; see `quant.encoders.encode_fp8`."""
    bits = tl.max(magnitude(x), 1)
    finite = bits < 0x7F800000
    largest = tl.where(finite, bits, 0x3F800000).to(tl.float32, bitcast=True)
    clean = tl.where(tl.expand_dims(finite, 1), x, 0.0)
    first, inverse = row_scale(largest, 448.0, NATIVE)
    second, other = row_scale(largest, 288.0, NATIVE)
    unit = tl.expand_dims(inverse, 1)
    code_1 = to_e4m3(clean * unit, NATIVE)
    code_2 = to_e4m3(clean * tl.expand_dims(other, 1), NATIVE)
    value_1 = from_e4m3(code_1, NATIVE) * tl.expand_dims(first, 1)
    value_2 = from_e4m3(code_2, NATIVE) * tl.expand_dims(second, 1)
    error_1 = tl.sum(squared_error((clean - value_1) * unit, 4096.0), 1)
    error_2 = tl.sum(squared_error((clean - value_2) * unit, 4096.0), 1)
    better = error_2 < error_1
    codes = tl.where(tl.expand_dims(better, 1), code_2, code_1)
    scales = tl.where(finite, tl.where(better, second, first), float("nan"))
    values = tl.where(tl.expand_dims(better, 1), value_2, value_1)
    return codes, scales, tl.where(tl.expand_dims(finite, 1), values, float("nan"))
