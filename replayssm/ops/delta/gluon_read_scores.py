"""What a reading program computes once for its v-heads: operands of the copy's product, weights of the ring rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from replayssm.ops.delta.gluon_common import add, add2, row_of, view_as
from replayssm.ops.delta.gluon_read_codes import stage_operand
from replayssm.ops.gluon_window_parts import mma_layout


@gluon.jit
def power_near(squares):
    """The power of two p, and 1 / p, that brings a vector with this sum of squares to a norm in (1/2, 1]."""
    bits = gl.rsqrt(gl.maximum(squares, 1e-36)).to(gl.int32, bitcast=True) & 0x7F800000
    return bits.to(gl.float32, bitcast=True), (0x7F000000 - bits).to(gl.float32, bitcast=True)


@gluon.jit
def store_factors(factor_at, k, q):
    """Put the factors of k's and q's products into shared memory: [k, q] of every pair of columns."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    column = gl.arange(0, 8, layout=L)
    factor_at.store(gl.where(column % 2 == 0, k, q))


@gluon.jit
def store_weights(weight_at, k, q, HEADS: gl.constexpr, ROWS: gl.constexpr):
    """Put ring rows' weights [heads, rows] into shared memory as [heads, 8, rows]: k, q, their rounding errors, 0."""
    w = gl.join(k, q)
    high = w.to(weight_at.dtype)
    low = (w - high.to(gl.float32)).to(weight_at.dtype)
    parts = gl.join(high, low)
    parts = gl.permute(gl.join(parts, parts * 0.0), (0, 4, 3, 2, 1))
    view_as(weight_at, weight_at.dtype, HEADS * 8, ROWS, gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])).store(
        gl.reshape(parts, [HEADS * 8, ROWS])
    )


@gluon.jit
def exp(x):
    """e^x of weights of reads; programs of one warp: approximately, with results below the normal numbers as zero."""
    if gl.num_warps() == 1:
        scaled = x * 1.4426950408889634
        x = gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [scaled], gl.float32, True, 1)
    else:
        x = gl.exp(x)
    return x


@gluon.jit
def inverse_norms(left, keys_at, ROWS: gl.constexpr, WIDTH: gl.constexpr, SCORES: gl.constexpr):
    """1 / the norms of the staged keys [rows, K], of which `left` are the left operand.

    In programs of one warp the squares come from the tensor cores too: the diagonal of the keys' products.
    """
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    if gl.num_warps() == 1:
        turned = keys_at.permute((1, 0)).load(gl.DotOperandLayout(1, MMA, WIDTH))
        pairs = mma_v2(left, turned, gl.zeros([ROWS, ROWS], gl.float32, layout=MMA))
        i = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA)), 1)
        j = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, MMA)), 0)
        squares = gl.sum(gl.where(i == j, pairs, 0.0), 1)
    else:
        keys = keys_at.load(SCORES).to(gl.float32)
        squares = gl.sum(keys * keys, 1)
    return gl.rsqrt(squares + 1e-6)


@gluon.jit
def sum_rows(a, b):
    """Sums of a and b [rows, K] over K; of one warp every lane has a part: added up through shared memory."""
    if gl.num_warps() == 1:
        rows: gl.constexpr = a.shape[0]
        per_lane: gl.constexpr = a.shape[1] // 32
        L: gl.constexpr = gl.BlockedLayout([1, rows], [rows, 32 // rows], [1, 1], [1, 0])
        a = gl.convert_layout(gl.sum(gl.reshape(a, [rows, 32, per_lane]), 2), L)
        b = gl.convert_layout(gl.sum(gl.reshape(b, [rows, 32, per_lane]), 2), L)
        a = gl.sum(a, 1)
        b = gl.sum(b, 1)
    else:
        a, b = gl.reduce((a, b), 1, add2)
    return a, b


@gluon.jit
def read_scalar(
    keys_at, columns, gates, oldest, decay, k_whole, q_whole, count, scale, x_at, weight_at, factor_at,
    READ: gl.constexpr, SPLIT: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr, PAD_HEADS: gl.constexpr,
    WIDTH: gl.constexpr, SCORES: gl.constexpr, HEADS: gl.constexpr, NORM: gl.constexpr,
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
    left = keys_at.load(gl.DotOperandLayout(0, MMA, WIDTH))
    score = mma_v2(left, columns, gl.zeros([ROWS, 8], gl.float32, layout=MMA))
    if NORM:
        norms = inverse_norms(left, keys_at, ROWS, WIDTH, SCORES)
        score *= gl.expand_dims(gl.convert_layout(norms, gl.SliceLayout(1, MMA)), 1)
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
    """KDA's one head: as `read_scalar`, with the decay inside the operand; returns k . q."""
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    IN_ROWS: gl.constexpr = gl.SliceLayout(0, HEADS)
    # Where sums are normalised: one warp's and their norms lie apart, others' together.
    SUMS: gl.constexpr = IN_ROWS if gl.num_warps() == 1 else gl.SliceLayout(1, SCORES)
    age = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    if NORM:
        k = k * gl.rsqrt(gl.sum(k * k, 0) + 1e-6)
        q = q * gl.rsqrt(gl.sum(q * q, 0) + 1e-6)
    q = q * scale
    gates = gl.where(gl.expand_dims(age == 0, 1), gl.expand_dims(decay, 0), gates)
    weighted = keys_at.load(SCORES).to(gl.float32) * exp(gl.associative_scan(gates, 0, add))
    through = exp(gl.sum(gates, axis=0) + oldest)
    seen_k, seen_q = sum_rows(weighted * gl.expand_dims(k, 0), weighted * gl.expand_dims(q, 0))
    seen_k = gl.convert_layout(seen_k, SUMS)
    seen_q = gl.convert_layout(seen_q, SUMS)
    if NORM:
        left = keys_at.load(gl.DotOperandLayout(0, MMA, 2))
        norms = gl.convert_layout(inverse_norms(left, keys_at, ROWS, 2, SCORES), SUMS)
        seen_k *= norms
        seen_q *= norms
    live = gl.arange(0, ROWS, layout=SUMS) < count
    seen_k = gl.expand_dims(gl.convert_layout(gl.where(live, seen_k, 0.0), IN_ROWS), 0)
    seen_q = gl.expand_dims(gl.convert_layout(gl.where(live, seen_q, 0.0), IN_ROWS), 0)
    store_weights(weight_at, seen_k, seen_q, 1, ROWS)
    kq = gl.sum(k * q, 0)
    k = k * through
    q = q * through
    p_k, inverse_k = power_near(gl.sum(k * k, 0))
    p_q, inverse_q = power_near(gl.sum(q * q, 0))
    stage_operand(x_at, k * p_k, q * p_q, READ, SPLIT, K)
    store_factors(factor_at, inverse_k, inverse_q)
    return kq
