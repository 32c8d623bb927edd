"""KDA: the rows of the ring and of the window with a decay for every column of the checkpoint.

A thread has a column of K, so that decays multiply up without exchange, as factors that are at most 1.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_common import inverse_norm, log_decay, table
from replayssm.ops.delta.gluon_window_gates import decay_of
from replayssm.ops.gluon_window_parts import wrap


@gluon.constexpr_function
def channel_layout(warps):
    """[K]: a column a thread."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.constexpr_function
def halvings(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def split_shape(columns, rows):
    return [columns, *([2] * halvings(rows))]


@gluon.constexpr_function
def column_layout(rows, warps):
    """[rows, K]: a column a thread."""
    return gl.BlockedLayout([rows, 1], [1, 32], [1, warps], [0, 1])


@gluon.jit
def load_rows(rows_at, ROWS: gl.constexpr, K: gl.constexpr):
    """Rows [K] of flat shared memory, a tuple."""
    return rows_of(table(rows_at, ROWS, K).load(column_layout(ROWS, gl.num_warps())))


@gluon.jit
def stack(rows):
    """A tuple of 2^n tensors [K] as [2^n, K]; no data moves."""
    K: gl.constexpr = rows[0].shape[0]
    NUM: gl.constexpr = len(rows)
    for _ in gl.static_range(halvings(NUM)):
        joined = ()
        for i in gl.static_range(len(rows) // 2):
            joined = joined + (gl.join(rows[i], rows[i + len(rows) // 2]),)
        rows = joined
    return gl.permute(gl.reshape(rows[0], [K, NUM]), (1, 0))


@gluon.jit
def rows_of(x):
    """What `stack` undoes, of [2^n, K] with a column a thread."""
    NUM: gl.constexpr = x.shape[0]
    LC: gl.constexpr = channel_layout(gl.num_warps())
    SPLIT: gl.constexpr = split_shape(x.shape[1], NUM)
    parts = (gl.reshape(gl.permute(x, (1, 0)), SPLIT),)
    for _ in gl.static_range(halvings(NUM)):
        even = ()
        odd = ()
        for i in gl.static_range(len(parts)):
            a, b = gl.split(parts[i])
            even = even + (a,)
            odd = odd + (b,)
        parts = even + odd
    rows = ()
    for i in gl.static_range(NUM):
        rows = rows + (gl.convert_layout(parts[i], LC, assert_trivial=True),)
    return rows


@gluon.jit
def load_new_channels(
    g, A_log, dt_bias, length, stride_token,
    K: gl.constexpr, TOKENS: gl.constexpr, RAW: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Gates of the window's tokens, a tuple of [K], raw or as log decays, and the raw ones' parameters."""
    c = gl.arange(0, K, layout=channel_layout(gl.num_warps()))
    gates = ()
    for t in gl.static_range(TOKENS):
        gates = gates + (gl.load(g + (t * stride_token + c), mask=t < length, other=0.0),)
    a_log = gl.load(A_log).to(gl.float32) if RAW else 0.0
    bias = gl.load(dt_bias + c).to(gl.float32) if HAS_BIAS else 0.0
    return gates, a_log, bias


@gluon.jit
def load_gates(ring_g, start, committed, ring_len, K: gl.constexpr, ROWS: gl.constexpr):
    """Log decays of the committed rows [rows, K], the oldest first; 0 past the last."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [128 // K, K // 4], [gl.num_warps(), 1], [1, 0])
    j = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, L)), 1)
    c = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, L)), 0)
    return gl.load(ring_g + (wrap(start + j, ring_len) * K + c), mask=j < committed, other=0.0)


@gluon.jit
def channel_decays(gates, a_log, bias, length, lower_bound, RAW: gl.constexpr, BOUNDED: gl.constexpr):
    """Log decays of what `load_new_channels` gave; 0 for tokens that a row does not have."""
    decays = ()
    for t in gl.static_range(len(gates)):
        g = gates[t].to(gl.float32)
        if RAW:
            g = gl.where(t < length, log_decay(g, a_log, bias, lower_bound, BOUNDED), 0.0)
        decays = decays + (g,)
    return decays


@gluon.jit
def append_channels(ring_g, decays, first, length, ring_len):
    """Write the log decays of the window's tokens to the rows from `first` on, start + committed."""
    K: gl.constexpr = decays[0].shape[0]
    c = gl.arange(0, K, layout=channel_layout(gl.num_warps()))
    for t in gl.static_range(len(decays)):
        gl.store(ring_g + (wrap(first + t, ring_len) * K + c), decays[t], mask=t < length)


@gluon.jit
def channel_space(ROWS: gl.constexpr, K: gl.constexpr):
    """Shared memory [3, rows * K] of fp32: keys and decays of the committed rows, and a spare part.

    A flush puts its operands over all of it: two in three bf16 parts.
    """
    return gl.allocate_shared_memory(gl.float32, [3, ROWS * K], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


@gluon.jit
def stage_channels(space, columns_at, keys, gates, columns, NORM: gl.constexpr):
    """Keys (normed), decays and, at columns_at, the window's k and q (normed) to shared memory, in fp32."""
    ROWS: gl.constexpr = keys.shape[0]
    K: gl.constexpr = keys.shape[1]
    keys = keys.to(gl.float32)
    columns = columns.to(gl.float32)
    table(space.index(0), ROWS, K).store(keys * gl.expand_dims(inverse_norm(keys, 1, NORM), 1))
    table(columns_at, columns.shape[0], K).store(columns * gl.expand_dims(inverse_norm(columns, 1, NORM), 1))
    table(space.index(1), ROWS, K).store(decay_of(gates))


@gluon.jit
def fade_rows(space, ROWS: gl.constexpr, K: gl.constexpr):
    """Keys as decayed to the last row, a tuple of [K], and the decay of the checkpoint to it."""
    keys = load_rows(space.index(0), ROWS, K)
    decays = load_rows(space.index(1), ROWS, K)
    run = gl.full([K], 1.0, gl.float32, layout=channel_layout(gl.num_warps()))
    faded = ()
    for j in gl.static_range(ROWS - 1, -1, -1):
        faded = (keys[j] * run,) + faded
        run *= decays[j]
    return faded, run
