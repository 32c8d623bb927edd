"""The tiles of a Mamba-2 window: HW heads of BV V-rows each, 16 V-rows of a head a warp."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from replayssm.ops.gluon_window_parts import copy_to_shared, wrap


@gluon.constexpr_function
def tile_rows_layout(block_v, heads, warps):
    """[heads, ring rows, V]: 16-byte accesses."""
    return gl.BlockedLayout([1, 1, 8], [1, 256 // block_v, block_v // 8], [heads, warps // heads, 1], [2, 1, 0])


@gluon.constexpr_function
def tile_outputs_layout(tokens, heads, warps):
    """[heads, V, tokens]: neighbouring V-rows in neighbouring lanes, 16 of them a warp."""
    return gl.BlockedLayout([1, 2, tokens // 4], [1, 8, 4], [heads, warps // heads, 1], [1, 2, 0])


@gluon.constexpr_function
def blocks_of(tiles, per_block):
    """Blocks of heads, of `per_block` tiles each, that `tiles` neighbours may touch, rounded up to a power of two."""
    even = tiles % per_block == 0 or per_block % tiles == 0
    most = -(-tiles // per_block) if even else (per_block + tiles - 2) // per_block + 1
    return 1 << (most - 1).bit_length()


@gluon.constexpr_function
def pieces_of(first, end):
    """In how many pieces rows from `first` on are copied, each as long as what lies before it."""
    return (end // first).bit_length() - 1


@gluon.jit
def fetch_rows(rows, state_ptr, state_head, N: gl.constexpr, BV: gl.constexpr, FIRST: gl.constexpr, END: gl.constexpr):
    """Start copying the rows FIRST to END of a tile [heads * BV, N] of the checkpoint to shared memory."""
    if FIRST == 0:
        fetch_piece(rows, state_ptr, state_head, N, BV, 0, END)
    else:
        for i in gl.static_range(pieces_of(FIRST, END)):
            fetch_piece(rows, state_ptr, state_head, N, BV, FIRST << i, FIRST << i)


@gluon.jit
def fetch_piece(
    rows, state_ptr, state_head, N: gl.constexpr, BV: gl.constexpr, FIRST: gl.constexpr, SIZE: gl.constexpr
):
    """Start copying SIZE rows of a tile."""
    BITS: gl.constexpr = state_ptr.dtype.element_ty.primitive_bitwidth
    LANES: gl.constexpr = min(32, N * BITS // 128)
    L: gl.constexpr = gl.BlockedLayout([1, 128 // BITS], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    row = FIRST + gl.arange(0, SIZE, layout=gl.SliceLayout(1, L))
    k = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, L)), 0)
    to = rows if SIZE == rows.shape[0] else rows.slice(FIRST, SIZE)
    copy_to_shared(to, state_ptr + (gl.expand_dims(row // BV * state_head + row % BV * N, 1) + k))


@gluon.jit
def fetch_first(
    tiles, state_ptr, state_head, begin, end,
    PER_BLOCK: gl.constexpr, HW: gl.constexpr, BV: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Start copying the first tiles from `begin` on, without the EARLY rows of the first that are on their way."""
    N: gl.constexpr = tiles.shape[2]
    STAGES: gl.constexpr = tiles.shape[0]
    for s in gl.static_range(STAGES):
        _, h, v = tile_at(begin + s, PER_BLOCK, HW, BV)
        tile_ptr = state_ptr + h * state_head + v * N
        if s == 0:
            if EARLY < HW * BV:
                fetch_rows(tiles.index(0), tile_ptr, state_head, N, BV, EARLY, HW * BV)
        elif begin + s < end:
            fetch_rows(tiles.index(s), tile_ptr, state_head, N, BV, 0, HW * BV)
        async_copy.commit_group()


@gluon.jit
def take_tile(tile, rows, next_ptr, state_head, more, REFILLED: gl.constexpr, L: gl.constexpr):
    """A tile [heads, V, K] from shared memory, to whose place (`rows`) the next is copied if there is `more`."""
    S = tile.load(L)
    if REFILLED:
        if more:
            fetch_rows(rows, next_ptr, state_head, tile.shape[2], tile.shape[1], 0, rows.shape[0])
    return S


