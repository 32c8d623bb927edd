"""What a flush does with a tile that it has replayed: round it, renew the read copy, and compute outputs from that."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_common import barrier, row_of
from replayssm.ops.delta.gluon_read_encode import encode_nvfp4, second_minus_first
from replayssm.ops.gluon_encode import larger, row_scale, to_e4m3_and_back
from replayssm.ops.gluon_formats import encode_int8, largest_finite

CHUNK = gl.constexpr(32)  # columns that are encoded at once


@gluon.constexpr_function
def block_layout(warps):
    """[V rows, 32 columns]: a thread holds 16 columns of a row; the rows of a warp are those of `tile_layout`."""
    return gl.BlockedLayout([1, 16], [16, 2], [warps, 1], [1, 0])


@gluon.constexpr_function
def blocks_layout(warps):
    """`block_layout` as [V rows, blocks, 16]."""
    return gl.BlockedLayout([1, 1, 16], [16, 2, 1], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def staged_layout():
    """Shared memory of a chunk: both layouts read and write it without bank conflicts."""
    return gl.SwizzledSharedLayout(4, 1, 8, order=[1, 0])


@gluon.jit
def halves(x, TILE: gl.constexpr):
    """The two halves of a tile's columns, which lie in different registers."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1] // 2
    a, b = gl.split(gl.permute(gl.reshape(x, [rows, 2, columns]), (0, 2, 1)))
    return gl.convert_layout(a, TILE, assert_trivial=True), gl.convert_layout(b, TILE, assert_trivial=True)


@gluon.jit
def chunks(x, TILE: gl.constexpr):
    """A tile as a tuple of chunks of its columns."""
    if x.shape[1] == CHUNK:
        parts = (x,)
    else:
        a, b = halves(x, TILE)
        parts = chunks(a, TILE) + chunks(b, TILE)
    return parts


@gluon.jit
def stage_tile(S, tile_at, TILE: gl.constexpr):
    """Put a tile into shared memory, from which a thread gets whole blocks."""
    parts = chunks(S, TILE)
    barrier()
    for c in gl.static_range(len(parts)):
        tile_at.index(c).store(parts[c])
    barrier()


@gluon.jit
def store_columns(to, x, first_row, c, WIDTH: gl.constexpr):
    """Store a chunk's codes or scales x [V, n] as its columns of rows of WIDTH."""
    L: gl.constexpr = x.type.layout
    row = first_row + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, L))
    column = c * x.shape[1] + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, L))
    gl.store(to + (gl.expand_dims(row * WIDTH, 1) + gl.expand_dims(column, 0)), x)


@gluon.jit
def same_layout(x, y):
    return gl.convert_layout(x, y.type.layout, assert_trivial=True)


@gluon.jit
def block_sums(x, y):
    """[V, n]: sums of x [V, n, 16] times y [1, n * 16]."""
    y = gl.reshape(y, [1, x.shape[1], 16])
    return gl.sum(x * gl.convert_layout(y, x.type.layout, assert_trivial=True), 2)


@gluon.jit
def fp8_scales(tile_at, L: gl.constexpr):
    """encoders.encode_fp8's scales and their reciprocals of the rows of a staged tile; which rows are finite."""
    IN_V: gl.constexpr = gl.SliceLayout(1, L)
    largest = gl.full([tile_at.shape[1]], 0.0, gl.float32, layout=IN_V)
    for c in range(tile_at.shape[0]):
        largest = larger(largest, gl.reduce(gl.abs(tile_at.index(c).load(L)), 1, larger))
    finite = largest < float("inf")
    largest = gl.where(finite, largest, 1.0)
    first, inverse = row_scale(largest, 448.0, True)
    second, other = row_scale(largest, 288.0, True)
    error = gl.full([tile_at.shape[1]], 0, gl.int32, layout=IN_V)
    for c in range(tile_at.shape[0]):
        x = gl.where(gl.expand_dims(finite, 1), tile_at.index(c).load(L), 0.0)
        error += second_minus_first(x, first, inverse, second, other)
    better = error < 0
    scale = gl.where(finite, gl.where(better, second, first), float("nan"))
    return finite, scale, gl.where(better, other, inverse)


@gluon.jit
def tile_most(S):
    """The largest magnitude of a tile, as the bits of an integer, among blocks without NaN and infinity."""
    bits = gl.reduce(gl.reduce(gl.abs(S), 1, larger), 0, larger).to(gl.int32, bitcast=True)
    if bits >= 0x7F800000:
        bits = gl.reduce(largest_finite(S), 0, most)
    return bits


