"""A flush inside the GDN/KDA window kernel: ring rows staged once a program, replayed into every tile."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_common import inverse_norm, replay_rows, row_of, row_of_age, table
from replayssm.ops.delta.gluon_layouts import scores_layout, tile_layout
from replayssm.ops.gluon_window_parts import heads_layout


@gluon.jit
def load_flush_v(ring_v, start, count, ring_len, V: gl.constexpr, BLOCK_V: gl.constexpr, ROWS: gl.constexpr):
    """v of the `count` committed rows, the youngest first, for a tile's V rows."""
    L: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [gl.num_warps(), 1], [1, 0])
    j = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    cols = gl.expand_dims(gl.arange(0, BLOCK_V, layout=gl.SliceLayout(0, L)), 0)
    rows = gl.expand_dims(row_of_age(start, count, j, ring_len) * V, 1)
    return gl.load(ring_v + (rows + cols), mask=gl.expand_dims(j < count, 1), other=0.0)


@gluon.jit
def serial_tables(HEADS: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr, KDA: gl.constexpr):
    """Shared memory for `stage_flush`: keys [rows, K], KDA's decays [rows, K], GDN's and betas [heads, rows]."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    keys_at = gl.allocate_shared_memory(gl.float32, [ROWS * K], FLAT)
    gates_at = gl.allocate_shared_memory(gl.float32, [ROWS * K if KDA else 1], FLAT)
    decay_at = gl.allocate_shared_memory(gl.float32, [HEADS * ROWS], FLAT)
    beta_at = gl.allocate_shared_memory(gl.float32, [HEADS * ROWS], FLAT)
    return keys_at, gates_at, decay_at, beta_at


@gluon.jit
def stage_flush(
    tables, ring_k, ring_g, ring_beta, start, count, ring_len, stride_rg_head,
    stride_rb_head,
    HEADS: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr, KDA: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """Put what all tiles of a flushing program need of the committed rows into shared memory, the youngest first.

    Norms are summed in the same layout as in the other kernels, so that they round alike.
    """
    keys_at, gates_at, decay_at, beta_at = tables
    WARPS: gl.constexpr = gl.num_warps()
    L: gl.constexpr = scores_layout(ROWS, K, WARPS, KDA)
    LH: gl.constexpr = heads_layout(WARPS)
    j = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    inner = gl.expand_dims(row_of_age(start, count, j, ring_len) * K, 1)
    inner += gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, L)), 0)
    live = gl.expand_dims(j < count, 1)
    h = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, LH)), 1)
    age = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, LH)), 0)
    row = row_of_age(start, count, age, ring_len)
    keys = gl.load(ring_k + inner, mask=live, other=0.0).to(gl.float32)
    beta = gl.load(ring_beta + h * stride_rb_head + row, mask=age < count, other=0.0)
    if KDA:
        table(gates_at, ROWS, K).store(gl.exp(gl.load(ring_g + inner, mask=live, other=0.0)))
    else:
        decay = gl.load(ring_g + h * stride_rg_head + row, mask=age < count, other=0.0)
        table(decay_at, HEADS, ROWS).store(gl.exp(decay))
    table(beta_at, HEADS, ROWS).store(beta)
    table(keys_at, ROWS, K).store(keys * gl.expand_dims(inverse_norm(keys, 1, NORM), 1))


@gluon.jit
def replay_tile(
    S, ring_v, state, tables, h, start, count, ring_len,
    HEADS: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr, ROWS: gl.constexpr,
    KDA: gl.constexpr, LS: gl.constexpr,
):  # fmt: skip
    """Replay the staged rows into a tile of the checkpoint, a tuple of one [V, K] in `LS`, and store it at `state`.

    Returns what memory now holds; ring_v points to the tile's V-rows.
    """
    keys_at, gates_at, decay_at, beta_at = tables
    TILE: gl.constexpr = tile_layout(state.dtype.element_ty.primitive_bitwidth, BLOCK_V, gl.num_warps())
    values_at = gl.allocate_shared_memory(
        ring_v.dtype.element_ty, [ROWS * BLOCK_V], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    table(values_at, ROWS, BLOCK_V).store(load_flush_v(ring_v, start, count, ring_len, V, BLOCK_V, ROWS))
    head_decay = row_of(decay_at, h, HEADS, ROWS) if HEADS > 1 else decay_at
    head_beta = row_of(beta_at, h, HEADS, ROWS) if HEADS > 1 else beta_at
    tile = gl.convert_layout(S[0], TILE).to(gl.float32)
    tile = replay_rows(
        tile, keys_at, values_at, gates_at, head_decay, head_beta, count, K, BLOCK_V, ROWS, KDA, TILE
    ).to(state.dtype.element_ty)
    at = gl.expand_dims(gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, TILE)), 1) * K
    gl.store(state + (at + gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, TILE)), 0)), tile)
    return (gl.convert_layout(tile, LS),)
