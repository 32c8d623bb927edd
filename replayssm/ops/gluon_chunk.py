"""A flush as products on the tensor cores, accurate to fp32: exact splits, operand layouts, forward substitution.

An fp32 number is the sum of three bf16 numbers, so a product with it is three products of 16-bit operands, added up in
fp32. The tensor cores cut off what a sum has no room for; a state is therefore never an accumulator: what is added to
it is summed up from zero, and sums over K are kept short.

The accumulators' columns stand for K in an order in which a thread owns neighbours ("chunk order"), so that it loads,
encodes and stores whole blocks; the other operand is staged in that order once. A chunk of a tile has 32 or 64 columns
and goes into products in pieces of 32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

PIECE = gl.constexpr(32)


@gluon.constexpr_function
def chunk_layout(block_v, width, warps):
    """[block_v, width]: registers and lanes of the accumulators; a thread holds width / 4 neighbours of two rows."""
    inner = [[0, 1 << i] for i in range((width // 4).bit_length() - 1)]
    rows = [[16 * warps << i, 0] for i in range((block_v // (16 * warps)).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[*inner, [8, 0], *rows],
        lane_bases=[[0, width // 4], [0, width // 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16 << i if 16 << i < block_v else 0, 0] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[block_v, width],
    )


@gluon.jit
def in_chunk_order(x, WIDTH: gl.constexpr):
    """[rows, n WIDTH] as accumulators have the columns: (WIDTH / 4) q + 2 n + i of a chunk becomes 8 n + 2 q + i."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    x = gl.reshape(x, [rows, columns // WIDTH, 4, WIDTH // 8, 2])
    return gl.reshape(gl.permute(x, (0, 1, 3, 2, 4)), [rows, columns])