@gluon.jit
def for_all_heads(x, HEADS: gl.constexpr, L: gl.constexpr):
    """An operand [rows, columns] as [heads, rows, columns] in layout L."""
    x, _ = gl.broadcast(gl.expand_dims(x, 0), gl.zeros([HEADS, 1, 1], x.dtype, layout=L))
    return x


@gluon.jit
def tile_at(at, PER_BLOCK: gl.constexpr, HW: gl.constexpr, BV: gl.constexpr):
    """(block of heads, its first head, first V-row) of a tile, counted from the first tile of the first block."""
    block = at // PER_BLOCK
    return block, block * HW, at % PER_BLOCK * BV


@gluon.jit
def load_x(
    x_ptr, ring_x_ptr, x_token, x_head, ring_x_head, start, length, count, P: gl.constexpr, R: gl.constexpr,
    ROWS: gl.constexpr, HW: gl.constexpr, BV: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """x of a tile's rows by age, [heads, rows, V]: the window's from the inputs, then the committed ones."""
    age = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    age = gl.expand_dims(gl.expand_dims(age, 0), 2)
    h, v = heads_and_rows(HW, BV, L)
    new = x_ptr + ((length - 1 - age) * x_token + h * x_head + v)
    old = ring_x_ptr + (wrap(start + count - 1 - age, R) * P + h * ring_x_head + v)
    return gl.load(gl.where(age < length, new, old), mask=age < count, other=0.0)


@gluon.jit
def heads_and_rows(HW: gl.constexpr, BV: gl.constexpr, L: gl.constexpr):
    """Numbers of a tile's heads and V-rows, along the first and the last dimension of layout L."""
    h = gl.arange(0, HW, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    v = gl.arange(0, BV, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    return gl.expand_dims(gl.expand_dims(h, 1), 2), gl.expand_dims(gl.expand_dims(v, 0), 1)


@gluon.jit
def append_x(
    x, ring_x_ptr, ring_x_head, last, length, P: gl.constexpr, R: gl.constexpr, HW: gl.constexpr, BV: gl.constexpr
):
    """Write the window's rows of a tile's x, [heads, rows by age, V], to the ring; `last` is its last token's row."""
    L: gl.constexpr = x.type.layout
    age = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    age = gl.expand_dims(gl.expand_dims(age, 0), 2)
    h, v = heads_and_rows(HW, BV, L)
    gl.store(ring_x_ptr + (wrap(last - age, R) * P + h * ring_x_head + v), x, mask=age < length)


@gluon.jit
def store_outputs(y, out_ptr, z_ptr, out_token, out_head, z_token, z_head, length, HAS_Z: gl.constexpr):
    """Gate a tile's outputs [heads, V, tokens] and write those of the window's tokens."""
    L: gl.constexpr = y.type.layout
    h = gl.arange(0, y.shape[0], layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    v = gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    t = gl.arange(0, y.shape[2], layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    h, v = gl.expand_dims(gl.expand_dims(h, 1), 2), gl.expand_dims(gl.expand_dims(v, 0), 2)
    t = gl.expand_dims(gl.expand_dims(t, 0), 1)
    if HAS_Z:
        z = gl.load(z_ptr + (h * z_head + v + t * z_token), mask=t < length, other=0.0).to(gl.float32)
        y *= z / (1.0 + gl.exp(-z))
    gl.store(out_ptr + (h * out_head + v + t * out_token), y.to(out_ptr.dtype.element_ty), mask=t < length)


@gluon.jit
def zero_outputs(
    out_ptr, length, begin, end, out_token, out_head, PER_BLOCK: gl.constexpr, HW: gl.constexpr, BV: gl.constexpr
):
    """A padding row's outputs: zeros for the tiles `begin` to `end`."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    i = gl.arange(0, HW * BV, layout=L)
    zero = gl.zeros([HW * BV], out_ptr.dtype.element_ty, layout=L)
    for n in range((end - begin) * length):
        _, h, v = tile_at(begin + n // length, PER_BLOCK, HW, BV)
        gl.store(out_ptr + (n % length * out_token + h * out_head + v) + (i // BV * out_head + i % BV), zero)
