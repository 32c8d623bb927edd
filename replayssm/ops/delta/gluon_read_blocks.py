"""Checkpoint and read copy of a tile in the accumulators' registers, where a thread holds whole blocks of K.

What a read of the copy gives for k and q comes from the tensor cores: codes are exact in bf16, k and q go in as three
parts each, columns 0 to 2 and 3 to 5 of one operand.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from replayssm.ops.delta.gluon_read_codes import as_shape
from replayssm.ops.delta.gluon_read_encode import second_minus_first
from replayssm.ops.delta.gluon_read_lean import encode_int8, encode_nvfp4
from replayssm.ops.gluon_chunk import PIECE, from_pieces, in_chunk_order, split3, to_pieces
from replayssm.ops.gluon_encode import larger, row_scale, to_e4m3_and_back

COLUMNS = gl.constexpr(8)


@gluon.constexpr_function
def chunk_width(read):
    """Columns of a chunk: a thread holds a block of nvfp4, a quad one of int8."""
    return 32 if read == "int8" else 64


@gluon.constexpr_function
def columns_shared():
    """Shared memory of the columns of a piece [columns, 32]: an operand without bank conflicts."""
    return gl.SwizzledSharedLayout(8, 2, 4, order=[1, 0])


@gluon.jit
def stage_columns(columns_at, k, q, WIDTH: gl.constexpr):
    """Put k and q [K] (sliced from [columns, K]) into shared memory [pieces of K, columns, 32] in chunk order."""
    PIECES: gl.constexpr = k.shape[0] // PIECE
    n = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, k.type.layout.parent)), 1)
    high, middle, low = split3(gl.where(n < 3, gl.expand_dims(k, 0), gl.expand_dims(q, 0)))
    part = n % 3
    x = gl.where(part == 0, high, gl.where(part == 1, middle, low))
    x = in_chunk_order(gl.where(n < 6, x, gl.zeros_like(x)), WIDTH)
    x = gl.permute(gl.reshape(x, [COLUMNS, PIECES, PIECE]), (1, 0, 2))
    rows_at = as_shape(columns_at, gl.bfloat16, [PIECES * COLUMNS, PIECE], columns_shared())
    rows_at.store(gl.reshape(x, [PIECES * COLUMNS, PIECE]))


@gluon.jit
def add_products(X, pieces, columns_at, first, MMA: gl.constexpr):
    """X [V, columns] plus what bf16 pieces, from number `first` on, give with the staged columns."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    for c in gl.static_range(len(pieces)):
        right = columns_at.index(first + c).permute((1, 0)).load(RIGHT)
        X = mma_v2(gl.convert_layout(pieces[c], LEFT, assert_trivial=True), right, X)
    return X


@gluon.jit
def offsets(c, COUNT: gl.constexpr, PITCH: gl.constexpr, L: gl.constexpr, V: gl.constexpr):
    """Offsets of COUNT columns of chunk c in rows of PITCH."""
    row = gl.expand_dims(gl.arange(0, V, layout=gl.SliceLayout(1, L)) * PITCH, 1)
    return row + gl.expand_dims(c * COUNT + gl.arange(0, COUNT, layout=gl.SliceLayout(0, L)), 0)


@gluon.jit
def store_chunk(to, x, c, CHUNKS: gl.constexpr):
    """Store chunk c of the columns of a tile; `to` is the tile's first row."""
    L: gl.constexpr = x.type.layout
    COUNT: gl.constexpr = x.shape[1]
    gl.store(to + offsets(c, COUNT, COUNT * CHUNKS, L, x.shape[0]), x)


@gluon.jit
def join_rows(x, L: gl.constexpr):
    """A row vector of one layout in another, in which the same threads hold it."""
    return gl.convert_layout(x, L, assert_trivial=True)


@gluon.jit
def row_most(S):
    """The largest magnitude of every row of a tuple of pieces; NaN if one is."""
    most = gl.abs(S[0])
    for c in gl.static_range(1, len(S)):
        most = larger(most, gl.abs(S[c]))
    return gl.reduce(most, 1, larger)


@gluon.jit
def fp8_rows(S):
    """`triton_formats.encode_fp8` of a tuple of pieces: which rows are finite, their scales and reciprocals."""
    largest = row_most(S)
    finite = largest < float("inf")
    largest = gl.where(finite, largest, 1.0)
    first, inverse = row_scale(largest, 448.0, True)
    second, other = row_scale(largest, 288.0, True)
    error = gl.zeros_like(largest).to(gl.int32)
    for c in gl.static_range(len(S)):
        x = gl.where(gl.expand_dims(finite, 1), S[c], 0.0)
        error += second_minus_first(x, first, inverse, second, other)
    better = error < 0
    scale = gl.where(finite, gl.where(better, second, first), float("nan"))
    return finite, scale, gl.where(better, other, inverse)


@gluon.jit
def fp8_codes(x, finite, inverse):
    """e4m3 bytes of x [V, n] and their fp32 values, without the rows' scales."""
    return to_e4m3_and_back(gl.where(gl.expand_dims(finite, 1), x, 0.0) * gl.expand_dims(inverse, 1))


@gluon.jit
def store_fp8(S, codes, scales, L: gl.constexpr, CHUNKS: gl.constexpr):
    """Write a tile in fp8; returns pieces of the codes' values (fp32) and the rows' scales."""
    PIECES: gl.constexpr = len(S) // CHUNKS
    IN_V: gl.constexpr = gl.SliceLayout(1, L)
    MMA: gl.constexpr = S[0].type.layout
    finite, scale, inverse = fp8_rows(S)
    gl.store(scales + gl.arange(0, S[0].shape[0], layout=scale.type.layout), scale)
    values = ()
    finite_v = join_rows(finite, IN_V)
    inverse_v = join_rows(inverse, IN_V)
    for c in gl.static_range(CHUNKS):
        if PIECES == 2:
            x = from_pieces((S[2 * c], S[2 * c + 1]), L)
        else:
            x = from_pieces((S[c],), L)
        encoded, value = fp8_codes(x, finite_v, inverse_v)
        store_chunk(codes, encoded, c, CHUNKS)
        values = values + to_pieces(value, MMA)
    return values, scale


@gluon.jit
def encode_int8_chunk(x, codes, scales, c: gl.constexpr, CHUNKS: gl.constexpr, MMA: gl.constexpr):
    """Write a chunk of one block in int8; returns its codes as bf16 pieces and the rows' scales."""
    encoded, scale, numbers = encode_int8(x)
    store_chunk(codes, encoded, c, CHUNKS)
    store_chunk(scales, gl.expand_dims(scale, 1), c, CHUNKS)
    exact, _, _ = split3(numbers)
    return to_pieces(exact, MMA), join_rows(scale.to(gl.float32), gl.SliceLayout(1, MMA))


@gluon.jit
def encode_nvfp4_chunk(
    x, power, inverse_power, codes, scales, c, CHUNKS: gl.constexpr, MMA: gl.constexpr
):  # fmt: skip
    """Write a chunk of four blocks in nvfp4; returns its values as bf16 pieces."""
    encoded, block_scales, numbers, full = encode_nvfp4(x, power, inverse_power)
    store_chunk(codes, encoded, c, CHUNKS)
    store_chunk(scales, block_scales, c, CHUNKS)
    value = gl.reshape(numbers * gl.expand_dims(full, 2), x.shape)
    exact, _, _ = split3(gl.convert_layout(value, x.type.layout, assert_trivial=True))
    return to_pieces(exact, MMA)
