"""A read copy's scales, and what the codes' products, scaled, add up to.

A reading program of one warp, which loads them ahead, takes nvfp4's block scales in pairs: half the registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_read_codes import row_offsets
from replayssm.ops.gluon_encode import from_e4m3
from replayssm.ops.gluon_window_parts import mma_layout


@gluon.constexpr_function
def scales_layout(read, warps):
    """[V / 16, 2, 8, scales of a row]: int8 [chunk, pair of lanes], nvfp4 [lane, group]; fp8 none."""
    if read == "nvfp4":
        sums = gl.BlockedLayout([1, 2, 1, 1, 2, 2], [1, 1, 8, 4, 1, 1], [warps, 1, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0])
        return gl.SliceLayout(5, sums)
    sums = gl.BlockedLayout(
        [1, 2, 1, 2, 1, 1, 2], [1, 1, 8, 1, 2, 2, 1], [warps, 1, 1, 1, 1, 1, 1], [6, 5, 4, 3, 2, 1, 0]
    )
    return gl.SliceLayout(5, gl.SliceLayout(6, sums))


@gluon.jit
def load_scales(scales, READ: gl.constexpr, V: gl.constexpr, K: gl.constexpr):
    """The scales of a head, as `scale_sums` takes them."""
    WARPS: gl.constexpr = gl.num_warps()
    if READ == "bf16":
        loaded = 0
    elif READ == "fp8":
        loaded = gl.load(scales + gl.arange(0, V, layout=gl.SliceLayout(1, mma_layout(WARPS))))
    else:
        L: gl.constexpr = scales_layout(READ, WARPS)
        A: gl.constexpr = 2 if READ == "int8" else K // 32
        L4: gl.constexpr = gl.SliceLayout(4, L)
        rows = gl.expand_dims(row_offsets(V, A, L4), 4) * 2
        pair = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L)))))
        pair = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(pair, 0), 1), 2), 3)
        loaded = gl.load(scales + (rows + pair))
    return loaded


@gluon.jit
def scale_sums(sums, scales, READ: gl.constexpr, V: gl.constexpr, WORDS: gl.constexpr):
    """[V, 8] in `mma_layout`: what the lanes' sums, scaled, add up to: k's in even columns, q's in odd ones."""
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    if READ == "nvfp4":
        value = gl.convert_layout(from_e4m3(scales, True), scales_layout(READ, gl.num_warps()), assert_trivial=True)
        sums = gl.reshape(sums, [V // 16, 2, 8, 4, 2, 2])
        value = gl.expand_dims(value, 5)
        sums = sums * gl.convert_layout(value, sums.type.layout, assert_trivial=True)
        sums = gl.sum(sums, 4)
    elif READ == "int8":
        sums = gl.sum(gl.reshape(sums, [V // 16, 2, 8, 2, 2, 2, 2, 2]), 6)
        value = gl.expand_dims(gl.expand_dims(scales.to(gl.float32), 5), 6)
        sums = gl.sum(sums * gl.convert_layout(value, sums.type.layout, assert_trivial=True), 3)
    else:
        sums = gl.sum(gl.sum(gl.reshape(sums, [V // 16, 2, 8, WORDS // 16, 4, 2, 2]), 5), 3)
    sums = gl.convert_layout(gl.reshape(sums, [V, 8]), MMA, assert_trivial=True)
    if READ == "fp8":
        sums *= gl.expand_dims(scales, 1)
    return sums


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
