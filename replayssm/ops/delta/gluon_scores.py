"""What a program computes once for all its tiles: the gates and scores of the ring's rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_common import add, add2, row_of_age, table


@gluon.jit
def load_vector_gate(g, A_log, dt_bias, cols, RAW: gl.constexpr, HAS_BIAS: gl.constexpr):
    """KDA: this token's raw gate and its parameters."""
    decay = gl.load(g + cols).to(gl.float32)
    a_log = 0.0
    bias = 0.0
    if RAW:
        a_log = gl.load(A_log).to(gl.float32)
    if HAS_BIAS:
        bias = gl.load(dt_bias + cols).to(gl.float32)
    return decay, a_log, bias


@gluon.jit
def load_scalar_gate(g, A_log, dt_bias, offs_h, mask_h, stride_g_head, RAW: gl.constexpr, HAS_BIAS: gl.constexpr):
    """GDN: this token's raw gates and their parameters, for some heads."""
    decay = gl.load(g + offs_h * stride_g_head, mask=mask_h, other=0.0).to(gl.float32)
    a_log = 0.0
    bias = 0.0
    if RAW:
        a_log = gl.load(A_log + offs_h, mask=mask_h, other=0.0).to(gl.float32)
    if HAS_BIAS:
        bias = gl.load(dt_bias + offs_h, mask=mask_h, other=0.0).to(gl.float32)
    return decay, a_log, bias


@gluon.jit
def load_vector(ring_g, ring_beta, cols, inner, age, start, committed, flush, ring_len, K: gl.constexpr):
    """KDA: of the ring rows by age, gates, betas and the oldest's gate.

    A reading row gets the gates of the next younger rows, a flushing row those of the rows themselves and their betas.
    """
    younger = gl.where(flush, 0, 1)
    rows = gl.expand_dims(row_of_age(start, committed, age - younger, ring_len), 1)
    gates = gl.load(ring_g + rows * K + inner, mask=gl.expand_dims((age < committed) & (age >= younger), 1), other=0.0)
    oldest = gl.load(ring_g + start * K + cols, mask=cols < gl.where(flush, 0, committed) * K, other=0.0)
    betas = gl.load(ring_beta + row_of_age(start, committed, age, ring_len), mask=flush & (age < committed), other=0.0)
    return gates, oldest, betas


@gluon.jit
def load_scalar(ring_g, ring_beta, offs_h, mask_h, age, start, committed, flush, ring_len, stride_rg_head,
                stride_rb_head):
    """GDN: as load_vector, for some heads; `age` is [1, rows]."""
    younger = gl.where(flush, 0, 1)
    live = gl.expand_dims(mask_h, 1) & (age < committed)
    rows = row_of_age(start, committed, age - younger, ring_len)
    gates = gl.load(ring_g + gl.expand_dims(offs_h, 1) * stride_rg_head + rows, mask=live & (age >= younger), other=0.0)
    oldest = gl.load(ring_g + offs_h * stride_rg_head + start, mask=mask_h & (committed > 0) & (not flush), other=0.0)
    betas = gl.load(ring_beta + gl.expand_dims(offs_h, 1) * stride_rb_head
                    + row_of_age(start, committed, age, ring_len), mask=live & flush, other=0.0)
    return gates, oldest, betas


@gluon.jit
def keep_flush(gates, betas, decay, k, q, k_at, q_at, gates_at, seen_k_at, seen_q_at, through_at, K: gl.constexpr,
               BLOCK_L: gl.constexpr, PAD_HEADS: gl.constexpr, KDA: gl.constexpr):
    """For a flushing row: the decays and betas of its ring rows, and this token's own decay before the products."""
    if KDA:
        table(gates_at, BLOCK_L, K).store(gl.exp(gates))
        seen_q_at.slice(0, BLOCK_L).store(betas)
        k_at.store(k * gl.exp(decay))
        q_at.store(q * gl.exp(decay))
    else:
        table(seen_k_at, PAD_HEADS, BLOCK_L).store(gl.exp(gates))
        table(seen_q_at, PAD_HEADS, BLOCK_L).store(betas)
        through_at.store(gl.exp(decay))


@gluon.jit
def score_vector(keys, inverse, gates, oldest, decay, k, q, count, k_at, q_at, seen_k_at, seen_q_at,
                 BLOCK_L: gl.constexpr, SCORES: gl.constexpr):
    """Weights of the ring rows through k and q, youngest first (KDA: the gates lie inside the products).

    A row fades by the gates of the younger rows and of this token: the sum is never formed as a difference.
    """
    age = gl.arange(0, BLOCK_L, layout=gl.SliceLayout(1, SCORES))
    gates = gl.where(gl.expand_dims(age == 0, 1), gl.expand_dims(decay, 0), gates)
    weighted = keys * gl.exp(gl.associative_scan(gates, 0, add))
    through = gl.exp(gl.sum(gates, axis=0) + oldest)
    k_at.store(k * through)
    q_at.store(q * through)
    seen_k, seen_q = gl.reduce((weighted * gl.expand_dims(k, 0), weighted * gl.expand_dims(q, 0)), 1, add2)
    seen_k_at.slice(0, BLOCK_L).store(gl.where(age < count, seen_k * inverse, 0.0))
    seen_q_at.slice(0, BLOCK_L).store(gl.where(age < count, seen_q * inverse, 0.0))


@gluon.jit
def score_scalar(keys, inverse, gates, oldest, decay, count, k_at, q_at, seen_k_at, seen_q_at, through_at,
                 BLOCK_L: gl.constexpr, PAD_HEADS: gl.constexpr, SCORES: gl.constexpr, HEADS: gl.constexpr):
    """Weights of the ring rows through k_at and q_at, youngest first, for every v-head (GDN)."""
    age = gl.arange(0, BLOCK_L, layout=gl.SliceLayout(1, SCORES))
    since = gl.expand_dims(gl.arange(0, BLOCK_L, layout=gl.SliceLayout(0, HEADS)), 0)
    gates = gl.where(since == 0, gl.expand_dims(decay, 1), gates)
    fade = gl.exp(gl.associative_scan(gates, 1, add))
    through_at.store(gl.exp(gl.sum(gates, axis=1) + oldest))
    k_seen = gl.expand_dims(k_at.load(gl.SliceLayout(0, SCORES)), 0)
    q_seen = gl.expand_dims(q_at.load(gl.SliceLayout(0, SCORES)), 0)
    seen_k, seen_q = gl.reduce((keys * k_seen, keys * q_seen), 1, add2)
    seen_k = gl.where(age < count, seen_k * inverse, 0.0)
    seen_q = gl.where(age < count, seen_q * inverse, 0.0)
    seen_k = gl.expand_dims(gl.convert_layout(seen_k, gl.SliceLayout(0, HEADS)), 0)
    seen_q = gl.expand_dims(gl.convert_layout(seen_q, gl.SliceLayout(0, HEADS)), 0)
    table(seen_k_at, PAD_HEADS, BLOCK_L).store(seen_k * fade)
    table(seen_q_at, PAD_HEADS, BLOCK_L).store(seen_q * fade)
