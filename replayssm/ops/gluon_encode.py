"""Encoders of Gluon kernels with fewer instructions than those of `triton_formats`, and the same bytes.

For registers in which a thread holds whole blocks of nvfp4, or four neighbours along K.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import PropagateNan

from replayssm.ops import triton_formats as _triton

_ALL = gl.constexpr(PropagateNan.ALL)
_DOWN = gl.constexpr(6.103515625e-05)  # 2^-14: e2m1 numbers times it are fp16 numbers with the codes' bits

row_scale = gluon.jit(_triton.row_scale.fn)
reciprocal = gluon.jit(_triton.reciprocal.fn)
to_e4m3 = gluon.jit(_triton.to_e4m3.fn)
from_e4m3 = gluon.jit(_triton.from_e4m3.fn)


@gluon.jit
def larger(a, b):
    """The maximum, or NaN."""
    return gl.maximum(a, b, propagate_nan=_ALL)


@gluon.jit
def round_e2m1(t, unit: gl.constexpr = _DOWN):
    """Nearest E2M1 number times `unit` to t, ties to the even code, 0 <= t < 7 units.

    m 2^22 is a multiple of the step of E2M1 at t, which is the unit of the difference's last place; the unit is half of
    that only where the difference falls below a power of two, and t is then next to a number of E2M1. At a tie the
    last bits of t are zero, so the difference's parity is the code's.
    """
    m = gl.maximum(t, 2.0 * unit)
    return gl.fma(m, 4194304.0, gl.fma(m, -4194304.0, t))


@gluon.jit
def scaled_magnitude(x, factor):
    """|x| factor, rounded: the compiler would multiply once more to fuse the product with a later difference."""
    x, factor = gl.broadcast(x, factor)
    return gl.inline_asm_elementwise(
        "{ .reg .f32 a; abs.f32 a, $1; mul.rn.f32 $0, a, $2; }", "=f,f,f", [x, factor], dtype=gl.float32,
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def pack_codes(low, high, keep):
    """Bytes of codes of signed E2M1 numbers times 2^-14; keep: -1, or 0 for codes of zero.

    As fp16 their bits are `s 0 0 0 e e m 0 ...`: two numbers a register, four apart in the word; a shift brings the
    sign beside the code.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, t;
        cvt.rn.f16x2.f32 a, $3, $1;
        cvt.rn.f16x2.f32 b, $7, $5;
        cvt.rn.f16x2.f32 c, $4, $2;
        cvt.rn.f16x2.f32 d, $8, $6;
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
        lop3.b32 a, a, b, c, 0xFE;
        or.b32 a, a, d;
        and.b32 $0, a, $9;
        }""",
        "=r,r,r,r,r,r,r,r,r,r,r,r,r", [low, high, keep], dtype=gl.uint8, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def pack_numbers(low, high, keep):
    """`pack_codes` of numbers times 2^-6: as e4m3 their bits are `s 0 0 e e m 0 0`, four numbers a register."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 h, g;
        .reg .b32 a, b, t;
        cvt.rn.satfinite.e4m3x2.f32 h, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 g, $4, $3;
        mov.b32 a, {h, g};
        cvt.rn.satfinite.e4m3x2.f32 h, $6, $5;
        cvt.rn.satfinite.e4m3x2.f32 g, $8, $7;
        mov.b32 b, {h, g};
        shr.u32 t, a, 4;
        shr.u32 a, a, 2;
        lop3.b32 a, a, t, 0x07070707, 0xE4;
        shl.b32 t, b, 2;
        lop3.b32 b, t, b, 0x70707070, 0xE4;
        lop3.b32 a, a, b, 0x0F0F0F0F, 0xE4;
        and.b32 $0, a, $9;
        }""",
        "=r,r,r,r,r,r,r,r,r,r,r,r,r", [low, high, keep], dtype=gl.uint8, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def encode_blocks(x, scale, inverse_scale):
    """As `triton_formats.encode_nvfp4_numbers`, of fp32 x [V, K], errors summed up in fp32.

    The bytes are right except where a block is doubtful: such a head has to be encoded again, exactly.
    Returns bytes [V, K / 2], block scales' bytes [V, K / 16], numbers [V, K / 16, 16], what multiplies them
    [V, K / 16], and which blocks are doubtful.
    """
    V: gl.constexpr = x.shape[0]
    K: gl.constexpr = x.shape[1]
    blocks = gl.reshape(x, [V, K // 16, 16])
    largest = gl.reduce(gl.abs(blocks), 2, larger)
    finite = largest.to(gl.int32, bitcast=True) < 0x7F800000
    largest = gl.where(finite, largest, 0.0) * inverse_scale
    code_1 = to_e4m3(gl.maximum(largest * (1.0 / 6.0), 0.001953125), True)
    code_2 = to_e4m3(gl.maximum(largest * (1.0 / 4.0), 0.001953125), True)
    scale_1, scale_2 = from_e4m3(code_1, True), from_e4m3(code_2, True)
    unit_1, unit_2 = reciprocal(scale_1, True), reciprocal(scale_2, True)
    # The head's scale is a power of two: all products with it are exact in the range that is not doubtful.
    down, up = inverse_scale * 0.015625, scale * 64.0
    t_1 = scaled_magnitude(blocks, gl.expand_dims(unit_1 * down, 2))
    t_2 = scaled_magnitude(blocks, gl.expand_dims(unit_2 * down, 2))
    # Only the first scale may saturate, where it is subnormal, and such blocks are doubtful: the second is at most 448,
    # and rounded down leaves < 6.
    q_1, q_2 = round_e2m1(t_1, 0.015625), round_e2m1(t_2, 0.015625)
    off_1, off_2 = t_1 - q_1, t_2 - q_2
    read_1, read_2 = scale_1 * up, scale_2 * up
    square_1, square_2 = read_1 * read_1, read_2 * read_2
    sum_1 = gl.sum(off_1 * off_1, 2) * square_1
    sum_2 = gl.sum(off_2 * off_2, 2) * square_2
    better = sum_2 < sum_1
    # 16 roundings to integers in steps of 2^-20 of the first scale's square; the rounding of t, up to 2^-24 of 9: at
    # most 2.2e-6 (1 + sum) each, of sums in the scale's own squares; and some 20 of fp32.
    total = sum_1 + sum_2
    slack = (square_1 * 1.8e-05 + square_2 * 2.2e-06) * 0.000244140625 + total * 4.2e-06
    # Where sums of squares may leave the range of fp32.
    far = (inverse_scale < 9.094947017729282e-13) | (inverse_scale > 1099511627776.0)
    saturates = largest * unit_1 >= 6.5
    doubtful = (total > 0.0) & (far | saturates | ((code_1 != code_2) & (gl.abs(sum_1 - sum_2) <= slack)))
    q = gl.where(gl.expand_dims(better, 2), q_2, q_1)
    q = (q.to(gl.int32, bitcast=True) | (blocks.to(gl.int32, bitcast=True) & -0x80000000)).to(gl.float32, bitcast=True)
    low, high = gl.split(gl.reshape(q, [V, K // 16, 8, 2]))
    keep = gl.expand_dims(gl.where(finite, -1, 0), 2) + gl.zeros_like(q).to(gl.int32)
    keep, _ = gl.split(gl.reshape(keep, [V, K // 16, 8, 2]))
    codes = gl.reshape(pack_numbers(low, high, keep), [V, K // 2])
    scales = gl.where(finite, gl.where(better, code_2, code_1), 0x7F).to(gl.uint8)
    return codes, scales, q, gl.where(finite, gl.where(better, read_2, read_1), float("nan")), doubtful


@gluon.jit
def encode_numbers_int8(x):
    """`triton_formats.encode_int8` of fp32 x [V, K]: codes int8 [V, K], scales fp16 [V, K / 32], the codes in fp32."""
    V: gl.constexpr = x.shape[0]
    K: gl.constexpr = x.shape[1]
    blocks = gl.reshape(x, [V, K // 32, 32])
    largest = gl.reduce(gl.abs(blocks), 2, larger)
    finite = largest.to(gl.int32, bitcast=True) < 0x7F800000
    largest = gl.where(finite, largest, 1.0)
    wanted = gl.minimum(gl.maximum(largest * (1.0 / 127.0), 5.9604644775390625e-08), 65504.0)
    half = wanted.to(gl.float16)
    half = (half.to(gl.int16, bitcast=True) + (half.to(gl.float32) < wanted).to(gl.int16)).to(gl.float16, bitcast=True)
    inverse = gl.where(finite, reciprocal(half.to(gl.float32), True), 0.0)
    # Between bounds of zero NaN becomes zero.
    most = gl.expand_dims(gl.where(finite, 127.0, 0.0), 2)
    scaled = gl.minimum(gl.maximum(blocks * gl.expand_dims(inverse, 2), most * -1.0), most) + 12582912.0
    codes = gl.reshape(scaled.to(gl.int32, bitcast=True).to(gl.int8), [V, K])
    return codes, gl.where(finite, half, float("nan")), scaled - 12582912.0


@gluon.jit
def to_e4m3_and_back(x):
    """e4m3 bytes nearest to x, saturating, and their fp32 values.

    The bytes are put together by arithmetic: where they are moved together, ptxas 12.8 reads values from a register
    that does not hold them yet.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 h, g, a, b;
        .reg .b32 u, v;
        cvt.rn.satfinite.e4m3x2.f32 h, $6, $5;
        cvt.rn.satfinite.e4m3x2.f32 g, $8, $7;
        cvt.rn.f16x2.e4m3x2 u, h;
        cvt.rn.f16x2.e4m3x2 v, g;
        mov.b32 {a, b}, u;
        cvt.f32.f16 $1, a;
        cvt.f32.f16 $2, b;
        mov.b32 {a, b}, v;
        cvt.f32.f16 $3, a;
        cvt.f32.f16 $4, b;
        cvt.u32.u16 u, h;
        cvt.u32.u16 v, g;
        mad.lo.u32 $0, v, 65536, u;
        }""",
        "=&r,=&f,=&f,=&f,=&f,r,r,r,r", [x], dtype=(gl.uint8, gl.float32), is_pure=True, pack=4,
    )  # fmt: skip
