"""nvfp4's block scales in pairs, as a reading program of one warp loads them ahead: half the registers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_read_codes import load_scales, row_offsets, scale_sums
from replayssm.ops.gluon_window_parts import mma_layout


@gluon.constexpr_function
def pairs_layout(warps):
    """[V / 16, 2, 8, 4]: nvfp4's scales of a lane's two blocks of a row, as one element."""
    return gl.BlockedLayout([1, 2, 1, 1], [1, 1, 8, 4], [warps, 1, 1, 1], [3, 2, 1, 0])


@gluon.jit
def load_pairs(scales, READ: gl.constexpr, V: gl.constexpr, K: gl.constexpr):
    """`load_scales` with nvfp4's scales in pairs, which take half the registers; their address is even."""
    if READ == "nvfp4":
        L: gl.constexpr = pairs_layout(gl.num_warps())
        loaded = gl.load(scales.to(gl.pointer_type(gl.int16), bitcast=True) + row_offsets(V, K // 32, L))
    else:
        loaded = load_scales(scales, READ, V, K)
    return loaded


@gluon.jit
def values_of_pair(pairs):
    """Two e4m3 bytes as fp32, the lower first."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 h;
        .reg .b16 a, b;
        cvt.rn.f16x2.e4m3x2 h, $2;
        mov.b32 {a, b}, h;
        cvt.f32.f16 $0, a;
        cvt.f32.f16 $1, b;
        }""",
        "=f,=f,h", [pairs], dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def scale_pair_sums(sums, pairs, READ: gl.constexpr, V: gl.constexpr, WORDS: gl.constexpr):
    """`scale_sums` with scales from `load_pairs`."""
    if READ == "nvfp4":
        first, second = values_of_pair(pairs)
        k, q = gl.split(gl.reshape(sums, [V // 16, 2, 8, 4, 2, 2]))
        k0, k1 = gl.split(k)
        q0, q1 = gl.split(q)
        first = gl.convert_layout(first, k0.type.layout, assert_trivial=True)
        second = gl.convert_layout(second, k0.type.layout, assert_trivial=True)
        X = gl.join(gl.fma(k1, second, k0 * first), gl.fma(q1, second, q0 * first))
        X = gl.convert_layout(gl.reshape(X, [V, 8]), mma_layout(gl.num_warps()), assert_trivial=True)
    else:
        X = scale_sums(sums, pairs, READ, V, WORDS)
    return X
