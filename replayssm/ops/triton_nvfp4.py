"""nvfp4 of `replayssm.quant` inside kernels, bit for bit, of register tiles [V, K]; NATIVE as in `triton_numbers`."""

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


@triton.jit
def from_e2m1(code):
    """fp32 value of a code 0 ... 15: its bits, as sign, low exponent and high mantissa bits of an fp16, times 2^14."""
    c = code.to(tl.int32)
    half = ((c & 0x8) << 12) | ((c & 0x7) << 9)
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def nearest_e2m1(a):
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 to 0 <= a <= 6, ties to the even code."""
    power = (tl.maximum(a, 1.0).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # One unit of the sum's last place is a step of E2M1 at a; the product is exact.
    return tl.fma(power, -6291456.0, tl.fma(power, 6291456.0, a))


@triton.jit
def pack_e2m1(low, high, keep, NATIVE: tl.constexpr):
    """Bytes of the codes of E2M1 numbers: a number times 2^-14 is an fp16 whose bits are `s 0 0 0 e e m 0 ...`.

    keep: -1, or 0 for codes of zero.
    """
    if NATIVE:
        # Two numbers a register, four apart in the word; a shift brings the sign beside the code.
        # Codes are selected, not joined by OR: a thread with less than four bytes has undefined others.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, t, u;
            cvt.rn.f16x2.f32 a, $3, $1;
            cvt.rn.f16x2.f32 b, $7, $5;
            cvt.rn.f16x2.f32 c, $4, $2;
            cvt.rn.f16x2.f32 d, $8, $6;
            mov.b32 u, 0x04000400;
            mul.rn.f16x2 a, a, u;
            mul.rn.f16x2 b, b, u;
            mul.rn.f16x2 c, c, u;
            mul.rn.f16x2 d, d, u;
            shr.u32 t, a, 3;
            lop3.b32 a, t, a, 0xF000F000, 0xE4;
            shr.u32 t, b, 3;
            lop3.b32 b, t, b, 0xF000F000, 0xE4;
            shr.u32 t, c, 3;
            lop3.b32 c, t, c, 0xF000F000, 0xE4;
            shr.u32 t, d, 3;
            lop3.b32 d, t, d, 0xF000F000, 0xE4;
            shr.u32 a, a, 9;
            shr.u32 b, b, 5;
            shr.u32 c, c, 1;
            shl.b32 d, d, 3;
            lop3.b32 a, a, b, 0x000F000F, 0xE4;
            lop3.b32 c, c, d, 0x0F000F00, 0xE4;
            lop3.b32 a, a, c, 0x00FF00FF, 0xE4;
            and.b32 $0, a, $9;
            }""",
            "=r,r,r,r,r,r,r,r,r,r,r,r,r", [low, high, keep], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        bits_low = (low * 6.103515625e-05).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        bits_high = (high * 6.103515625e-05).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        code_low = ((bits_low >> 9) & 0x7) | ((bits_low >> 12) & 0x8)
        return ((code_low | ((bits_high >> 5) & 0x70) | ((bits_high >> 8) & 0x80)) & keep).to(tl.uint8)


@triton.jit
def global_scale(bits):
    """nvfp4's scale of a head, and its reciprocal, from the largest finite `magnitude` of the head."""
    exponent = tl.maximum(((bits + 0x1FFFFF) >> 23) - 10, 27) << 23
    return exponent.to(tl.float32, bitcast=True), (0x7F000000 - exponent).to(tl.float32, bitcast=True)


