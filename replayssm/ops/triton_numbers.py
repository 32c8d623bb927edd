"""Numbers inside kernels, bit for bit: magnitudes, reciprocals of scales, integers, e4m3 as bytes (uint8).

NATIVE: use sm_89's conversions and approximations that a Newton step makes exact; without it every target will do.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitude(x):
    """Bits of |x|: as integers in the order of the values, infinity and NaN last."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def reciprocal(scale, NATIVE: tl.constexpr):
    """1 / scale, correctly rounded, for scales of at most 16 significant bits."""
    if NATIVE:
        near = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [scale], tl.float32, True, 1)
        return tl.fma(near, tl.fma(-scale, near, 1.0), near)
    else:
        return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def nearest_integer(x, NATIVE: tl.constexpr):
    """int32 nearest to x, ties to even, 0 <= x < 2^31."""
    if NATIVE:
        return tl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,r", [x], tl.int32, True, 1)
    else:
        # From 2^23 on every number is an integer.
        return tl.where(x < 8388608.0, (x + 8388608.0) - 8388608.0, x).to(tl.int32)


@triton.jit
def squared_error(difference, resolution: tl.constexpr):
    """Squares as whole numbers of 1 / resolution, for |difference| that give less than 2^22."""
    square = difference * difference
    return (square * resolution + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000


@triton.jit
def to_e4m3(y, NATIVE: tl.constexpr):
    """Byte of the nearest e4m3 number, ties to even, saturating; y is finite."""
    if NATIVE:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        a = tl.minimum(tl.abs(y), 448.0)
        # One unit of the sum's last place is a step of e4m3 at a.
        power = (tl.maximum(a, 0.015625).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        q = (a + power * 1572864.0) - power * 1572864.0
        normal = (q.to(tl.int32, bitcast=True) >> 20) - 960
        code = tl.where(q < 0.015625, (q * 512.0).to(tl.int32), normal)
        return (code | ((y.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_e4m3(code, NATIVE: tl.constexpr):
    """fp32 value of a byte; 0x7F and 0xFF are NaN."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        c = code.to(tl.int32)
        half = ((c & 0x80) << 8) | ((c & 0x7F) << 7)
        value = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((c & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def decode_blocks(codes, scales, BLOCK: tl.constexpr):
    """codes [V, K] x scales [V, K / BLOCK], both fp32."""
    V: tl.constexpr = codes.shape[0]
    K: tl.constexpr = codes.shape[1]
    return tl.reshape(tl.reshape(codes, [V, K // BLOCK, BLOCK]) * tl.expand_dims(scales, 2), [V, K])
