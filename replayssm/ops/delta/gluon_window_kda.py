"""KDA: what the rows of the ring and of the window weigh, with a decay for every column of the checkpoint."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from replayssm.ops.delta.gluon_common import log_decay
from replayssm.ops.gluon_window_parts import add, ancestor_bits, mma_layout, nearest_tf32, wrap
from replayssm.ops.mamba2.gluon_names import view


@gluon.constexpr_function
def channels_layout(rows, warps):
    """[rows, K]: a thread has a column."""
    return gl.BlockedLayout([rows, 1], [1, 32], [1, warps], [0, 1])


@gluon.jit
def load_new_vector(
    g, A_log, dt_bias, length, stride_token,
    K: gl.constexpr, TOKENS: gl.constexpr, RAW: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Gates of the window's tokens [tokens, K], raw or as log decays, and the raw ones' parameters."""
    L: gl.constexpr = channels_layout(TOKENS, gl.num_warps())
    t = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(1, L)), 1)
    c = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, L)), 0)
    gates = gl.load(g + t * stride_token + c, mask=t < length, other=0.0)
    a_log = gl.load(A_log).to(gl.float32) if RAW else 0.0
    bias = gl.load(dt_bias + c).to(gl.float32) if HAS_BIAS else 0.0
    return gates, a_log, bias


@gluon.jit
def load_old_vector(ring_g, start, committed, ring_len, K: gl.constexpr, ROWS: gl.constexpr):
    """Log decays of the oldest committed row [K], and of the row after each row [rows, K]; 0 past the last."""
    L: gl.constexpr = channels_layout(ROWS, gl.num_warps())
    j = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, L)), 1)
    c = gl.arange(0, K, layout=gl.SliceLayout(0, L))
    younger = gl.load(
        ring_g + (wrap(start + j + 1, ring_len) * K + gl.expand_dims(c, 0)), mask=j + 1 < committed, other=0.0
    )
    return gl.load(ring_g + start * K + c, mask=c < committed * K, other=0.0), younger


@gluon.jit
def vector_decays(gates, a_log, bias, length, lower_bound, RAW: gl.constexpr, BOUNDED: gl.constexpr):
    """Log decays [tokens, K] of what `load_new_vector` gave; 0 for tokens that a row does not have."""
    L: gl.constexpr = gates.type.layout
    gates = gates.to(gl.float32)
    if RAW:
        t = gl.expand_dims(gl.arange(0, gates.shape[0], layout=gl.SliceLayout(1, L)), 1)
        gates = gl.where(t < length, log_decay(gates, a_log, bias, lower_bound, BOUNDED), 0.0)
    return gates


@gluon.jit
def append_vector(ring_g, gates, first, length, ring_len):
    """Write the log decays of the window's tokens to the rows from `first` on, start + committed."""
    L: gl.constexpr = gates.type.layout
    K: gl.constexpr = gates.shape[1]
    t = gl.expand_dims(gl.arange(0, gates.shape[0], layout=gl.SliceLayout(1, L)), 1)
    c = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, L)), 0)
    gl.store(ring_g + wrap(first + t, ring_len) * K + c, gates, mask=t < length)


@gluon.jit
def kda_tables(
    keys_at, raw_at, norm_at, read_at, score_at, coef_at, oldest, younger, new, parents, length,
    K: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, TREE: gl.constexpr,
):  # fmt: skip
    """read_at [columns, K]: what multiplies the checkpoint; score_at [rows, columns]: what each committed row's u
    weighs; coef_at [token, columns]: the same of the window's tokens.

    Decays are products of two factors that are both at most 1, or of sums formed first.
    """
    WARPS: gl.constexpr = gl.num_warps()
    COLUMNS: gl.constexpr = 2 * TOKENS
    MMA: gl.constexpr = mma_layout(WARPS)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    LP: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PADDED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    faded_at = gl.allocate_shared_memory(gl.float32, [ROWS, K], PADDED)
    gates_at = gl.allocate_shared_memory(gl.float32, [TOKENS, K], FLAT)
    sum_at = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    plain_at = gl.allocate_shared_memory(gl.float32, [COLUMNS, K], FLAT)
    kq_at = gl.allocate_shared_memory(gl.float32, [COLUMNS, K], PADDED)
    keys = keys_at.load(younger.type.layout).to(gl.float32)
    faded_at.store(nearest_tf32(keys * gl.exp(gl.associative_scan(younger, 0, add, reverse=True))))
    sum_at.store(gl.sum(younger, 0) + oldest)
    view(gates_at, [TOKENS, K], PLAIN).store(new)
    # A thread has the weights of all tokens, so that they are stored at once.
    LJ: gl.constexpr = gl.BlockedLayout([1, TOKENS], [2, 16], [WARPS, 1], [1, 0])
    token = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, LJ)), 0)
    coef = gl.zeros([COLUMNS, TOKENS], gl.float32, layout=LJ)
    n = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, LP))
    t = n % TOKENS
    norm = norm_at.slice(ROWS, COLUMNS).load(gl.SliceLayout(1, LP))
    kq = raw_at.slice(0, COLUMNS).load(LP).to(gl.float32) * gl.expand_dims(norm, 1)
    view(plain_at, [COLUMNS, K], PLAIN).store(kq)
    bits = ancestor_bits(parents, length, t, TREE, TOKENS)
    path = kq * 0.0
    for back in gl.static_range(TOKENS):
        i = TOKENS - 1 - back
        k_i = gl.expand_dims(plain_at.index(i).load(gl.SliceLayout(0, LP)), 0)
        g_i = gl.expand_dims(gates_at.index(i).load(gl.SliceLayout(0, LP)), 0)
        seen = ((bits >> i) & 1) == 1
        pair = gl.sum(kq * (k_i * gl.exp(path)), 1)
        pair = gl.where(seen & ((t != i) | (n >= TOKENS)), pair, 0.0)
        coef = gl.where(token == i, gl.expand_dims(gl.convert_layout(pair, gl.SliceLayout(1, LJ)), 1), coef)
        path += gl.where(gl.expand_dims(seen, 1), g_i, 0.0)
    view(coef_at, [TOKENS, COLUMNS], PLAIN).permute((1, 0)).store(coef)
    total = path + gl.expand_dims(sum_at.load(gl.SliceLayout(0, LP)), 0)
    read_at.store(nearest_tf32(kq * gl.exp(total)))
    kq_at.store(nearest_tf32(kq * gl.exp(path)))
    zero = gl.zeros([ROWS, COLUMNS], gl.float32, layout=MMA)
    right = kq_at.permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 4))
    score = mma_v2(faded_at.load(LEFT), right, zero, input_precision="tf32")
    score *= gl.expand_dims(norm_at.slice(0, ROWS).load(gl.SliceLayout(1, MMA)), 1)
    score_at.store(score)
