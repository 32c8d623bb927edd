"""Encoders of the read copy for registers in which a thread holds whole blocks; see `triton_formats` for the others."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops import triton_formats as _triton
from replayssm.ops.gluon_encode import from_e4m3, larger, reciprocal, to_e4m3

nearest_integer = gluon.jit(_triton.nearest_integer.fn)
squared_error = gluon.jit(_triton.squared_error.fn)


@gluon.jit
def nearest_code(a):
    """The nearest of E2M1's magnitudes, times 2^-14, to 0 <= a <= 6 * 2^-14, ties to the even code."""
    power = (gl.maximum(a, 0.00006103515625).to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    # One unit of the sum's last place is a step of E2M1 at a; the product is exact.
    return gl.fma(power, -6291456.0, gl.fma(power, 6291456.0, a))


@gluon.jit
def packed_codes(x):
    """Bytes, of which every even one holds its element's E2M1 code and the next one's; x is the signed value / 2^14."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 h, g;
        .reg .b32 w, s;
        cvt.rn.satfinite.e5m2x2.f32 h, $2, $1;
        cvt.rn.satfinite.e5m2x2.f32 g, $4, $3;
        mov.b32 w, {h, g};
        shr.u32 s, w, 4;
        shr.u32 w, w, 1;
        and.b32 w, w, 0x07070707;
        lop3.b32 w, s, 0x08080808, w, 0xEA;
        shr.u32 s, w, 4;
        or.b32 $0, w, s;
        }""",
        "=r,r,r,r,r", [x], dtype=gl.uint8, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def encode_nvfp4(x, scale, inverse_scale):
    """`triton_formats.encode_nvfp4` with fewer instructions, for x [V, 16 n] in `block_layout`.

    Returns bytes, block scales' bytes, signed codes times 2^-14 [V, n, 16], and what they are to be multiplied by.
    Everything stays times the head's scale and codes times 2^-14, powers of two that change no rounding.
    """
    V: gl.constexpr = x.shape[0]
    BLOCKS: gl.constexpr = x.shape[1] // 16
    blocks = gl.reshape(x, [V, BLOCKS, 16])
    largest = gl.reduce(gl.abs(blocks), 2, larger)
    finite = largest < float("inf")
    largest = gl.where(finite, largest, 0.0) * inverse_scale
    byte_1 = to_e4m3(gl.maximum(largest * (1.0 / 6.0), 0.001953125), True)
    byte_2 = to_e4m3(gl.maximum(largest * (1.0 / 4.0), 0.001953125), True)
    scale_1 = from_e4m3(byte_1, True)
    scale_2 = from_e4m3(byte_2, True)
    unit_1 = reciprocal(scale_1, True) * inverse_scale
    unit_2 = reciprocal(scale_2, True) * inverse_scale
    y = gl.where(gl.expand_dims(finite, 2), blocks, 0.0)
    a = gl.abs(y)
    q_1 = nearest_code(gl.minimum(a * gl.expand_dims(unit_1 * 0.00006103515625, 2), 0.0003662109375))
    # No element is past six of the second scale, however that was rounded.
    q_2 = nearest_code(a * gl.expand_dims(unit_2 * 0.00006103515625, 2))
    full_1 = scale_1 * (scale * 16384.0)
    full_2 = scale_2 * (scale * 16384.0)
    q_1, minus_1 = gl.broadcast(q_1, gl.expand_dims(-full_1, 2))
    q_2, minus_2 = gl.broadcast(q_2, gl.expand_dims(-full_2, 2))
    off_1 = gl.fma(q_1, minus_1, a) * gl.expand_dims(unit_1 * 1024.0, 2)
    off_2 = gl.fma(q_2, minus_2, a) * gl.expand_dims(unit_1, 2)
    # Where the first scale is the smallest there is, its largest element may be off by three: past the magic sum.
    error_1 = nearest_integer(off_1 * off_1, True)
    error_2 = squared_error(off_2, 1048576.0)
    better = gl.sum(error_2 - error_1, 2) < 0
    q = gl.where(gl.expand_dims(better, 2), q_2, q_1)
    signed = (q.to(gl.int32, bitcast=True) | (y.to(gl.int32, bitcast=True) & -0x80000000)).to(gl.float32, bitcast=True)
    full = gl.where(finite, gl.where(better, full_2, full_1), float("nan"))
    codes, _ = gl.split(gl.reshape(packed_codes(signed), [V, BLOCKS * 8, 2]))
    return codes, gl.where(finite, gl.where(better, byte_2, byte_1), 0x7F).to(gl.uint8), signed, full


@gluon.jit
def second_minus_first(x, first, inverse, second, other):
    """[V]: the squared error of finite rows x [V, n] in fp8 by the second scale less that by the first."""
    unit = gl.expand_dims(inverse, 1)
    off_1 = (x - from_e4m3(to_e4m3(x * unit, True), True) * gl.expand_dims(first, 1)) * unit
    off_2 = (x - from_e4m3(to_e4m3(x * gl.expand_dims(other, 1), True), True) * gl.expand_dims(second, 1)) * unit
    return gl.sum(squared_error(off_2, 4096.0) - squared_error(off_1, 4096.0), 1)
