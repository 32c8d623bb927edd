"""A read copy's codes as operands of the tensor cores: a row's products with k and q, block by block.

A thread's 16-byte loads are its registers of the left operand, decoded in place; K is permuted alike in the right
operand. There a lane's codes meet nonzero values in two columns only, k's and q's, so that the accumulators keep what
each group of four words of a row gives apart: scales are multiplied in afterwards, and codes need none.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_common import PUBLIC_REINTERPRET

_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 {{{1}}}, {{{2}}}, {{{3}}}, {{{1}}};"
# Accumulators of the two groups of a row of codes: outputs are [lower row, upper row] x [group, (k, q)].
_GROUPS = ("$0, $1, $4, $5", "$2, $3, $6, $7")
_NIBBLES = """shr.u32 s, {1}, 3;
and.b32 p, {1}, 0x80808080;
lop3.b32 p, s, 0x0E0E0E0E, p, 0xEA;
prmt.b32 {0}2, p, 0, 0x1404;
prmt.b32 {0}3, p, 0, 0x3424;
shl.b32 p, {1}, 4;
shl.b32 s, {1}, 1;
and.b32 p, p, 0x80808080;
lop3.b32 p, s, 0x0E0E0E0E, p, 0xEA;
prmt.b32 {0}0, p, 0, 0x1404;
prmt.b32 {0}1, p, 0, 0x3424;"""
_E4M3 = """mov.b32 {{h, g}}, {1};
cvt.rn.f16x2.e4m3x2 {0}0, h;
cvt.rn.f16x2.e4m3x2 {0}1, g;"""
_INT8 = """xor.b32 p, {1}, 0x80808080;
prmt.b32 {0}0, p, 0x64646464, 0x4140;
prmt.b32 {0}1, p, 0x64646464, 0x4342;
sub.rn.f16x2 {0}0, {0}0, c;
sub.rn.f16x2 {0}1, {0}1, c;"""


def _products(format: str, split: bool) -> str:
    """PTX of eight words of codes: $8-$11 of one row, $12-$15 of another; $16 on: the right operand.

    split: the right operand's rounding errors follow it and are multiplied too.
    """
    lines = ["{ .reg .b32 p, s, c, x0, x1, x2, x3, y0, y1, y2, y3; .reg .b16 g, h;", "mov.b32 c, 0x64806480;"]
    lines += [f"mov.f32 ${i}, 0f00000000;" for i in range(8)]
    if format == "bf16":
        for step in range(2):
            left = ", ".join(f"${i + 2 * step}" for i in (8, 12, 9, 13))
            for part in range(2 if split else 1):
                right = f"${16 + 4 * part + 2 * step}, ${17 + 4 * part + 2 * step}"
                lines.append(_MMA.format("bf16", _GROUPS[step], left, right))
        return "\n".join([*lines, "}"])
    decode = {"nvfp4": _NIBBLES, "fp8": _E4M3, "int8": _INT8}[format]
    for word in range(4):
        lines += [decode.format("x", f"${8 + word}"), decode.format("y", f"${12 + word}")]
        for part in range(2 if split else 1):
            if format == "nvfp4":
                at = 16 + 16 * part + 2 * word
                for half in range(2):
                    left = f"x{half}, y{half}, x{half + 2}, y{half + 2}"
                    lines.append(_MMA.format("f16", _GROUPS[word // 2], left, f"${at + half}, ${at + half + 8}"))
            else:
                at = 16 + 8 * part + word
                lines.append(_MMA.format("f16", _GROUPS[word % 2], "x0, y0, x1, y1", f"${at}, ${at + 4}"))
    return "\n".join([*lines, "}"])


def _constraints(tensors: int) -> str:
    return ",".join(["=&f"] * 8 + ["r"] * 8 * tensors)


_FORMATS = ("bf16", "int8", "fp8", "nvfp4")
_PTX = gl.constexpr({(f, split): _products(f, split) for f in _FORMATS for split in (False, True)})
_ARGS = gl.constexpr({n: _constraints(n) for n in range(2, 6)})


@gluon.constexpr_function
def ptx(read, split):
    return _PTX.value[read, split]


@gluon.constexpr_function
def ptx_args(tensors):
    return _ARGS.value[tensors]


@gluon.constexpr_function
def words_a_row(read, k_dim):
    return k_dim * {"bf16": 16, "int8": 8, "fp8": 8, "nvfp4": 4}[read] // 32


@gluon.constexpr_function
def words_layout(warps):
    """[V / 16, 2, 8, words]: 16-byte loads; the rows of a warp lie in lanes and registers as in `mma_layout`."""
    return gl.BlockedLayout([1, 2, 1, 4], [1, 1, 8, 4], [warps, 1, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def operand_sets(read, split):
    """Tensors of the right operand."""
    return (2 if read == "nvfp4" else 1) * (2 if split and read != "bf16" else 1)


@gluon.jit
def operand_order(x, READ: gl.constexpr, K: gl.constexpr):
    """[K, 2] (k and q) as [tensors, 2, 2 (k and q), values] in the order of the codes' registers."""
    if READ == "nvfp4":
        # K's bits, the highest first: lane (2), group, word, step, value of a pair, low or high nibble.
        x = gl.permute(gl.reshape(x, [K // 32, 2, 2, 2, 2, 2, 2]), (5, 1, 6, 0, 2, 3, 4))
        y = gl.reshape(x, [2, 2, 2, K // 4])
    elif READ == "bf16":
        y = gl.reshape(gl.permute(x, (1, 0)), [1, 1, 2, K])
    else:
        y = gl.reshape(gl.permute(gl.reshape(x, [K // 4, 2, 2, 2]), (1, 3, 0, 2)), [1, 2, 2, K // 2])
    return y


@gluon.jit
def stage_operand(x_at, k, q, READ: gl.constexpr, SPLIT: gl.constexpr, K: gl.constexpr):
    """Round k and q [K] to the operand's type and put them, and (SPLIT) the rounding errors, into shared memory."""
    x = operand_order(gl.join(k, q), READ, K)
    SETS: gl.constexpr = x.shape[0]
    rounded = x.to(x_at.dtype)
    if SPLIT:
        rest = (x - rounded.to(gl.float32)).to(x_at.dtype)
    if READ == "bf16":
        x_at.slice(0, 1, dim=1).store(rounded)
        if SPLIT:
            x_at.slice(1, 1, dim=1).store(rest)
    elif SPLIT:
        x_at.slice(0, SETS).store(rounded)
        x_at.slice(SETS, SETS).store(rest)
    else:
        x_at.store(rounded)


@gluon.jit
def load_operand(x_at, s: gl.constexpr, WORDS: gl.constexpr):
    """Tensor s of the right operand, [1, 2, 8, words]: a lane's registers, zero but in its own two columns."""
    WARPS: gl.constexpr = gl.num_warps()
    L: gl.constexpr = gl.BlockedLayout([1, 2, 1, 1, 4], [1, 1, 4, 2, 4], [WARPS, 1, 1, 1, 1], [4, 3, 2, 1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    SHAPE: gl.constexpr = [x_at.shape[0], 2, 2, WORDS]
    words_at = as_shape(x_at, gl.int32, SHAPE, SHARED).index(s)
    x = words_at.load(gl.SliceLayout(0, gl.SliceLayout(2, L)))
    column = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, L)))))
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L)))))
    x = gl.expand_dims(gl.expand_dims(x, 0), 2)
    column = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(column, 0), 1), 3), 4)
    word = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(word, 0), 1), 2), 3)
    x = gl.where(column == word % 16 // 4, x, 0)
    return gl.convert_layout(gl.reshape(x, [1, 2, 8, WORDS]), words_layout(WARPS), assert_trivial=True)


@gluon.jit
def as_shape(smem, TYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Shared memory as another type and shape."""
    if PUBLIC_REINTERPRET:
        return smem.reinterpret(TYPE, SHAPE, LAYOUT)
    else:
        return smem._reinterpret(TYPE, SHAPE, LAYOUT)


@gluon.jit
def load_words(words, V: gl.constexpr, WORDS: gl.constexpr):
    """The codes of a head as words [V / 16, 2, 8, words a row]."""
    L: gl.constexpr = words_layout(gl.num_warps())
    return gl.load(words + row_offsets(V, WORDS, L))


@gluon.jit
def row_offsets(V: gl.constexpr, WIDTH: gl.constexpr, L: gl.constexpr):
    """Offsets [V / 16, 2, 8, WIDTH] of the elements of rows of WIDTH."""
    L012: gl.constexpr = gl.SliceLayout(3, L)
    tile = gl.arange(0, V // 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, L012)))
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, L012)))
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, L012)))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    tile = gl.expand_dims(gl.expand_dims(tile, 1), 2)
    half = gl.expand_dims(gl.expand_dims(half, 0), 2)
    row = gl.expand_dims(gl.expand_dims(row, 0), 1)
    rows = gl.expand_dims(tile * (16 * WIDTH) + half * (8 * WIDTH) + row * WIDTH, 3)
    return rows + gl.expand_dims(gl.expand_dims(gl.expand_dims(column, 0), 1), 2)


@gluon.jit
def block_sums(words, x0, x1, y0, y1, READ: gl.constexpr, SPLIT: gl.constexpr):
    """[V / 16, 2, 8, words]: the four sums that a lane's four words of a row give: by group, with k and with q."""
    PTX: gl.constexpr = ptx(READ, SPLIT)
    if READ == "nvfp4" and SPLIT:
        sums = gl.inline_asm_elementwise(PTX, ptx_args(5), [words, x0, x1, y0, y1], gl.float32, True, 8)
    elif READ == "nvfp4":
        sums = gl.inline_asm_elementwise(PTX, ptx_args(3), [words, x0, x1], gl.float32, True, 8)
    elif READ != "bf16" and SPLIT:
        sums = gl.inline_asm_elementwise(PTX, ptx_args(3), [words, x0, y0], gl.float32, True, 8)
    else:
        sums = gl.inline_asm_elementwise(PTX, ptx_args(2), [words, x0], gl.float32, True, 8)
    return sums