@gluon.jit
def most(a, b):
    return gl.maximum(a, b)


@gluon.jit
def round_fp8(S, tile_at, first_row, codes, scales, K: gl.constexpr, TILE: gl.constexpr):
    """Write a tile of an fp8 checkpoint and stage what a read of it gives; returns the bits of its largest magnitude.

    The pointers are of the head. Only blocks without NaN count.
    """
    L: gl.constexpr = block_layout(gl.num_warps())
    stage_tile(S, tile_at, TILE)
    finite, row, inverse = fp8_scales(tile_at, L)
    gl.store(scales + first_row + gl.arange(0, S.shape[0], layout=gl.SliceLayout(1, L)), row)
    largest = 0
    for c in range(K // CHUNK):
        x = gl.where(gl.expand_dims(finite, 1), tile_at.index(c).load(L), 0.0)
        encoded, values = to_e4m3_and_back(x * gl.expand_dims(inverse, 1))
        values *= gl.expand_dims(row, 1)
        store_columns(codes, encoded, first_row, c, K)
        tile_at.index(c).store(values)
        largest = gl.maximum(largest, tile_most(values))
    barrier()
    return largest


@gluon.jit
def renew_tile(
    tile_at, first_row, power, inverse_power, codes, scales, k_at, q_at, kq, through, b, v, ring_u, out,
    READ: gl.constexpr, K: gl.constexpr, BLOCK_V: gl.constexpr, OUTPUTS: gl.constexpr,
):  # fmt: skip
    """Write the read copy of a staged tile of the checkpoint and (OUTPUTS), from it, u and the output of its V rows.

    READ "none": only u and the output, from the checkpoint. The pointers are of the head.
    """
    L: gl.constexpr = block_layout(gl.num_warps())
    IN_V: gl.constexpr = gl.SliceLayout(1, L)
    IN_K: gl.constexpr = gl.SliceLayout(0, L)
    CHUNKS: gl.constexpr = K // CHUNK
    rows = first_row + gl.arange(0, BLOCK_V, layout=IN_V)
    if READ == "fp8":
        finite, row, inverse = fp8_scales(tile_at, L)
        gl.store(scales + rows, row)
    at_k = gl.full([BLOCK_V, CHUNK // 16], 0.0, gl.float32, layout=gl.SliceLayout(2, blocks_layout(gl.num_warps())))
    at_q = at_k
    for c in range(CHUNKS):
        x = tile_at.index(c).load(L)
        if OUTPUTS:
            k = gl.expand_dims(row_of(k_at, c, CHUNKS, CHUNK).load(IN_K), 0)
            q = gl.expand_dims(row_of(q_at, c, CHUNKS, CHUNK).load(IN_K), 0)
        if READ == "nvfp4":
            encoded, block_scales, signed, full = encode_nvfp4(x, power, inverse_power)
            store_columns(scales, block_scales, first_row, c, K // 16)
            if OUTPUTS:
                at_k += same_layout(block_sums(signed, k) * full, at_k)
                at_q += same_layout(block_sums(signed, q) * full, at_k)
        else:
            if READ == "none":
                values = x
            elif READ == "bf16":
                encoded = x.to(gl.bfloat16)
                values = encoded.to(gl.float32)
            elif READ == "int8":
                encoded, block_scales, values = encode_int8(x, True)
                store_columns(scales, block_scales, first_row, c, K // 32)
                values = gl.convert_layout(values, L, assert_trivial=True)
            else:
                x = gl.where(gl.expand_dims(finite, 1), x, 0.0)
                encoded, values = to_e4m3_and_back(x * gl.expand_dims(inverse, 1))
                values *= gl.expand_dims(row, 1)
            values = gl.reshape(values, [BLOCK_V, CHUNK // 16, 16])
            if OUTPUTS:
                at_k += same_layout(block_sums(values, k), at_k)
                at_q += same_layout(block_sums(values, q), at_k)
        if READ != "none":
            store_columns(codes, encoded, first_row, c, K * encoded.shape[1] // CHUNK)
    if OUTPUTS:
        v_now = gl.load(v + rows).to(gl.float32)
        at_k = gl.convert_layout(gl.sum(at_k, 1), IN_V, assert_trivial=True)
        at_q = gl.convert_layout(gl.sum(at_q, 1), IN_V, assert_trivial=True)
        u = b * (v_now - at_k * through)
        gl.store(out + rows, (at_q * through + kq * u).to(out.dtype.element_ty))
        gl.store(ring_u + rows, u.to(ring_u.dtype.element_ty))
