"""Storage formats in Gluon kernels: `triton_formats` by the same names, and codes as operands of the tensor cores.

The decoders are elementwise on bytes in any layout in which four neighbours along K lie in one thread, such as
`DotOperandLayout(0, mma, 16)`. Codes go into the product unscaled: where every scale block of a row has a column of its
own in the other operand, the accumulator holds the blocks' sums apart, to be multiplied by the scales.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops import triton_formats as _triton
from replayssm.ops.gluon_encode import encode_blocks
from replayssm.ops.gluon_encode_rows import encode_rows

magnitude = gluon.jit(_triton.magnitude.fn)
encode_int8 = gluon.jit(_triton.encode_int8.fn)
largest_finite = gluon.jit(_triton.largest_finite.fn)
global_scale = gluon.jit(_triton.global_scale.fn)
encode_nvfp4 = gluon.jit(_triton.encode_nvfp4.fn)
encode_nvfp4_exactly = gluon.jit(_triton.encode_nvfp4_numbers.fn)

E2M1_UNIT = gl.constexpr(16384.0)  # `crossed_halves_of_e2m1` times this are the codes' values


@gluon.constexpr_function
def scales_a_row(read, k_dim):
    """Block scales of a row; fp8's scale is the row's."""
    return {"bf16": 0, "int8": k_dim // 32, "fp8": 1, "nvfp4": k_dim // 16}[read]


@gluon.jit
def encode_fp8(x, NATIVE: gl.constexpr):
    """See `triton_formats.encode_fp8`."""
    gl.static_assert(NATIVE)
    codes, scales, values, _ = encode_rows(x, True)
    return codes, scales, values * gl.expand_dims(scales, 1)


@gluon.jit
def encode_nvfp4_numbers(x, scale, inverse_scale, EXACT: gl.constexpr, NATIVE: gl.constexpr):
    """See `triton_formats.encode_nvfp4_numbers`; what it returns without EXACT are numbers times 2^-6."""
    if EXACT:
        codes, scales, numbers, read, doubtful = encode_nvfp4_exactly(x, scale, inverse_scale, True, NATIVE)
    else:
        codes, scales, numbers, read, doubtful = encode_blocks(x, scale, inverse_scale)
    return codes, scales, numbers, read, doubtful


@gluon.jit
def crossed_halves_of_e2m1(codes):
    """Low and high codes of packed bytes as fp16, times 2^-14: their bits as sign, low exponent and high mantissa bits.

    The byte `s x x x e e m x` with x cleared is the upper one of the fp16 number. In the order 0, 2, 1, 3 of every four
    bytes, so that a mask clears and spreads them at once; shifts to the left run beside masks.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        shr.u32 b, $4, 3;
        lop3.b32 a, $4, b, 0x80808080, 0xE4;
        and.b32 $3, a, 0x8E008E00;
        shl.b32 b, a, 8;
        and.b32 $2, b, 0x8E008E00;
        shl.b32 a, $4, 4;
        shl.b32 b, $4, 1;
        lop3.b32 a, a, b, 0x80808080, 0xE4;
        and.b32 $1, a, 0x8E008E00;
        shl.b32 b, a, 8;
        and.b32 $0, b, 0x8E008E00;
        }""",
        "=&r,=&r,=&r,=&r,r", [codes], dtype=(gl.float16, gl.float16), is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def half_of_e4m3(codes):
    """e4m3 bytes as fp16."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=&r,=&r,r", [codes], dtype=gl.float16, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def half_of_int8(codes):
    """int8 codes as fp16: 1024 + (code + 128) by placing bytes, less 1152."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, c;
        xor.b32 a, $2, 0x80808080;
        mov.b32 c, 0x64806480;
        prmt.b32 $0, a, 0x64646464, 0x4140;
        prmt.b32 $1, a, 0x64646464, 0x4342;
        sub.rn.f16x2 $0, $0, c;
        sub.rn.f16x2 $1, $1, c;
        }""",
        "=&r,=&r,r", [codes], dtype=gl.float16, is_pure=True, pack=4,
    )  # fmt: skip
