"""A tile of the GDN/KDA window kernel: its products with the window's columns, and what is stored of them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from replayssm.ops.delta.gluon_read_codes import as_shape
from replayssm.ops.gluon_window_parts import (
    copy_to_shared,
    fetch_tile,
    mma_layout,
    product,
    rows_layout,
    wrap,
)


@gluon.constexpr_function
def doublings(first, rows):
    """How often `first` doubles to `rows`."""
    return (rows // first).bit_length() - 1 if first > 0 else 0


@gluon.constexpr_function
def raw_columns_shared(element_bits):
    """Shared memory of [columns, K] of 16 bits that meet a checkpoint: as many lanes as read at once, other banks."""
    return gl.SwizzledSharedLayout(512 // element_bits, 1, element_bits // 8, order=[1, 0])


@gluon.jit
def tile_of(memory, n, NC: gl.constexpr):
    """Tile n of memory [n * NC, rows, columns]: [rows, K], or [NC, rows, columns] for loops over its chunks."""
    if NC == 1:
        return memory.index(n)
    else:
        L: gl.constexpr = memory.type.layout
        SHAPE: gl.constexpr = [memory.shape[0] // NC, NC, memory.shape[1], memory.shape[2]]
        CUBE: gl.constexpr = gl.SwizzledSharedLayout(L.vec, L.per_phase, L.max_phase, order=[2, 1, 0])
        return as_shape(memory, memory.dtype, SHAPE, CUBE).index(n)


@gluon.jit
def store_chunks(tile, x):
    """Put [rows, K] into a tile of `tile_of`."""
    if len(tile.shape) == 3:
        x = gl.permute(gl.reshape(x, [tile.shape[1], tile.shape[0], tile.shape[2]]), (1, 0, 2))
    tile.store(x)


@gluon.jit
def fetch_rows(tile, state, FIRST: gl.constexpr, ROWS: gl.constexpr, K: gl.constexpr):
    """Start copying ROWS rows of the checkpoint, from FIRST on, to a tile of `tile_of`."""
    if len(tile.shape) == 2:
        fetch_tile(tile.slice(FIRST, ROWS), state + FIRST * K, K, ROWS)
    else:
        WIDTH: gl.constexpr = tile.shape[2]
        WIDE: gl.constexpr = 128 // state.dtype.element_ty.primitive_bitwidth
        LANES: gl.constexpr = [1, 32 * WIDE // WIDTH, WIDTH // WIDE]
        L: gl.constexpr = gl.BlockedLayout([1, 1, WIDE], LANES, [1, gl.num_warps(), 1], [2, 1, 0])
        c = gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
        k = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
        at = gl.expand_dims(gl.expand_dims(c * WIDTH, 1) + gl.expand_dims(row * K, 0), 2)
        at += gl.expand_dims(gl.expand_dims(k, 0), 1)
        copy_to_shared(tile.slice(FIRST, ROWS, dim=1), state + FIRST * K + at)


@gluon.jit
def fetch_from(tile, state, FIRST: gl.constexpr, ROWS: gl.constexpr, K: gl.constexpr):
    """Start copying a tile of the checkpoint but for its first rows, in few pieces: each waits for all warps."""
    if FIRST == 0:
        fetch_rows(tile, state, 0, ROWS, K)
    for i in gl.static_range(doublings(FIRST, ROWS)):
        fetch_rows(tile, state, FIRST << i, FIRST << i, K)


@gluon.jit
def load_tile(tiles, n, K: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr, TURNED: gl.constexpr = False):
    """Tile n of memory as `tile_of` has it, a tuple of [rows, WIDTH]; TURNED: of [WIDTH, rows]."""
    NC: gl.constexpr = K // tiles.shape[2]
    parts = ()
    for c in gl.static_range(K // WIDTH):
        part = tiles.index(n).slice(c * WIDTH, WIDTH, dim=1) if NC == 1 else tiles.index(n * NC + c)
        if TURNED:
            part = part.permute((1, 0))
        parts = parts + (part.load(LAYOUT),)
    return parts


@gluon.jit
def store_tile(state, S, K: gl.constexpr, LS: gl.constexpr):
    """Round a tile to the checkpoint's format and write it; returns what memory now holds."""
    WIDTH: gl.constexpr = S[0].shape[1]
    rows = gl.expand_dims(gl.arange(0, S[0].shape[0], layout=gl.SliceLayout(1, LS)), 1) * K
    cols = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LS)), 0)
    rounded = ()
    for c in gl.static_range(len(S)):
        part = S[c].to(state.dtype.element_ty)
        gl.store(state + (rows + (cols + c * WIDTH)), part)
        rounded = rounded + (part,)
    return rounded


