"""What a program computes once for all its tiles: the gates and scores of the ring's rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_common import add, add2, inverse_norm, log_decay, row_of_age, sigmoid, table


@gluon.jit
def load_gate(
    g, A_log, dt_bias, head, cols, offs_h, mask_h, stride_g_head,
    K: gl.constexpr, KDA: gl.constexpr, RAW: gl.constexpr, HAS_BIAS: gl.constexpr,
):
    """This token's raw gate [K] and its parameters (KDA), or the gates of some heads and theirs (GDN)."""
    a_log = 0.0
    bias = 0.0
    if KDA:
        decay = gl.load(g + cols).to(gl.float32)
        if RAW:
            a_log = gl.load(A_log + head).to(gl.float32)
        if HAS_BIAS:
            bias = gl.load(dt_bias + head * K + cols).to(gl.float32)
    else:
        decay = gl.load(g + offs_h * stride_g_head, mask=mask_h, other=0.0).to(gl.float32)
        if RAW:
            a_log = gl.load(A_log + head + offs_h, mask=mask_h, other=0.0).to(gl.float32)
        if HAS_BIAS:
            bias = gl.load(dt_bias + head + offs_h, mask=mask_h, other=0.0).to(gl.float32)
    return decay, a_log, bias


@gluon.jit
def this_token(
    k, q, decay, beta, a_log, bias, scale, lower_bound, RAW: gl.constexpr, BOUNDED: gl.constexpr, NORM: gl.constexpr
):
    """(k and q, normalised and scaled; k q; log decay; beta) of a row's token from what was loaded."""
    beta = beta.to(gl.float32)
    if RAW:
        beta = sigmoid(beta)
        decay = log_decay(decay, a_log, bias, lower_bound, BOUNDED)
    k = k.to(gl.float32)
    q = q.to(gl.float32)
    k = k * inverse_norm(k, 0, NORM)
    q = q * (inverse_norm(q, 0, NORM) * scale)
    return k, q, gl.sum(k * q, axis=0), decay, beta


@gluon.jit
def load_ring_gates(
    ring_g, ring_beta, cols, inner, age, offs_h, mask_h, start, committed, flush, ring_len, stride_rg_head,
    stride_rb_head, BLOCK_L: gl.constexpr, K: gl.constexpr, KDA: gl.constexpr, HEADS: gl.constexpr,
):
    """Of the ring rows by age, gates, betas and the oldest's gate: vectors of one head (KDA), or of some heads (GDN).

    A reading row gets the gates of the next younger rows, a flushing row those of the rows themselves and their betas.
    """
    younger = gl.where(flush, 0, 1)
    if KDA:
        rows = gl.expand_dims(row_of_age(start, committed, age - younger, ring_len), 1)
        live = gl.expand_dims((age < committed) & (age >= younger), 1)
        gates = gl.load(ring_g + rows * K + inner, mask=live, other=0.0)
        oldest = gl.load(ring_g + start * K + cols, mask=cols < gl.where(flush, 0, committed) * K, other=0.0)
        betas = gl.load(ring_beta + row_of_age(start, committed, age, ring_len), mask=flush & (age < committed),
                        other=0.0)
    else:
        since = gl.expand_dims(gl.arange(0, BLOCK_L, layout=gl.SliceLayout(0, HEADS)), 0)
        live = gl.expand_dims(mask_h, 1) & (since < committed)
        rows = row_of_age(start, committed, since - younger, ring_len)
        gates = gl.load(ring_g + gl.expand_dims(offs_h, 1) * stride_rg_head + rows, mask=live & (since >= younger),
                        other=0.0)
        oldest = gl.load(ring_g + offs_h * stride_rg_head + start, mask=mask_h & (committed > 0) & (not flush),
                         other=0.0)
        rows = row_of_age(start, committed, since, ring_len)
        betas = gl.load(ring_beta + gl.expand_dims(offs_h, 1) * stride_rb_head + rows, mask=live & flush, other=0.0)
    return gates, oldest, betas


