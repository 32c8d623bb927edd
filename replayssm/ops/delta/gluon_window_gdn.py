"""GDN: what the rows of the ring and of the window weigh in the columns (k, then q) of a window's tokens."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from replayssm.ops.delta.gluon_common import log_decay
from replayssm.ops.delta.gluon_window_rows import gates_layout, stage_new_rows, stage_old_rows
from replayssm.ops.gluon_window_parts import add, ancestor_bits, heads_layout, mma_layout, wrap
from replayssm.ops.mamba2.gluon_names import view


@gluon.jit
def load_new_gates(
    g, A_log, dt_bias, length, stride_token, stride_head,
    HEADS: gl.constexpr, TOKENS: gl.constexpr, RAW: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Gates of the window's tokens [heads, tokens], raw or as log decays, and the raw ones' parameters [heads, 1]."""
    L: gl.constexpr = gates_layout(gl.num_warps())
    h = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, L)), 1)
    t = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, L)), 0)
    gates = gl.load(g + h * stride_head + t * stride_token, mask=t < length, other=0.0)
    a_log = gl.load(A_log + h).to(gl.float32) if RAW else 0.0
    bias = gl.load(dt_bias + h).to(gl.float32) if HAS_BIAS else 0.0
    return gates, a_log, bias


@gluon.jit
def load_old_gates(ring_g, start, committed, ring_len, stride_head, HEADS: gl.constexpr, ROWS: gl.constexpr):
    """Log decays of the committed rows and of the next younger ones, [heads, rows]; 0 past the last."""
    L: gl.constexpr = heads_layout(gl.num_warps())
    h = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, L)), 1)
    j = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, L)), 0)
    ring_g += h * stride_head
    own = gl.load(ring_g + wrap(start + j, ring_len), mask=j < committed, other=0.0)
    younger = gl.load(ring_g + wrap(start + j + 1, ring_len), mask=j + 1 < committed, other=0.0)
    return own, younger


@gluon.jit
def load_old_beta(ring_beta, start, committed, ring_len, stride_head, HEADS: gl.constexpr, ROWS: gl.constexpr):
    """beta of the committed rows, [heads, rows]; 0 past the last."""
    L: gl.constexpr = heads_layout(gl.num_warps())
    h = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, L)), 1)
    j = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, L)), 0)
    return gl.load(ring_beta + (h * stride_head + wrap(start + j, ring_len)), mask=j < committed, other=0.0)


@gluon.jit
def decays(gates, a_log, bias, length, lower_bound, TOKENS: gl.constexpr, RAW: gl.constexpr, BOUNDED: gl.constexpr):
    """Log decays [heads, tokens] of what `load_new_gates` gave; 0 for tokens that a row does not have."""
    gates = gates.to(gl.float32)
    if RAW:
        t = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, gates_layout(gl.num_warps()))), 0)
        gates = gl.where(t < length, log_decay(gates, a_log, bias, lower_bound, BOUNDED), 0.0)
    return gates


@gluon.jit
def score_rows(rows_at, raw_at, norm, TOKENS: gl.constexpr):
    """Products of staged rows with the window's columns, times the rows' norms."""
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    ROWS: gl.constexpr = rows_at.shape[0]
    right = raw_at.slice(0, 2 * TOKENS).permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 2))
    none = gl.zeros([ROWS, 2 * TOKENS], gl.float32, layout=MMA)
    score = mma_v2(rows_at.load(gl.DotOperandLayout(0, MMA, 2)), right, none)
    return score * gl.expand_dims(norm.load(gl.SliceLayout(1, MMA)), 1)


