"""A tile of a flush in chunk form, in the accumulators' registers: replay its rows, write it, renew its copy."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_chunk_gdn import replay_piece, seen_by_rows
from replayssm.ops.delta.gluon_common import wrap
from replayssm.ops.delta.gluon_read_blocks import add_products, encode_int8_chunk, offsets, store_chunk, store_fp8
from replayssm.ops.gluon_chunk import PIECE, chunk_layout, from_pieces, left_parts, products, split3, to_pieces
from replayssm.ops.gluon_encode import from_e4m3
from replayssm.ops.gluon_window_parts import mma_layout


@gluon.jit
def load_pieces(state, first_row, c: gl.constexpr, K: gl.constexpr, BLOCK_V: gl.constexpr, WIDTH: gl.constexpr):
    """Chunk c of a tile of the checkpoint as pieces: in its own dtype, of fp8 the codes' values in bf16."""
    L: gl.constexpr = chunk_layout(BLOCK_V, WIDTH, gl.num_warps())
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    x = gl.load(state + first_row * K + offsets(c, WIDTH, K, L, BLOCK_V))
    if state.dtype.element_ty == gl.uint8:
        x, _, _ = split3(from_e4m3(x, True))
    return to_pieces(x, MMA)


@gluon.jit
def chunk_of(S, c: gl.constexpr, WIDTH: gl.constexpr):
    """Chunk c of a tile's pieces."""
    if WIDTH == 2 * PIECE:
        chunk = (S[2 * c], S[2 * c + 1])
    else:
        chunk = (S[c],)
    return chunk


@gluon.jit
def load_values(state, state_scales, first_row, c, K: gl.constexpr, BLOCK_V: gl.constexpr,
                WIDTH: gl.constexpr):  # fmt: skip
    """A chunk of the checkpoint in fp32, as a read of it gives it."""
    L: gl.constexpr = chunk_layout(BLOCK_V, WIDTH, gl.num_warps())
    x = gl.load(state + first_row * K + offsets(c, WIDTH, K, L, BLOCK_V))
    if state.dtype.element_ty == gl.uint8:
        rows = first_row + gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, L))
        x = from_e4m3(x, True) * gl.expand_dims(gl.load(state_scales + rows), 1)
    return x.to(gl.float32)


@gluon.jit
def load_rows_v(ring_v, first_row, start, count, ring_len, V: gl.constexpr, BLOCK_V: gl.constexpr, ROWS: gl.constexpr):
    """v of a tile's rows, [BLOCK_V, rows] in the accumulators' layout."""
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    t = gl.arange(0, ROWS, layout=gl.SliceLayout(0, MMA))
    at = gl.expand_dims(wrap(start + gl.minimum(t, count), ring_len) * V, 0)
    at += gl.expand_dims(first_row + gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, MMA)), 1)
    return gl.load(ring_v + at, mask=gl.expand_dims(t < count, 0), other=0.0)


@gluon.jit
def load_unit(state, state_scales, first_row, BLOCK_V: gl.constexpr):
    """What multiplies a tile's rows as stored [V, 1]: fp8's scales, or 1."""
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    unit = 1.0
    if state.dtype.element_ty == gl.uint8:
        rows = first_row + gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, MMA))
        unit = gl.expand_dims(gl.load(state_scales + rows), 1)
    return unit