@triton.jit
def largest_finite(x):
    """[V]: each row's largest `magnitude` in blocks without NaN or infinity; `global_scale` takes the head's."""
    V: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    bits = tl.max(magnitude(tl.reshape(x, [V, K // 16, 16])), 2)
    return tl.max(tl.where(bits < 0x7F800000, bits, 0), 1)


@triton.jit
def encode_nvfp4(x, scale, inverse_scale, NATIVE: tl.constexpr):
    """(bytes [V, K / 2], e4m3 bytes of block scales [V, K / 16], values fp32 [V, K]) of fp32 x.

    scale, inverse_scale: the head's, of `global_scale`. See `quant.nvfp4.encode`; magnitudes suffice until the end.
    """
    codes, scales, numbers, read, _ = encode_nvfp4_numbers(x, scale, inverse_scale, True, NATIVE)
    return codes, scales, tl.reshape(numbers * tl.expand_dims(read, 2), x.shape)


@triton.jit
def encode_nvfp4_numbers(x, scale, inverse_scale, EXACT: tl.constexpr, NATIVE: tl.constexpr):
    """`encode_nvfp4` with its values as the codes' numbers [V, K / 16, 16] and what multiplies them [V, K / 16].

    Without EXACT squared errors are summed in fp32, at a third of the cost; the last result tells where they are so
    close to each other that their integer sums might choose otherwise.
    """
    V: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    blocks = tl.reshape(x, [V, K // 16, 16])
    bits = tl.max(magnitude(blocks), 2)
    finite = bits < 0x7F800000
    largest = tl.where(finite, bits, 0).to(tl.float32, bitcast=True) * inverse_scale
    a = tl.abs(blocks) * inverse_scale
    code_1 = to_e4m3(tl.maximum(largest * (1.0 / 6.0), 0.001953125), NATIVE)
    code_2 = to_e4m3(tl.maximum(largest * (1.0 / 4.0), 0.001953125), NATIVE)
    scale_1 = from_e4m3(code_1, NATIVE)
    scale_2 = from_e4m3(code_2, NATIVE)
    unit = tl.expand_dims(reciprocal(scale_1, NATIVE), 2)
    q_1 = nearest_e2m1(tl.minimum(a * unit, 6.0))
    # Only the first scale may saturate, where it is subnormal: the second is at most 448, and rounded down leaves < 6.
    q_2 = nearest_e2m1(a * tl.expand_dims(reciprocal(scale_2, NATIVE), 2))
    off_1 = a - q_1 * tl.expand_dims(scale_1, 2)
    off_2 = a - q_2 * tl.expand_dims(scale_2, 2)
    if EXACT:
        off_1 = off_1 * unit
        # Where the first scale is the smallest there is, its largest element may be off by three: past `squared_error`.
        error_1 = tl.sum(nearest_integer(off_1 * off_1 * 1048576.0, NATIVE), 2)
        error_2 = tl.sum(squared_error(off_2 * unit, 1048576.0), 2)
        better = error_2 < error_1
        doubtful = better & (error_2 > error_1)
    else:
        step = scale_1 * 0.0009765625
        sum_1 = tl.sum(off_1 * off_1, 2)
        sum_2 = tl.sum(off_2 * off_2, 2)
        better = sum_2 < sum_1
        # 16 roundings to integers in steps of 2^-20 of the first scale's square, and some 20 of fp32.
        slack = 16.5 * step * step + (sum_1 + sum_2) * 1.9073486328125e-06
        doubtful = (tl.abs(sum_1 - sum_2) <= slack) & (code_1 != code_2) & (sum_1 + sum_2 > 0.0)
    q = tl.where(tl.expand_dims(better, 2), q_2, q_1)
    sign = blocks.to(tl.int32, bitcast=True) & -0x80000000
    numbers = (q.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    low, high = tl.split(tl.reshape(numbers, [V, K // 16, 8, 2]))
    keep = tl.broadcast_to(tl.expand_dims(tl.where(finite, -1, 0), 2), [V, K // 16, 16])
    keep, _ = tl.split(tl.reshape(keep, [V, K // 16, 8, 2]))
    codes = tl.reshape(pack_e2m1(low, high, keep, NATIVE), [V, K // 2])
    scales = tl.where(finite, tl.where(better, code_2, code_1), 0x7F).to(tl.uint8)
    read = tl.where(finite, tl.where(better, scale_2, scale_1), float("nan")) * scale
    return codes, scales, numbers, read, doubtful


@triton.jit
def decode_nvfp4(bytes, scales, scale, NATIVE: tl.constexpr):
    """fp32 [V, K] of packed codes [V, K / 2], block scales' bytes [V, K / 16] and the head's scale."""
    V: tl.constexpr = bytes.shape[0]
    K: tl.constexpr = bytes.shape[1] * 2
    codes = tl.reshape(tl.join(from_e2m1(bytes & 0xF), from_e2m1(bytes >> 4)), [V, K])
    return decode_blocks(codes, from_e4m3(scales, NATIVE), 16) * scale