@gluon.jit
def old_tables(
    keys_at, raw_at, norm_at, score_at, fade_at, through_at, own, younger, HEADS: gl.constexpr, TOKENS: gl.constexpr
):
    """What the committed rows weigh: their scores, and decays of each to the last one (fade), of the checkpoint to it
    (through). Sums along the rows, never differences."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ROWS: gl.constexpr = own.shape[1]
    view(fade_at, [HEADS, ROWS], PLAIN).store(gl.exp(gl.associative_scan(younger, 1, add, reverse=True)))
    view(through_at, [HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0])).store(gl.exp(gl.sum(own, 1)))
    score_at.store(score_rows(keys_at, raw_at, norm_at.slice(0, ROWS), TOKENS))


@gluon.jit
def window_tables(
    new_score_at, norm_at, gate_at, coef_at, scale_at, parents, length,
    HEADS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, TREE: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """coef_at [token, head, columns]: what a token's u weighs; scale_at [heads, columns]: what all of a column is
    multiplied by. WINDOW: the longest window. Decays are summed along each token's path."""
    COLUMNS: gl.constexpr = 2 * TOKENS
    # A thread has the weights of all tokens, so that they are stored at once.
    CUBE: gl.constexpr = gl.BlockedLayout([1, 1, TOKENS], [4, 8, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    L: gl.constexpr = gl.SliceLayout(2, CUBE)
    LN: gl.constexpr = gl.SliceLayout(0, L)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PLAIN_CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    n = gl.arange(0, COLUMNS, layout=LN)
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(0, CUBE)))
    token = gl.expand_dims(gl.expand_dims(token, 0), 0)
    norm = norm_at.slice(ROWS, COLUMNS).load(LN)
    bits = ancestor_bits(parents, length, n % TOKENS, TREE, TOKENS)
    path = gl.zeros([HEADS, COLUMNS], gl.float32, layout=L)
    coef = gl.zeros([HEADS, COLUMNS, TOKENS], gl.float32, layout=CUBE)
    for back in gl.static_range(WINDOW):
        i = WINDOW - 1 - back
        seen = (((bits >> i) & 1) == 1) & (i < length)
        score = new_score_at.index(i).load(LN) * norm
        weight = gl.exp(path) * gl.expand_dims(gl.where(seen & ((n % TOKENS != i) | (n >= TOKENS)), score, 0.0), 0)
        coef = gl.where(token == i, gl.expand_dims(weight, 2), coef)
        gate = gl.expand_dims(gate_at.index(i).load(gl.SliceLayout(1, L)), 1)
        path += gl.where(gl.expand_dims(seen, 0), gate, 0.0)
    view(coef_at, [TOKENS, HEADS, COLUMNS], PLAIN_CUBE).permute((1, 2, 0)).store(coef)
    view(scale_at, [HEADS, COLUMNS], PLAIN).store(gl.exp(path) * gl.expand_dims(norm, 0))


@gluon.jit
def new_tables(
    raw_at, norm_at, coef_at, scale_at, new, parents, length,
    HEADS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, TREE: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """`window_tables` of staged rows and log decays: all that follows from the window alone."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    gate_at = gl.allocate_shared_memory(gl.float32, [TOKENS, HEADS], FLAT)
    score_at = gl.allocate_shared_memory(gl.float32, [16, 2 * TOKENS], FLAT)
    view(gate_at, [TOKENS, HEADS], PLAIN).permute((1, 0)).store(new)
    view(score_at, [16, 2 * TOKENS], PLAIN).store(
        score_rows(raw_at.slice(0, 16), raw_at, norm_at.slice(ROWS, 16), TOKENS)
    )
    window_tables(score_at, norm_at, gate_at, coef_at, scale_at, parents, length, HEADS, ROWS, TOKENS, TREE, WINDOW)


@gluon.jit
def gdn_tables(
    keys_at, raw_at, norm_at, score_at, coef_at, scale_at, fade_at, through_at, own, younger, new, parents, length,
    HEADS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, TREE: gl.constexpr,
):  # fmt: skip
    """Fill the tables of a GDN program from its staged rows and log decays."""
    old_tables(keys_at, raw_at, norm_at, score_at, fade_at, through_at, own, younger, HEADS, TOKENS)
    new_tables(raw_at, norm_at, coef_at, scale_at, new, parents, length, HEADS, ROWS, TOKENS, TREE, TOKENS)


@gluon.jit
def weigh_window(
    columns, raw_at, norm_at, coef_at, scale_at, new, parents, length, scale,
    HEADS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, TREE: gl.constexpr, WINDOW: gl.constexpr,
    NORM: gl.constexpr, KW: gl.constexpr,
):  # fmt: skip
    """Stage the window's rows and fill the tables that follow from them alone."""
    stage_new_rows(raw_at, norm_at, columns, scale, ROWS, TOKENS, NORM, KW)
    new_tables(raw_at, norm_at, coef_at, scale_at, new, parents, length, HEADS, ROWS, TOKENS, TREE, WINDOW)


@gluon.jit
def weigh_ring(
    keys, keys_at, raw_at, norm_at, score_at, fade_at, through_at, own, younger, committed,
    HEADS: gl.constexpr, TOKENS: gl.constexpr, NORM: gl.constexpr, KW: gl.constexpr,
):  # fmt: skip
    """Stage the committed rows and fill their tables."""
    # A branch that is always taken, lest the compiler wait for the rows before what does without them is done.
    if committed >= 0:
        stage_old_rows(keys_at, norm_at, keys, keys_at.shape[0], NORM, KW)
        old_tables(keys_at, raw_at, norm_at, score_at, fade_at, through_at, own, younger, HEADS, TOKENS)
