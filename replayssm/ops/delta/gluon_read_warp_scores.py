"""What a reading program of one warp computes once for its v-heads; see `gluon_read_scores`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from replayssm.ops.delta.gluon_common import add, row_of, view_as
from replayssm.ops.delta.gluon_read_codes import stage_operand
from replayssm.ops.delta.gluon_read_scores import power_near, store_factors, store_weights
from replayssm.ops.gluon_window_parts import mma_layout


@gluon.jit
def exp(x):
    """e^x, approximately, with results below the normal numbers as zero: weights of reads."""
    scaled = x * 1.4426950408889634
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [scaled], gl.float32, True, 1)


@gluon.jit
def inverse_key_norms(keys, keys_at, ROWS: gl.constexpr, MMA: gl.constexpr, WIDTH: gl.constexpr):
    """1 / the norms of the staged keys [rows, K], of which `keys` are the left operand.

    The squares come from the tensor cores too: the diagonal of the keys' products.
    """
    turned = keys_at.permute((1, 0)).load(gl.DotOperandLayout(1, MMA, WIDTH))
    pairs = mma_v2(keys, turned, gl.zeros([ROWS, ROWS], gl.float32, layout=MMA))
    i = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA)), 1)
    j = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, MMA)), 0)
    return gl.rsqrt(gl.sum(gl.where(i == j, pairs, 0.0), 1) + 1e-6)


@gluon.jit
def sum_rows(a, b, SCORES: gl.constexpr):
    """Sums of a and b [rows, K] over K, of which every lane has a part: added up through shared memory by one warp."""
    rows: gl.constexpr = a.shape[0]
    per_lane: gl.constexpr = a.shape[1] // 32
    L: gl.constexpr = gl.BlockedLayout([1, rows], [rows, 32 // rows], [1, 1], [1, 0])
    a = gl.convert_layout(gl.sum(gl.reshape(a, [rows, 32, per_lane]), 2), L)
    b = gl.convert_layout(gl.sum(gl.reshape(b, [rows, 32, per_lane]), 2), L)
    a = gl.sum(a, 1)
    b = gl.sum(b, 1)
    return a, b


@gluon.jit
def read_scalar(
    keys_at, columns, gates, oldest, decay, k_whole, q_whole, count, scale, x_at, weight_at, factor_at,
    READ: gl.constexpr, SPLIT: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr, PAD_HEADS: gl.constexpr,
    WIDTH: gl.constexpr, HEADS: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """GDN: fill x_at, weight_at, factor_at; returns k . q (normalised and scaled) and what the copy fades by [heads].

    columns: k, q and anything as an operand [K, 8] with WIDTH neighbours a thread. The raw k and q times powers of two
    are exact in fp16; their norms come after the products.
    """
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    since = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, HEADS)), 0)
    k2 = gl.sum(k_whole * k_whole, 0)
    q2 = gl.sum(q_whole * q_whole, 0)
    p_k, inverse_k = power_near(k2)
    p_q, inverse_q = power_near(q2)
    stage_operand(x_at, k_whole * p_k, q_whole * p_q, READ, SPLIT, K)
    norm_k = 1.0
    norm_q = scale
    if NORM:
        norm_k = gl.rsqrt(k2 + 1e-6)
        norm_q = gl.rsqrt(q2 + 1e-6) * scale
    store_factors(factor_at, norm_k * inverse_k, norm_q * inverse_q)
    gates = gl.where(since == 0, gl.expand_dims(decay, 1), gates)
    fade = exp(gl.associative_scan(gates, 1, add))
    through = exp(gl.sum(gates, axis=1) + oldest)
    keys = keys_at.load(gl.DotOperandLayout(0, MMA, WIDTH))
    score = mma_v2(keys, columns, gl.zeros([ROWS, 8], gl.float32, layout=MMA))
    if NORM:
        score *= gl.expand_dims(inverse_key_norms(keys, keys_at, ROWS, MMA, WIDTH), 1)
    score_at = gl.allocate_shared_memory(gl.float32, [8 * ROWS], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    view_as(score_at, gl.float32, ROWS, 8, gl.SwizzledSharedLayout(1, 1, 1, order=[0, 1])).store(score)
    live = since < count
    seen_k = row_of(score_at, 0, 8, ROWS).load(gl.SliceLayout(0, HEADS)) * norm_k
    seen_q = row_of(score_at, 1, 8, ROWS).load(gl.SliceLayout(0, HEADS)) * norm_q
    seen_k = gl.where(live, gl.expand_dims(seen_k, 0), 0.0)
    seen_q = gl.where(live, gl.expand_dims(seen_q, 0), 0.0)
    store_weights(weight_at, seen_k * fade, seen_q * fade, PAD_HEADS, ROWS)
    return gl.sum(k_whole * q_whole, 0) * norm_k * norm_q, through


@gluon.jit
def read_vector(
    keys_at, gates, oldest, decay, k, q, count, scale, x_at, weight_at, factor_at,
    READ: gl.constexpr, SPLIT: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr,
    SCORES: gl.constexpr, HEADS: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """KDA's one head: as `read_scalar`, with the decay inside the operand."""
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    IN_ROWS: gl.constexpr = gl.SliceLayout(0, HEADS)
    age = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    if NORM:
        k = k * gl.rsqrt(gl.sum(k * k, 0) + 1e-6)
        q = q * gl.rsqrt(gl.sum(q * q, 0) + 1e-6)
    q = q * scale
    gates = gl.where(gl.expand_dims(age == 0, 1), gl.expand_dims(decay, 0), gates)
    weighted = keys_at.load(SCORES).to(gl.float32) * exp(gl.associative_scan(gates, 0, add))
    through = exp(gl.sum(gates, axis=0) + oldest)
    seen_k, seen_q = sum_rows(weighted * gl.expand_dims(k, 0), weighted * gl.expand_dims(q, 0), SCORES)
    seen_k = gl.convert_layout(seen_k, IN_ROWS)
    seen_q = gl.convert_layout(seen_q, IN_ROWS)
    if NORM:
        keys = keys_at.load(gl.DotOperandLayout(0, MMA, 2))
        norms = gl.convert_layout(inverse_key_norms(keys, keys_at, ROWS, MMA, 2), IN_ROWS)
        seen_k *= norms
        seen_q *= norms
    live = gl.arange(0, ROWS, layout=IN_ROWS) < count
    seen_k = gl.expand_dims(gl.where(live, seen_k, 0.0), 0)
    seen_q = gl.expand_dims(gl.where(live, seen_q, 0.0), 0)
    store_weights(weight_at, seen_k, seen_q, 1, ROWS)
    kq = gl.sum(k * q, 0)
    k = k * through
    q = q * through
    p_k, inverse_k = power_near(gl.sum(k * k, 0))
    p_q, inverse_q = power_near(gl.sum(q * q, 0))
    stage_operand(x_at, k * p_k, q * p_q, READ, SPLIT, K)
    store_factors(factor_at, inverse_k, inverse_q)
    return kq