@gluon.jit
def in_memory_order(x):
    """What `in_chunk_order` of one chunk undoes."""
    rows: gl.constexpr = x.shape[0]
    width: gl.constexpr = x.shape[1]
    return gl.reshape(gl.permute(gl.reshape(x, [rows, width // 8, 4, 2]), (0, 2, 1, 3)), [rows, width])


@gluon.jit
def to_pieces(x, MMA: gl.constexpr):
    """A chunk in `chunk_layout` as a tuple of pieces [V, 32] in the accumulators' layout; no data moves."""
    rows: gl.constexpr = x.shape[0]
    width: gl.constexpr = x.shape[1]
    x = in_chunk_order(x, width)
    if width == PIECE:
        pieces = (gl.convert_layout(x, MMA, assert_trivial=True),)
    else:
        a, b = gl.split(gl.permute(gl.reshape(x, [rows, 2, PIECE]), (0, 2, 1)))
        pieces = (gl.convert_layout(a, MMA, assert_trivial=True), gl.convert_layout(b, MMA, assert_trivial=True))
    return pieces


@gluon.jit
def from_pieces(pieces, LAYOUT: gl.constexpr):
    """What `to_pieces` undoes."""
    x = pieces[0]
    rows: gl.constexpr = x.shape[0]
    if len(pieces) == 2:
        x = gl.reshape(gl.permute(gl.join(x, pieces[1]), (0, 2, 1)), [rows, 2 * PIECE])
    return gl.convert_layout(in_memory_order(x), LAYOUT, assert_trivial=True)


@gluon.jit
def split3(x):
    """Three bf16 tensors, the largest first, that sum up to fp32 x; pairs along its last axis share a thread."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        cvt.rn.bf16x2.f32 $0, $4, $3;
        shl.b32 a, $0, 16;
        and.b32 b, $0, 0xffff0000;
        sub.rn.f32 a, $3, a;
        sub.rn.f32 b, $4, b;
        cvt.rn.bf16x2.f32 $1, b, a;
        shl.b32 c, $1, 16;
        and.b32 d, $1, 0xffff0000;
        sub.rn.f32 c, a, c;
        sub.rn.f32 d, b, d;
        cvt.rn.bf16x2.f32 $2, d, c;
        }""",
        "=&r,=&r,=r,r,r", [x], dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def parts_of(x):
    """A tuple of bf16 tensors, the largest first, that sum up to x: one for bf16, two for fp16, three for fp32."""
    if x.dtype == gl.bfloat16:
        parts = (x,)
    elif x.dtype == gl.float16:
        high, middle, _ = split3(x.to(gl.float32))
        parts = (high, middle)
    else:
        parts = split3(x)
    return parts


@gluon.constexpr_function
def num_parts(element):
    return {"bf16": 1, "fp16": 2}.get(str(element), 3)


@gluon.jit
def left_parts(x, MMA: gl.constexpr):
    """The parts of accumulators [rows, columns] as left operands of the next product; no data moves."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    parts = parts_of(x)
    operands = ()
    for i in gl.static_range(len(parts)):
        operands = operands + (gl.convert_layout(parts[i], LEFT, assert_trivial=True),)
    return operands


@gluon.jit
def products(left, right, acc):
    """acc + left right, of operands in up to three parts; the smallest products first, those below 2^-24 left out."""
    for back in gl.static_range(3):
        for i in gl.static_range(len(left)):
            for j in gl.static_range(len(right)):
                if i + j == 2 - back:
                    acc = mma_v2(left[i], right[j], acc)
    return acc


@gluon.constexpr_function
def rows_shared():
    """Shared memory of rows [rows, K] of 16 bits: operands of both products without bank conflicts."""
    return gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])


@gluon.jit
def stage_parts(rows_at, x, WIDTH: gl.constexpr):
    """Put the parts of x [rows, K] into shared memory [parts, rows, K] (`rows_shared`), in chunk order."""
    parts = parts_of(x)
    for p in gl.static_range(len(parts)):
        rows_at.index(p).store(in_chunk_order(parts[p], WIDTH))


@gluon.jit
def right_parts(rows_at, piece: gl.constexpr, TURNED: gl.constexpr, MMA: gl.constexpr):
    """A piece of the staged rows' columns as right operands: [rows, 32], or (TURNED) [32, rows]."""
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    PARTS: gl.constexpr = rows_at.shape[0]
    parts = ()
    for p in gl.static_range(PARTS):
        part_at = rows_at.index(p).slice(piece * PIECE, PIECE, dim=1)
        if TURNED:
            parts = parts + (part_at.permute((1, 0)).load(RIGHT),)
        else:
            parts = parts + (part_at.load(RIGHT),)
    return parts


@gluon.constexpr_function
def triangle_layout(rows, warps):
    """[heads, rows, rows]: a thread has a column of a head."""
    return gl.BlockedLayout([1, rows, 1], [1, 1, 32], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def either(a, b):
    return a | b


@gluon.jit
def row_of_columns(x, i, index: gl.constexpr):
    """Row `index` of [heads, rows, rows] in `triangle_layout`, whose rows are numbered i: a register of each thread."""
    bits = gl.where(i == index, x.to(gl.int32, bitcast=True), 0)
    return gl.reduce(bits, 1, either).to(gl.float32, bitcast=True)


@gluon.jit
def unit_lower_inverse(coef_at, HEADS: gl.constexpr, ROWS: gl.constexpr):
    """(I + A)^-1 [heads, rows, rows] of strictly lower A, by forward substitution of all columns side by side.

    coef_at [column, heads, row]: -A in shared memory, zero where it is not lower. For a delta rule no element of the
    inverse exceeds 1, as the recurrence contracts: nothing cancels.
    """
    L: gl.constexpr = triangle_layout(ROWS, gl.num_warps())
    i = gl.expand_dims(gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, L))), 0), 2)
    j = gl.expand_dims(gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, L))), 0), 1)
    X = gl.where(i == j, 1.0, 0.0) + gl.zeros([HEADS, ROWS, ROWS], gl.float32, layout=L)
    for t in gl.static_range(ROWS - 1):
        column = gl.expand_dims(coef_at.index(t).load(gl.SliceLayout(2, L)), 2)
        solved = gl.expand_dims(row_of_columns(X, i, t), 1)
        column, X = gl.broadcast(column, X)
        solved, X = gl.broadcast(solved, X)
        X = gl.fma(column, solved, X)
    return X
