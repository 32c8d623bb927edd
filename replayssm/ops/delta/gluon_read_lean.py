"""Encoders for the accumulators' registers, in which a thread holds nvfp4's blocks whole and a quad int8's."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_read_encode import nearest_integer, squared_error
from replayssm.ops.gluon_encode import from_e4m3, larger, pack_codes, reciprocal, round_e2m1, to_e4m3


@gluon.jit
def encode_int8(x):
    """`triton_formats.encode_int8` of x [V, 32], one block a row: codes, scales [V] fp16 and the codes in fp32."""
    largest = gl.reduce(gl.abs(x), 1, larger)
    finite = largest < float("inf")
    largest = gl.where(finite, largest, 1.0)
    wanted = gl.minimum(gl.maximum(largest * (1.0 / 127.0), 5.9604644775390625e-08), 65504.0)
    half = wanted.to(gl.float16)
    up = (half.to(gl.float32) < wanted).to(gl.int16)
    half = (half.to(gl.int16, bitcast=True) + up).to(gl.float16, bitcast=True)
    inverse = gl.where(finite, reciprocal(half.to(gl.float32), True), 0.0)
    # Between bounds of zero NaN becomes zero.
    most = gl.where(finite, 127.0, 0.0)
    scaled = gl.maximum(x * gl.expand_dims(inverse, 1), gl.expand_dims(most * -1.0, 1))
    scaled = gl.minimum(scaled, gl.expand_dims(most, 1)) + 12582912.0
    codes = scaled.to(gl.int32, bitcast=True).to(gl.int8)
    return codes, gl.where(finite, half, float("nan")), scaled - 12582912.0


@gluon.jit
def any_of(x):
    """Whether any element of [V, n] is true, as 0 or 1 for the whole program."""
    return gl.max(gl.max(x.to(gl.int32), 1), 0)


@gluon.jit
def squared_errors(a, unit, full):
    """The codes of |x| with a scale, times 2^-14, and the sums over blocks of 16 of their squared errors in fp32.

    a [V, n, 16]; unit, full [V, n].
    """
    q = round_e2m1(a * gl.expand_dims(unit * 0.00006103515625, 2))
    q, minus = gl.broadcast(q, gl.expand_dims(full * -1.0, 2))
    off = gl.fma(q, minus, a)
    return q, gl.sum(off * off, 2)


@gluon.jit
def second_is_better(a, unit_1, unit_2, full_1, full_2):
    """Whether the second scale has the lower squared error by the format's integer sums [V, n]; a is finite."""
    q_1 = round_e2m1(gl.minimum(a * gl.expand_dims(unit_1 * 0.00006103515625, 2), 0.0003662109375))
    # No element is past six of the second scale, however that was rounded.
    q_2 = round_e2m1(a * gl.expand_dims(unit_2 * 0.00006103515625, 2))
    q_1, minus_1 = gl.broadcast(q_1, gl.expand_dims(full_1 * -1.0, 2))
    q_2, minus_2 = gl.broadcast(q_2, gl.expand_dims(full_2 * -1.0, 2))
    off_1 = gl.fma(q_1, minus_1, a) * gl.expand_dims(unit_1 * 1024.0, 2)
    off_2 = gl.fma(q_2, minus_2, a) * gl.expand_dims(unit_1, 2)
    # Where the first scale is the smallest there is, its largest element may be off by three: past the magic sum.
    error_1 = nearest_integer(off_1 * off_1, True)
    error_2 = squared_error(off_2, 1048576.0)
    return gl.sum(error_2 - error_1, 2) < 0


@gluon.jit
def encode_nvfp4(x, scale, inverse_scale):
    """`triton_formats.encode_nvfp4` with fewer instructions, for x [V, 16 n] of which a thread holds whole blocks.

    Returns bytes, block scales' bytes, signed codes times 2^-14 [V, n, 16], and what they are to be multiplied by.
    Everything stays times the head's scale and codes times 2^-14, powers of two that change no rounding. Where the fp32
    sums of squared errors are so close that the format's integer sums might choose otherwise, those decide.
    """
    V: gl.constexpr = x.shape[0]
    BLOCKS: gl.constexpr = x.shape[1] // 16
    x = gl.reshape(x, [V, BLOCKS, 16])
    largest = gl.reduce(gl.abs(x), 2, larger)
    finite = largest < float("inf")
    largest = gl.where(finite, largest, 0.0) * inverse_scale
    byte_1 = to_e4m3(gl.maximum(largest * (1.0 / 6.0), 0.001953125), True)
    byte_2 = to_e4m3(gl.maximum(largest * (1.0 / 4.0), 0.001953125), True)
    scale_1 = from_e4m3(byte_1, True)
    scale_2 = from_e4m3(byte_2, True)
    inverse_1 = reciprocal(scale_1, True)
    unit_1 = inverse_1 * inverse_scale
    unit_2 = reciprocal(scale_2, True) * inverse_scale
    full_1 = scale_1 * (scale * 16384.0)
    full_2 = scale_2 * (scale * 16384.0)
    q_1, sum_1 = squared_errors(gl.abs(x), unit_1, full_1)
    q_2, sum_2 = squared_errors(gl.abs(x), unit_2, full_2)
    better = sum_2 < sum_1
    q = gl.where(gl.expand_dims(better, 2), q_2, q_1)
    # 16 roundings to integers in steps of 2^-20 of the first scale's square, and some 20 of fp32.
    step = full_1 * 5.960464477539063e-08
    total = sum_1 + sum_2
    close = gl.abs(sum_1 - sum_2) <= 16.5 * step * step + total * 1.9073486328125e-06
    close = close & (byte_1 != byte_2) & (total > 0.0)
    # Squares may leave fp32's range, and where the first scale is subnormal codes may have to saturate.
    far = (inverse_scale < 9.094947017729282e-13) | (inverse_scale > 1099511627776.0)
    close = close | (largest * inverse_1 >= 7.0) | (far & (largest > 0.0))
    if any_of(close) > 0:
        y = gl.where(gl.expand_dims(finite, 2), gl.abs(x), 0.0)
        better = second_is_better(y, unit_1, unit_2, full_1, full_2)
        unit = gl.where(better, unit_2, unit_1)
        q = round_e2m1(gl.minimum(y * gl.expand_dims(unit * 0.00006103515625, 2), 0.0003662109375))
    sign = x.to(gl.int32, bitcast=True) & -0x80000000
    signed = (q.to(gl.int32, bitcast=True) | sign).to(gl.float32, bitcast=True)
    full = gl.where(finite, gl.where(better, full_2, full_1), float("nan"))
    low, high = gl.split(gl.reshape(signed, [V, BLOCKS * 8, 2]))
    scales = gl.where(finite, gl.where(better, byte_2, byte_1), 0x7F).to(gl.uint8)
    keep, _ = gl.broadcast(gl.expand_dims(gl.where(finite, -1, 0), 2), signed)
    keep, _ = gl.split(gl.reshape(keep, [V, BLOCKS * 8, 2]))
    return pack_codes(low, high, keep), scales, signed, full
