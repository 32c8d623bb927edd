"""Stochastic rounding inside kernels, bit for bit as `replayssm.rounding`: pure functions of register tiles [V, K]."""

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.ops.triton_formats import encode_fp8, from_e4m3, reciprocal


@triton.jit
def random_words(seed, flush, stream, first, V: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr):
    """uint32 [V, K]: the words of elements `first + v STRIDE + k` of a slot; first and STRIDE divisible by 4."""
    quads = first // 4 + tl.arange(0, V)[:, None] * (STRIDE // 4) + tl.arange(0, K // 4)[None, :]
    zeros = tl.zeros_like(quads)
    w0, w1, w2, w3 = tl.philox(seed, quads, zeros + flush, zeros + stream, zeros)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [V, K])


@triton.jit
def rounded_code(x, words, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr, LARGEST: tl.constexpr):
    """int32 code of |x| in a format of MANTISSA bits whose smallest normal number has exponent SMALLEST.

    LARGEST: the code that larger numbers get. See `rounding.round_stochastic`; NaN is the caller's.
    """
    bits = x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    exponent = tl.maximum(bits >> 23, 1).to(tl.int32)
    implicit = tl.where(bits >= 0x800000, 0x800000, 0).to(tl.uint32)
    shift = 23 - MANTISSA + tl.maximum(SMALLEST + 127 - exponent, 0)
    # From shift 33 on the significand loses what is under 2^-32 of a step.
    kept = ((bits & 0x7FFFFF) | implicit) >> tl.minimum(tl.maximum(shift - 32, 0), 31).to(tl.uint32)
    some = tl.minimum(shift, 31).to(tl.uint32)
    rounded = (kept + (words >> (32 - some))) >> some
    # At shift 32 the sum has 33 bits, of which the highest is wanted: the carry.
    rounded = tl.where(shift >= 32, ((kept + words) < kept).to(tl.uint32), rounded).to(tl.int32)
    return tl.minimum((tl.maximum(exponent - SMALLEST - 127, 0) << MANTISSA) + rounded, LARGEST)


@triton.jit
def round_to(x, words, DTYPE: tl.constexpr):
    """fp32 x in DTYPE (fp16 or bf16); NaN stays NaN."""
    sign = (x.to(tl.int32, bitcast=True) >> 16) & 0x8000
    if DTYPE == tl.bfloat16:
        code = rounded_code(x, words, 7, -126, 0x7F80)
    else:
        code = rounded_code(x, words, 10, -14, 0x7C00)
    rounded = (code | sign).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.where(x == x, rounded, x.to(DTYPE))


@triton.jit
def write_rounded(
    S, words, state_ptr, scales_ptr, V: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr
):  # fmt: skip
    """Round the tile S of a head [V, K] to the checkpoint's format and write; returns what the memory now holds."""
    v = tl.arange(0, S.shape[0])
    k = tl.arange(0, S.shape[1])
    at = v[:, None] * K + k[None, :]
    ok = (v < V)[:, None] & (k < K)[None, :]
    if FORMAT == "fp8":
        codes, scales, values = encode_fp8_by_words(S, words, NATIVE)
        tl.store(state_ptr + at, codes, mask=ok)
        tl.store(scales_ptr + v, scales, mask=v < V)
        return values
    else:
        rounded = round_to(S, words, state_ptr.dtype.element_ty)
        tl.store(state_ptr + at, rounded, mask=ok)
        return rounded.to(tl.float32)


@triton.jit
def encode_fp8_by_words(x, words, NATIVE: tl.constexpr):
    """(e4m3 bytes [V, K], scales fp32 [V], values fp32 [V, K]): the scales are those of the nearest rounding."""
    _codes, scales, _values = encode_fp8(x, NATIVE)
    finite = scales == scales
    inverse = tl.expand_dims(reciprocal(tl.where(finite, scales, 1.0), NATIVE), 1)
    scaled = tl.where(tl.expand_dims(finite, 1), x, 0.0) * inverse
    sign = (scaled.to(tl.int32, bitcast=True) >> 24) & 0x80
    codes = (rounded_code(scaled, words, 3, -6, 0x7E) | sign).to(tl.uint8)
    return codes, scales, from_e4m3(codes, NATIVE) * tl.expand_dims(scales, 1)
