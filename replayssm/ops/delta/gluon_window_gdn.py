"""GDN: what the rows of the ring and of the window weigh in the columns (k, then q) of a window's tokens."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from replayssm.ops.delta.gluon_common import log_decay
from replayssm.ops.gluon_window_parts import add, ancestor_bits, heads_layout, nearest_tf32, sees, tables_layout, wrap
from replayssm.ops.mamba2.gluon_names import view


@gluon.jit
def gate_rows(
    g, ring_g, a_log, bias, age, length, count, start, ring_len, stride_g, mask, lower_bound,
    RAW: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """GDN's log decays of rows by age for every head, [heads, rows]: the window's, then the ring's; 0 elsewhere."""
    new = mask & gl.expand_dims((age >= 0) & (age < length), 0)
    old = mask & gl.expand_dims((age >= length) & (age < count), 0)
    fresh = gl.load(g + gl.expand_dims((length - 1 - age) * stride_g, 0), mask=new, other=0.0).to(gl.float32)
    if RAW:
        fresh = log_decay(fresh, a_log, bias, lower_bound, BOUNDED)
    kept = gl.load(ring_g + gl.expand_dims(wrap(start + count - 1 - age, ring_len), 0), mask=old, other=0.0)
    return gl.where(new, fresh, kept)


@gluon.jit
def gdn_tables(
    keys, KQ, weight_at, coef_at, scale_at, g, ring_g, A_log, dt_bias, parents, length, count, start, end, ring_len,
    num_heads, skipped_head, scale, lower_bound, stride_g_token, stride_g_head, stride_rg_head,
    HEADS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, MMA: gl.constexpr, LC: gl.constexpr,
    LS: gl.constexpr, TREE: gl.constexpr, RAW: gl.constexpr, HAS_BIAS: gl.constexpr, BOUNDED: gl.constexpr,
    NORM: gl.constexpr,
):  # fmt: skip
    """Fill the tables of a GDN program and append the gates of the heads from `skipped_head` on.

    weight_at [heads, rows, columns]: what each committed row's u weighs; coef_at: the same of the window's rows;
    scale_at [heads, columns]: what the checkpoint's product is multiplied by.
    """
    WARPS: gl.constexpr = gl.num_warps()
    COLUMNS: gl.constexpr = 2 * TOKENS
    L3: gl.constexpr = tables_layout(ROWS, WARPS)
    LH: gl.constexpr = heads_layout(WARPS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    score_at = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], PLAIN)
    column_at = gl.allocate_shared_memory(gl.float32, [COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    h = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, LH)), 1)
    mask = h < num_heads
    age = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LH))
    a_log = gl.load(A_log + h, mask=mask, other=0.0).to(gl.float32) if RAW else 0.0
    bias = gl.load(dt_bias + h, mask=mask, other=0.0).to(gl.float32) if HAS_BIAS else 0.0
    g += h * stride_g_head
    ring_g += h * stride_rg_head
    gates = gate_rows(
        g, ring_g, a_log, bias, age, length, count, start, ring_len, stride_g_token, mask, lower_bound, RAW, BOUNDED
    )
    after = gate_rows(
        g, ring_g, a_log, bias, age - 1, length, count, start, ring_len, stride_g_token, mask, lower_bound, RAW, BOUNDED
    )
    gate_at = gl.allocate_shared_memory(gl.float32, [2, HEADS, ROWS], PLAIN)
    gate_at.index(0).store(gates)
    gate_at.index(1).store(after)
    score = mma_v2(keys, KQ, gl.zeros([ROWS, COLUMNS], gl.float32, layout=MMA))
    n = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LC))
    column = gl.where(n < TOKENS, 1.0, scale)
    if NORM:
        k = keys.to(gl.float32)
        kq = KQ.to(gl.float32)
        row = gl.rsqrt(gl.sum(k * k, 1) + 1e-6)
        column = column * gl.rsqrt(gl.sum(kq * kq, 0) + 1e-6)
        score *= gl.expand_dims(gl.convert_layout(row, gl.SliceLayout(1, MMA)), 1)
    column_at.store(column)
    score_at.store(score)
    L2: gl.constexpr = gl.SliceLayout(0, L3)
    LN: gl.constexpr = gl.SliceLayout(1, L2)
    score = score_at.permute((1, 0)).load(L2) * gl.expand_dims(column_at.load(LN), 1)
    column = gl.arange(0, COLUMNS, layout=LN)
    t = column % TOKENS
    age_2 = gl.arange(0, ROWS, layout=gl.SliceLayout(0, L2))
    bits = ancestor_bits(parents, length, t, TREE, TOKENS)
    seen = sees(bits, age_2, length, count)
    gates_3 = gl.expand_dims(gate_at.index(0).load(gl.SliceLayout(1, L3)), 1)
    after_3 = gl.expand_dims(gate_at.index(1).load(gl.SliceLayout(1, L3)), 1)
    # Suffix sums along the token's path, never differences.
    later = gl.where(gl.expand_dims(sees(bits, age_2 - 1, length, count), 0), after_3, 0.0)
    weight = gl.expand_dims(score, 0) * gl.exp(gl.associative_scan(later, 2, add))
    old = gl.expand_dims(age_2 >= length, 0)
    itself = gl.expand_dims(length - 1 - age_2, 0) == gl.expand_dims(t, 1)
    solved = seen & (gl.expand_dims(column >= TOKENS, 1) | (not itself)) & (not old)
    old_weight = nearest_tf32(gl.where(gl.expand_dims(seen & old, 0), weight, 0.0))
    view(weight_at, [HEADS, ROWS, COLUMNS], CUBE).permute((0, 2, 1)).store(old_weight)
    new_weight = gl.where(gl.expand_dims(solved, 0), weight, 0.0)
    view(coef_at, [HEADS, ROWS, COLUMNS], CUBE).permute((0, 2, 1)).store(new_weight)
    total = gl.sum(gl.where(gl.expand_dims(seen, 0), gates_3, 0.0), 2)
    factor = column_at.load(gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    view(scale_at, [HEADS, COLUMNS], PLAIN).store(gl.exp(total) * gl.expand_dims(factor, 0))
    whole = mask & (h >= skipped_head) & gl.expand_dims(age < length, 0)
    gl.store(ring_g + gl.expand_dims(wrap(end - age, ring_len), 0), gates, mask=whole)