@gluon.jit
def load_tile(state, first_row, K: gl.constexpr, BLOCK_V: gl.constexpr, WIDTH: gl.constexpr):
    """A tile of the checkpoint as `load_pieces`."""
    S = ()
    for c in gl.static_range(K // WIDTH):
        S = S + load_pieces(state, first_row, c, K, BLOCK_V, WIDTH)
    return S


@gluon.jit
def solve_rows(S, v, unit, seen_at, through, solve, KDA: gl.constexpr):
    """The parts of a tile's u; v: of the rows; seen_at: keys that S is multiplied by; through (GDN): what multiplies
    the products."""
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    zero = gl.zeros(v.shape, gl.float32, layout=MMA)
    W = seen_by_rows(S, seen_at, 0, zero, MMA)
    if not KDA:
        W *= gl.expand_dims(through, 0)
    return left_parts(products(left_parts(v.to(gl.float32) - W * unit, MMA), solve, zero), MMA)


@gluon.jit
def replay_pieces(S, unit, left, left_at, last_at, last, c: gl.constexpr, KDA: gl.constexpr):
    """Chunk c of a tile, as loaded, with the staged rows folded in, as pieces in fp32.

    left, left_at: u's parts and the keys that they multiply; last (KDA: last_at [K]): what S fades by.
    """
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    new = ()
    for i in gl.static_range(len(S)):
        if KDA:
            last = gl.expand_dims(last_at.slice((c * len(S) + i) * PIECE, PIECE).load(gl.SliceLayout(0, MMA)), 0)
        x = S[i].to(gl.float32) * unit
        new = new + (replay_piece(x, left, left_at, c * len(S) + i, last, MMA),)
    return new


@gluon.jit
def store_tile(S, state, state_scales, first_row, K: gl.constexpr, WIDTH: gl.constexpr):
    """Write a tile of an fp8 checkpoint; returns what a read of it gives."""
    BLOCK_V: gl.constexpr = S[0].shape[0]
    L: gl.constexpr = chunk_layout(BLOCK_V, WIDTH, gl.num_warps())
    codes, scale = store_fp8(S, state + first_row * K, state_scales + first_row, L, K // WIDTH)
    values = ()
    for c in gl.static_range(len(S)):
        values = values + (codes[c] * gl.expand_dims(scale, 1),)
    return values


@gluon.jit
def store_pieces(S, state, first_row, c: gl.constexpr, K: gl.constexpr, WIDTH: gl.constexpr):
    """Round chunk c of a tile to a checkpoint of 16 or 32 bits and write it; returns what a read of it gives."""
    MMA: gl.constexpr = S[0].type.layout
    L: gl.constexpr = chunk_layout(S[0].shape[0], WIDTH, gl.num_warps())
    stored = from_pieces(S, L).to(state.dtype.element_ty)
    store_chunk(state + first_row * K, stored, c, K // WIDTH)
    return to_pieces(stored.to(gl.float32), MMA)


@gluon.jit
def renew_rows(S, X, codes, scales, columns_at, READ: gl.constexpr, K: gl.constexpr, WIDTH: gl.constexpr,
               OUTPUTS: gl.constexpr):  # fmt: skip
    """Write the fp8 copy of a whole tile; X plus what reads of it give. READ "none": of the checkpoint itself."""
    MMA: gl.constexpr = S[0].type.layout
    L: gl.constexpr = chunk_layout(S[0].shape[0], WIDTH, gl.num_warps())
    if READ == "none":
        # Values of an fp8 checkpoint are its codes times the rows' scales: 20 significant bits, in three parts.
        if OUTPUTS:
            for c in gl.static_range(len(S)):
                high, middle, low = split3(S[c])
                X = add_products(X, (low,), columns_at, c, MMA)
                X = add_products(X, (middle,), columns_at, c, MMA)
                X = add_products(X, (high,), columns_at, c, MMA)
    else:
        values, scale = store_fp8(S, codes, scales, L, K // WIDTH)
        if OUTPUTS:
            read = gl.zeros_like(X)
            for c in gl.static_range(len(S)):
                exact, _, _ = split3(values[c])
                read = add_products(read, (exact,), columns_at, c, MMA)
            X += read * gl.expand_dims(scale, 1)
    return X


@gluon.jit
def renew_chunk(S, X, codes, scales, columns_at, c: gl.constexpr, READ: gl.constexpr, K: gl.constexpr,
                WIDTH: gl.constexpr, OUTPUTS: gl.constexpr):  # fmt: skip
    """Write chunk c of a bf16 or int8 copy; X [V, columns] plus what reads of it give.

    The pointers are of the tile's first row.
    """
    MMA: gl.constexpr = S[0].type.layout
    CHUNKS: gl.constexpr = K // WIDTH
    L: gl.constexpr = chunk_layout(S[0].shape[0], WIDTH, gl.num_warps())
    if READ == "bf16":
        encoded = from_pieces(S, L).to(gl.bfloat16)
        store_chunk(codes, encoded, c, CHUNKS)
        if OUTPUTS:
            X = add_products(X, to_pieces(encoded, MMA), columns_at, c * (WIDTH // PIECE), MMA)
    else:
        pieces, scale = encode_int8_chunk(from_pieces(S, L), codes, scales, c, CHUNKS, MMA)
        if OUTPUTS:
            X += add_products(gl.zeros_like(X), pieces, columns_at, c, MMA) * gl.expand_dims(scale, 1)
    return X
