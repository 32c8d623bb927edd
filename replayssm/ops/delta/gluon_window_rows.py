"""Loads of a window program: its tokens' inputs, and the ring's committed rows, the oldest first."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_common import inverse_norm
from replayssm.ops.delta.gluon_window_fold import to_key_order
from replayssm.ops.gluon_window_parts import wrap


@gluon.constexpr_function
def keys_layout(k_dim, warps):
    """[rows, K] of 16-bit elements: 16-byte accesses."""
    return gl.BlockedLayout([1, 8], [256 // k_dim, k_dim // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def gates_layout(warps):
    """[heads, tokens] and [heads, columns]: an element a thread."""
    return gl.BlockedLayout([1, 1], [4, 8], [warps, 1], [1, 0])


@gluon.jit
def load_columns(q, k, length, stride_q, stride_k, K: gl.constexpr, TOKENS: gl.constexpr):
    """k, then q of the window's tokens, [columns, K]; 0 for tokens that a row does not have."""
    L: gl.constexpr = keys_layout(K, gl.num_warps())
    n = gl.arange(0, 2 * TOKENS, layout=gl.SliceLayout(1, L))
    t = n % TOKENS
    rows = gl.where(n < TOKENS, k + t * stride_k, q + t * stride_q)
    at = gl.expand_dims(rows, 1) + gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, L)), 0)
    return gl.load(at, mask=gl.expand_dims(t < length, 1), other=0.0)


@gluon.jit
def load_keys(ring_k, start, committed, ring_len, K: gl.constexpr, ROWS: gl.constexpr):
    """k of the committed rows, [rows, K]; 0 past the last."""
    L: gl.constexpr = keys_layout(K, gl.num_warps())
    j = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, L)), 1)
    inner = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, L)), 0)
    return gl.load(ring_k + (wrap(start + j, ring_len) * K + inner), mask=j < committed, other=0.0)


@gluon.jit
def append_keys(ring_k, columns, first, length, ring_len, K: gl.constexpr, TOKENS: gl.constexpr):
    """Write the window's k (of `load_columns`) to the rows from `first` on, start + committed."""
    L: gl.constexpr = keys_layout(K, gl.num_warps())
    t = gl.expand_dims(gl.arange(0, 2 * TOKENS, layout=gl.SliceLayout(1, L)), 1)
    inner = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, L)), 0)
    at = ring_k + (wrap(first + t, ring_len) * K + inner)
    gl.store(at, columns, mask=t < gl.minimum(length, TOKENS))


@gluon.jit
def stage_old_rows(keys_at, norm_at, keys, ROWS: gl.constexpr, NORM: gl.constexpr, KW: gl.constexpr):
    """The ring's part of `stage_rows`."""
    keys_at.store(to_key_order(keys, KW))
    norm_at.slice(0, ROWS).store(inverse_norm(keys.to(gl.float32), 1, NORM))


@gluon.jit
def stage_new_rows(
    raw_at, norm_at, columns, scale, ROWS: gl.constexpr, TOKENS: gl.constexpr, NORM: gl.constexpr, KW: gl.constexpr
):
    """The window's part of `stage_rows`."""
    L: gl.constexpr = columns.type.layout
    n = gl.arange(0, 2 * TOKENS, layout=gl.SliceLayout(1, L))
    raw_at.slice(0, 2 * TOKENS).store(to_key_order(columns, KW))
    norm_at.slice(ROWS, 2 * TOKENS).store(
        inverse_norm(columns.to(gl.float32), 1, NORM) * gl.where(n < TOKENS, 1.0, scale)
    )


@gluon.jit
def stage_rows(
    keys_at, raw_at, norm_at, keys, columns, scale, ROWS: gl.constexpr, TOKENS: gl.constexpr, NORM: gl.constexpr,
    KW: gl.constexpr = 2,
):  # fmt: skip
    """Raw keys, then columns, to shared memory, with what multiplies each: 1 over its L2 norm, for q also the scale.

    KW: neighbours along K that a thread loads of a checkpoint; keys and columns lie in `to_key_order`.
    """
    stage_old_rows(keys_at, norm_at, keys, ROWS, NORM, KW)
    stage_new_rows(raw_at, norm_at, columns, scale, ROWS, TOKENS, NORM, KW)