@gluon.jit
def keep_decay(decay, k, q, k_at, q_at, through_at, KDA: gl.constexpr, HEADS: gl.constexpr):
    """For a flushing row: this token's own decay before the products of the new checkpoint with k and q."""
    if KDA:
        # Inside k_at and q_at.
        through_at.store(gl.full(through_at.shape, 1.0, gl.float32, layout=gl.SliceLayout(1, HEADS)))
        k = k * gl.exp(decay)
        q = q * gl.exp(decay)
    else:
        through_at.store(gl.exp(decay))
    k_at.store(k)
    q_at.store(q)


@gluon.jit
def keep_rows(keys, inverse, gates, betas, keys_at, gates_at, seen_k_at, seen_q_at, K: gl.constexpr,
              BLOCK_L: gl.constexpr, PAD_HEADS: gl.constexpr, KDA: gl.constexpr):
    """For a flushing row: the keys, decays and betas of its ring rows."""
    table(keys_at, BLOCK_L, K).store(keys * gl.expand_dims(inverse, 1))
    if KDA:
        table(gates_at, BLOCK_L, K).store(gl.exp(gates))
        seen_q_at.slice(0, BLOCK_L).store(betas)
    else:
        table(seen_k_at, PAD_HEADS, BLOCK_L).store(gl.exp(gates))
        table(seen_q_at, PAD_HEADS, BLOCK_L).store(betas)


@gluon.jit
def score(
    keys, inverse, gates, oldest, decay, k, q, count, k_at, q_at, seen_k_at, seen_q_at, through_at,
    BLOCK_L: gl.constexpr, PAD_HEADS: gl.constexpr, KDA: gl.constexpr, SCORES: gl.constexpr, HEADS: gl.constexpr,
):
    """Weights of the ring rows through k and q, youngest first, of one head (KDA) or every head (GDN).

    A row fades by the gates of the younger rows and of this token: the sum is never formed as a difference. KDA's gates
    lie inside the products.
    """
    age = gl.arange(0, BLOCK_L, layout=gl.SliceLayout(1, SCORES))
    if KDA:
        through_at.store(gl.full(through_at.shape, 1.0, gl.float32, layout=gl.SliceLayout(1, HEADS)))
        gates = gl.where(gl.expand_dims(age == 0, 1), gl.expand_dims(decay, 0), gates)
        keys = keys * gl.exp(gl.associative_scan(gates, 0, add))
        through = gl.exp(gl.sum(gates, axis=0) + oldest)
        k_at.store(k * through)
        q_at.store(q * through)
        k_seen = gl.expand_dims(k, 0)
        q_seen = gl.expand_dims(q, 0)
    else:
        since = gl.expand_dims(gl.arange(0, BLOCK_L, layout=gl.SliceLayout(0, HEADS)), 0)
        gates = gl.where(since == 0, gl.expand_dims(decay, 1), gates)
        through_at.store(gl.exp(gl.sum(gates, axis=1) + oldest))
        k_at.store(k)
        q_at.store(q)
        k_seen = gl.expand_dims(k_at.load(gl.SliceLayout(0, SCORES)), 0)
        q_seen = gl.expand_dims(q_at.load(gl.SliceLayout(0, SCORES)), 0)
    seen_k, seen_q = gl.reduce((keys * k_seen, keys * q_seen), 1, add2)
    seen_k = gl.where(age < count, seen_k * inverse, 0.0)
    seen_q = gl.where(age < count, seen_q * inverse, 0.0)
    if KDA:
        seen_k_at.slice(0, BLOCK_L).store(seen_k)
        seen_q_at.slice(0, BLOCK_L).store(seen_q)
    else:
        fade = gl.exp(gl.associative_scan(gates, 1, add))
        seen_k = gl.expand_dims(gl.convert_layout(seen_k, gl.SliceLayout(0, HEADS)), 0)
        seen_q = gl.expand_dims(gl.convert_layout(seen_q, gl.SliceLayout(0, HEADS)), 0)
        table(seen_k_at, PAD_HEADS, BLOCK_L).store(seen_k * fade)
        table(seen_q_at, PAD_HEADS, BLOCK_L).store(seen_q * fade)