@gluon.jit
def read_tile(S, columns, ACT: gl.constexpr):
    """Products of a tile with the columns, [V, columns]: one short chain of products a chunk."""
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    COLUMNS: gl.constexpr = columns[0].shape[1]
    X = gl.zeros([S[0].shape[0], COLUMNS], gl.float32, layout=MMA)
    for c in gl.static_range(len(S)):
        none = gl.zeros([S[0].shape[0], COLUMNS], gl.float32, layout=MMA)
        part = product(S[c], columns[c], none, ACT)
        X = part if c == 0 else X + part
    return X


@gluon.jit
def add_rows(X, u_at, weight, committed):
    """X plus the ring's committed u [rows, V] times their weights, which are split in two 16-bit numbers."""
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    u = u_at.permute((1, 0)).load(LEFT)
    live = gl.expand_dims(gl.arange(0, u_at.shape[0], layout=gl.SliceLayout(0, LEFT)) < committed, 0)
    u = gl.where(live, u, 0.0)
    high = weight.to(u.dtype)
    X = mma_v2(u, (weight - high.to(gl.float32)).to(u.dtype), X)
    return mma_v2(u, high, X)


@gluon.jit
def fetch_values(rows_at, v_at, ring, v, start, committed, length, ring_len, stride_token, V: gl.constexpr):
    """Start copying a tile's V-rows of the ring's committed rows, and of v of the window's tokens (half of v_at).

    What lies elsewhere is not to be read as a number; those who read mask it.
    """
    WARPS: gl.constexpr = gl.num_warps()
    L: gl.constexpr = rows_layout(rows_at.shape[1], WARPS)
    j = gl.expand_dims(gl.arange(0, rows_at.shape[0], layout=gl.SliceLayout(1, L)), 1)
    cols = gl.expand_dims(gl.arange(0, rows_at.shape[1], layout=gl.SliceLayout(0, L)), 0)
    copy_to_shared(rows_at, ring + (wrap(start + j, ring_len) * V + cols), mask=j < committed)
    TOKENS: gl.constexpr = v_at.shape[0] // 2
    t = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(1, L)), 1)
    copy_to_shared(v_at.slice(0, TOKENS), v + (t * stride_token + cols), mask=t < length)


@gluon.jit
def start_tiles(
    memory, places, first_state, begin, end, start, committed, length, ring_len, stride_state_head, stride_old_head,
    stride_v_token, stride_v_head, EARLY: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Start copying a program's first tiles, as many as are in flight, but for the first's first EARLY rows."""
    tiles, values_at, v_at = memory
    state, old, v = places
    NC: gl.constexpr = K // tiles.shape[2]
    BLOCK_V: gl.constexpr = tiles.shape[1]
    PER_HEAD: gl.constexpr = V // BLOCK_V
    for s in gl.static_range(tiles.shape[0] // NC):
        # A bound that the compiler does not fold: behind the branch it would let the copies wait for the ring's rows.
        if begin + s < gl.minimum(committed + end, end):
            to_h, to_col = (begin + s) // PER_HEAD, (begin + s) % PER_HEAD * BLOCK_V
            fetch_values(
                values_at.index(s), v_at.index(s), old + (to_h * stride_old_head + to_col),
                v + (to_h * stride_v_head + to_col), start, committed, length, ring_len, stride_v_token, V,
            )  # fmt: skip
            if s == 0:
                fetch_from(tile_of(tiles, 0, NC), first_state, EARLY, BLOCK_V, K)
            else:
                fetch_rows(tile_of(tiles, s, NC), state + (to_h * stride_state_head + to_col * K), 0, BLOCK_V, K)
        async_copy.commit_group()


@gluon.jit
def append_tile(ring_v, v_at, first, length, ring_len, V: gl.constexpr):
    """Write v [tokens, V] of the window's tokens to the rows from `first` on, start + committed."""
    L: gl.constexpr = rows_layout(v_at.shape[1], gl.num_warps())
    TOKENS: gl.constexpr = v_at.shape[0] // 2
    t = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(1, L)), 1)
    cols = gl.expand_dims(gl.arange(0, v_at.shape[1], layout=gl.SliceLayout(0, L)), 0)
    gl.store(ring_v + (wrap(first + t, ring_len) * V + cols), v_at.slice(0, TOKENS).load(L), mask=t < length)


@gluon.jit
def store_results(kept_at, ring_u, out, first, length, ring_len, stride_out, V: gl.constexpr, TOKENS: gl.constexpr):
    """Write a tile's u, then outputs, [columns, V] in shared memory; the pointers are of its first V-row.

    first: start + committed.
    """
    L: gl.constexpr = rows_layout(kept_at.shape[1], gl.num_warps())
    n = gl.expand_dims(gl.arange(0, 2 * TOKENS, layout=gl.SliceLayout(1, L)), 1)
    cols = gl.expand_dims(gl.arange(0, kept_at.shape[1], layout=gl.SliceLayout(0, L)), 0)
    at = gl.where(n < TOKENS, ring_u + wrap(first + n, ring_len) * V, out + (n - TOKENS) * stride_out)
    gl.store(at + cols, kept_at.load(L), mask=n % TOKENS < length)
