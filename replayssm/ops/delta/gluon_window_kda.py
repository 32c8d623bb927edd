"""KDA: what the rows of the ring and of the window weigh, with a decay for every column of the checkpoint."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from replayssm.ops.delta.gluon_common import log_decay
from replayssm.ops.gluon_window_parts import add, ancestor_bits, nearest_tf32, wrap
from replayssm.ops.mamba2.gluon_names import view


@gluon.jit
def kda_tables(
    keys, read_at, weight_at, coef_at, q, k, g, ring_g, A_log, dt_bias, parents, length, count, start, end, ring_len,
    whole, scale, lower_bound, stride_q_token, stride_k_token, stride_g_token,
    K: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, MMA: gl.constexpr, LC: gl.constexpr, LS: gl.constexpr,
    TREE: gl.constexpr, RAW: gl.constexpr, HAS_BIAS: gl.constexpr, BOUNDED: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """As `gluon_window_gdn.gdn_tables`, for KDA's one head; read_at [columns, K]: what multiplies the checkpoint.

    coef_at is by token. Decays are products of two factors that are both at most 1, or of sums formed first.
    """
    WARPS: gl.constexpr = gl.num_warps()
    COLUMNS: gl.constexpr = 2 * TOKENS
    LG: gl.constexpr = gl.BlockedLayout([ROWS, 1], [1, 32], [1, WARPS], [0, 1])
    LT: gl.constexpr = gl.BlockedLayout([TOKENS, 1], [1, 32], [1, WARPS], [0, 1])
    LP: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PADDED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    fade_at = gl.allocate_shared_memory(gl.float32, [ROWS, K], PADDED)
    gates_at = gl.allocate_shared_memory(gl.float32, [TOKENS, K], FLAT)
    sum_at = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    plain_at = gl.allocate_shared_memory(gl.float32, [COLUMNS, K], FLAT)
    kq_at = gl.allocate_shared_memory(gl.float32, [COLUMNS, K], PADDED)
    age = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, LG)), 1)
    c = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, LG)), 0)
    is_old = (age > length) & (age < count)
    younger = gl.load(ring_g + wrap(start + count - age, ring_len) * K + c, mask=is_old, other=0.0)
    one = gl.arange(0, K, layout=gl.SliceLayout(0, LG))
    oldest = gl.load(ring_g + start * K + one, mask=one < (count - length) * K, other=0.0)
    t = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(1, LT)), 1)
    c = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, LT)), 0)
    gates = gl.load(g + t * stride_g_token + c, mask=t < length, other=0.0).to(gl.float32)
    n = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, LP))
    is_k = n < TOKENS
    t_of = n % TOKENS
    rows = gl.where(is_k, k + t_of * stride_k_token, q + t_of * stride_q_token)
    at = gl.expand_dims(rows, 1) + gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, LP)), 0)
    kq = gl.load(at, mask=gl.expand_dims(t_of < length, 1), other=0.0).to(gl.float32)
    if RAW:
        bias = gl.load(dt_bias + c).to(gl.float32) if HAS_BIAS else 0.0
        gates = gl.where(t < length, log_decay(gates, gl.load(A_log).to(gl.float32), bias, lower_bound, BOUNDED), 0.0)
    fade_at.store(gl.exp(gl.associative_scan(younger, 0, add)))
    sum_at.store(gl.sum(younger, 0) + oldest)
    view(gates_at, [TOKENS, K], PLAIN).store(gates)
    if whole:
        gl.store(ring_g + wrap(end - (length - 1) + t, ring_len) * K + c, gates, mask=t < length)
    factor = gl.where(is_k, 1.0, scale)
    if NORM:
        factor = factor * gl.rsqrt(gl.sum(kq * kq, 1) + 1e-6)
    kq = kq * gl.expand_dims(factor, 1)
    view(plain_at, [COLUMNS, K], PLAIN).store(kq)
    bits = ancestor_bits(parents, length, t_of, TREE, TOKENS)
    path = kq * 0.0
    for back in gl.static_range(TOKENS):
        i = TOKENS - 1 - back
        k_i = gl.expand_dims(plain_at.index(i).load(gl.SliceLayout(0, LP)), 0)
        g_i = gl.expand_dims(gates_at.index(i).load(gl.SliceLayout(0, LP)), 0)
        seen = ((bits >> i) & 1) == 1
        pair = gl.sum(kq * (k_i * gl.exp(path)), 1)
        coef_at.index(i).store(gl.where(seen & ((t_of != i) | (n >= TOKENS)), pair, 0.0))
        path += gl.where(gl.expand_dims(seen, 1), g_i, 0.0)
    total = path + gl.expand_dims(sum_at.load(gl.SliceLayout(0, LP)), 0)
    read_at.store(nearest_tf32(kq * gl.exp(total)))
    kq_at.store(nearest_tf32(kq * gl.exp(path)))
    keys = keys.to(gl.float32)
    zero = gl.zeros([ROWS, COLUMNS], gl.float32, layout=MMA)
    faded = nearest_tf32(keys * fade_at.load(LS))
    score = mma_v2(faded, kq_at.permute((1, 0)).load(LC), zero, input_precision="tf32")
    if NORM:
        norm = gl.rsqrt(gl.sum(keys * keys, 1) + 1e-6)
        score *= gl.expand_dims(gl.convert_layout(norm, gl.SliceLayout(1, MMA)), 1)
    age = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA)), 1)
    weight = nearest_tf32(gl.where((age >= length) & (age < count), score, 0.0))
    view(weight_at, [ROWS, COLUMNS], PLAIN).store(weight)
