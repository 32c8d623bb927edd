"""fp8 (e4m3, a scale a row) in Gluon kernels: a row tries two scales, and bytes are put together once one is chosen.

For registers in which a thread holds four neighbours along K.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_encode import larger, row_scale


@gluon.jit
def to_e4m3_words_and_back(x):
    """e4m3 bytes nearest to x, saturating, and their fp32 values; bytes of four of K as two words of two, and nothing.

    They are put together once they are chosen: where that is done here, ptxas 12.8 reads values from a register that
    does not hold them yet.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 h, g, a, b;
        .reg .b32 u, v;
        cvt.rn.satfinite.e4m3x2.f32 h, $9, $8;
        cvt.rn.satfinite.e4m3x2.f32 g, $11, $10;
        cvt.rn.f16x2.e4m3x2 u, h;
        cvt.rn.f16x2.e4m3x2 v, g;
        mov.b32 {a, b}, u;
        cvt.f32.f16 $4, a;
        cvt.f32.f16 $5, b;
        mov.b32 {a, b}, v;
        cvt.f32.f16 $6, a;
        cvt.f32.f16 $7, b;
        cvt.u32.u16 $0, h;
        cvt.u32.u16 $1, g;
        mov.b32 $2, 0;
        mov.b32 $3, 0;
        }""",
        "=&r,=&r,=&r,=&r,=&f,=&f,=&f,=&f,r,r,r,r", [x], dtype=(gl.int32, gl.float32), is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def choose_words(a, b, second, keep):
    """Bytes of b where `second` is -1, of a where it is 0, and zero where `keep` is; both the same for four of K."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 t, u;
        .reg .pred p;
        setp.ne.s32 p, $9, 0;
        selp.b32 t, $5, $1, p;
        selp.b32 u, $6, $2, p;
        prmt.b32 t, t, u, 0x5410;
        and.b32 $0, t, $13;
        }""",
        "=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [a, b, second, keep], dtype=gl.uint8, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def error_in_steps(off, unit):
    """The integer of `triton_formats.squared_error` of an element, and a constant."""
    off = off * unit
    return (off * off * 4096.0 + 8388608.0).to(gl.int32, bitcast=True)


@gluon.jit
def encode_rows(x, EXACT: gl.constexpr):
    """`triton_formats.encode_fp8` of fp32 x [V, K]: e4m3 bytes [V, K], scales fp32 [V], the bytes' values [V, K].

    Without EXACT errors are summed up in fp32; the last result tells where integer sums might choose otherwise.
    """
    ROUNDINGS: gl.constexpr = (x.shape[1] + 1) / 4096.0
    largest = gl.reduce(gl.abs(x), 1, larger)
    finite = largest.to(gl.int32, bitcast=True) < 0x7F800000
    largest = gl.where(finite, largest, 1.0)
    first, inverse = row_scale(largest, 448.0, True)
    second, other = row_scale(largest, 288.0, True)
    unit = gl.expand_dims(inverse, 1)
    code_1, value_1 = to_e4m3_words_and_back(x * unit)
    code_2, value_2 = to_e4m3_words_and_back(x * gl.expand_dims(other, 1))
    off_1 = gl.fma(value_1, gl.expand_dims(-first, 1) + gl.zeros_like(x), x)
    off_2 = gl.fma(value_2, gl.expand_dims(-second, 1) + gl.zeros_like(x), x)
    if EXACT:
        better = gl.sum(error_in_steps(off_2, unit) - error_in_steps(off_1, unit), 1) < 0
        doubtful = better & (not EXACT)
    else:
        sum_1 = gl.sum(off_1 * off_1, 1)
        sum_2 = gl.sum(off_2 * off_2, 1)
        better = sum_2 < sum_1
        # Every square rounded to 2^-12 of the first scale's, and sums of up to 256 terms in fp32.
        slack = ROUNDINGS * first * first + (sum_1 + sum_2) * 3.0517578125e-05
        far = (first < 9.094947017729282e-13) | (first > 1099511627776.0)
        doubtful = finite & (far | (gl.abs(sum_1 - sum_2) <= slack)) & (largest > 0.0)
    scales = gl.where(finite, gl.where(better, second, first), float("nan"))
    zero = gl.zeros_like(x).to(gl.int32)
    chosen = gl.expand_dims(gl.where(better, -1, 0), 1) + zero
    codes = choose_words(code_1, code_2, chosen, gl.expand_dims(gl.where(finite, -1, 0), 1) + zero)
    return codes, scales, gl.where(gl.expand_dims(better, 1), value_2, value_1), doubtful


@gluon.jit
def row_magnitudes(x, scales):
    """`magnitude` of the largest value that `encode_rows` makes of each row of x with these scales; of NaN rows 0."""
    largest = gl.reduce(gl.abs(x), 1, larger)
    # It went to 448 or to 288, unless the scale is the smallest there is: then nvfp4's is, whatever this returns.
    value = gl.where(largest > scales * 368.0, 448.0, 288.0) * scales
    bits = value.to(gl.int32, bitcast=True)
    return gl.where(bits < 0x7F800000, bits, 0)
