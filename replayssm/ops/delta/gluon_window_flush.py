"""A flush inside the GDN/KDA window kernel: ring rows staged once a program, replayed into every tile."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_common import inverse_norm, replay_rows, row_of, row_of_age, table
from replayssm.ops.delta.gluon_layouts import scores_layout
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
def stage_flush(
    keys_at, gates_at, decay_at, beta_at, ring_k, ring_g, ring_beta, start, count, ring_len, stride_rg_head,
    stride_rb_head,
    HEADS: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr, KDA: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """Put what all tiles of a flushing program need of the committed rows into shared memory, the youngest first.

    Norms are summed in the same layout as in the other kernels, so that they round alike.
    """
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
    S, values, state, values_at, keys_at, gates_at, decay_at, beta_at, h, count,
    HEADS: gl.constexpr, K: gl.constexpr, BLOCK_V: gl.constexpr, ROWS: gl.constexpr, KDA: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """Replay the staged rows into a tile of the checkpoint and store it at `state`; returns what memory now holds."""
    table(values_at, ROWS, BLOCK_V).store(values)
    head_decay = row_of(decay_at, h, HEADS, ROWS) if HEADS > 1 else decay_at
    head_beta = row_of(beta_at, h, HEADS, ROWS) if HEADS > 1 else beta_at
    S = replay_rows(
        S.to(gl.float32), keys_at, values_at, gates_at, head_decay, head_beta, count, K, BLOCK_V, ROWS, KDA, TILE
    ).to(state.dtype.element_ty)
    at = gl.expand_dims(gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, TILE)), 1) * K
    gl.store(state + (at + gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, TILE)), 0)), S)
    return S
