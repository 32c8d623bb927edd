"""Outputs of a window of GDN or KDA from the read copy: some v-heads of one k-head and row.

What the heads share is computed once; then their V rows follow in pieces.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from replayssm.ops.delta.gluon_common import sigmoid
from replayssm.ops.delta.gluon_read_scores import power_near
from replayssm.ops.delta.gluon_read_window_items import read_items
from replayssm.ops.delta.gluon_window_gdn import decays, gdn_tables, load_new_gates, load_old_gates
from replayssm.ops.delta.gluon_window_kda import (
    append_vector,
    kda_tables,
    load_new_vector,
    load_old_vector,
    vector_decays,
)
from replayssm.ops.delta.gluon_window_rows import append_keys, gates_layout, load_columns, load_keys, stage_rows
from replayssm.ops.gluon_formats import E2M1_UNIT, scales_a_row
from replayssm.ops.gluon_read_window_codes import (
    allocate_columns,
    codes_a_row,
    load_operands,
    stage_columns,
    staging_layout,
)
from replayssm.ops.gluon_window_parts import columns_shared, wrap
from replayssm.ops.mamba2.gluon_names import view


@gluon.jit
def read_window(
    slot, head, late, first, length, start, committed, live, q, k, v, g, beta, A_log, dt_bias, ring_k, ring_v, ring_u,
    ring_g, ring_beta, parents, out, codes, scales, global_scale, ring_len, scale, lower_bound, stride_q_token,
    stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head, stride_g_token, stride_g_head,
    stride_beta_token, stride_beta_head, stride_out_token, stride_out_head, stride_rk_slot, stride_rk_head,
    stride_rv_slot, stride_rv_head, stride_ru_slot, stride_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot,
    stride_rb_head, chunks_codes_slot, stride_scales_slot, stride_global_slot,
    HEADS: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, ROWS: gl.constexpr,
    TOKENS: gl.constexpr, READ: gl.constexpr, TREE: gl.constexpr, KDA: gl.constexpr, RAW: gl.constexpr,
    HAS_BIAS: gl.constexpr, BOUNDED: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """Outputs and ring rows of `length` tokens from token `first` on, of HEADS v-heads from `head` on.

    live: committed rows that are read beside the copy (none after a flush); new rows follow all `committed` ones.
    late: the copy is there only once the flushing launch is done; everything else is done before.
    """
    WARPS: gl.constexpr = gl.num_warps()
    ACT: gl.constexpr = ring_u.dtype.element_ty
    COLUMNS: gl.constexpr = 2 * TOKENS
    CODE_CHUNK: gl.constexpr = 128 // codes.dtype.element_ty.primitive_bitwidth
    # Raw 16-bit k and q times a power of two are exact in fp16; KDA's decayed ones have tf32's bits.
    EXACT: gl.constexpr = ACT == gl.bfloat16 and not KDA
    LB: gl.constexpr = gates_layout(WARPS)
    LQ: gl.constexpr = staging_layout(K, WARPS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
    CODES_ROW: gl.constexpr = codes_a_row(READ, K)
    SCALES_ROW: gl.constexpr = scales_a_row(READ, K)
    k_head = head // GROUP
    codes += slot * chunks_codes_slot * CODE_CHUNK + head * (V * CODES_ROW)
    scales += slot * stride_scales_slot + head * (V * SCALES_ROW)
    global_scale += slot * stride_global_slot + head
    q += first * stride_q_token + k_head * stride_q_head
    k += first * stride_k_token + k_head * stride_k_head
    v += first * stride_v_token + head * stride_v_head
    g += first * stride_g_token + head * stride_g_head
    beta += first * stride_beta_token + head * stride_beta_head
    out += first * stride_out_token + head * stride_out_head
    ring_k += slot * stride_rk_slot + k_head * stride_rk_head
    ring_v += slot * stride_rv_slot + head * stride_rv_head
    ring_u += slot * stride_ru_slot + head * stride_ru_head
    ring_g += slot * stride_rg_slot + head * stride_rg_head
    ring_beta += slot * stride_rb_slot + head * stride_rb_head
    parents += first
    fresh = start + committed

    keys = load_keys(ring_k, start, live, ring_len, K, ROWS)
    columns = load_columns(q, k, length, stride_q_token, stride_k_token, K, TOKENS)
    b_head = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, LB)), 1)
    b_token = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, LB)), 0)
    b = gl.load(beta + b_head * stride_beta_head + b_token * stride_beta_token, mask=b_token < length, other=0.0)
    unit = 1.0 + gl.zeros([HEADS, 1], gl.float32, layout=LB)
    if READ == "nvfp4":
        # Past the L1 cache, which may hold what lay beside another slot's scale before a flush.
        unit = gl.load(global_scale + b_head, cache_modifier=".cg") * E2M1_UNIT
    if KDA:
        new, a_log, bias = load_new_vector(
            g, A_log + head, dt_bias + head * K, length, stride_g_token, K, TOKENS, RAW, HAS_BIAS
        )
        own, younger = load_old_vector(ring_g, start, live, ring_len, K, ROWS)
    else:
        new, a_log, bias = load_new_gates(
            g, A_log + head, dt_bias + head, length, stride_g_token, stride_g_head, HEADS, TOKENS, RAW, HAS_BIAS
        )
        own, younger = load_old_gates(ring_g, start, live, ring_len, stride_rg_head, HEADS, ROWS)

    x_at = allocate_columns(READ, EXACT, COLUMNS, K)
    inverse_at = gl.allocate_shared_memory(gl.float32, [COLUMNS], FLAT)
    keys_at = gl.allocate_shared_memory(ACT, [ROWS, K], SWIZZLED)
    raw_at = gl.allocate_shared_memory(ACT, [max(16, COLUMNS), K], SWIZZLED)
    norm_at = gl.allocate_shared_memory(gl.float32, [2 * ROWS], FLAT)
    score_at = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], PLAIN)
    coef_at = gl.allocate_shared_memory(gl.float32, [TOKENS * HEADS, COLUMNS], FLAT)
    scale_at = gl.allocate_shared_memory(gl.float32, [HEADS, COLUMNS], FLAT)
    fade_at = gl.allocate_shared_memory(gl.float32, [HEADS, ROWS], FLAT)
    through_at = gl.allocate_shared_memory(gl.float32, [HEADS, 1], FLAT)
    unit_at = gl.allocate_shared_memory(gl.float32, [HEADS, 1], FLAT)
    beta_at = gl.allocate_shared_memory(gl.float32, [HEADS * TOKENS, 1], FLAT)
    stage_rows(keys_at, raw_at, norm_at, keys, columns, scale, ROWS, TOKENS, NORM)
    # What the v-heads of a k-head share is appended once.
    if head % GROUP == 0:
        append_keys(ring_k, columns, fresh, length, ring_len, K, TOKENS)
    b = b.to(gl.float32)
    if RAW:
        b = gl.where(b_token < length, sigmoid(b), 0.0)
    view(beta_at, [HEADS, TOKENS], PLAIN).store(b)
    view(unit_at, [HEADS, 1], PLAIN).store(unit)
    gl.store(ring_beta + b_head * stride_rb_head + wrap(fresh + b_token, ring_len), b, mask=b_token < length)
    if KDA:
        new = vector_decays(new, a_log, bias, length, lower_bound, RAW, BOUNDED)
        append_vector(ring_g, new, fresh, length, ring_len)
        read_at = gl.allocate_shared_memory(gl.float32, [COLUMNS, K], columns_shared(4))
        kda_tables(
            keys_at, raw_at, norm_at, read_at, score_at, coef_at, own, younger, new, parents, length, K, ROWS, TOKENS,
            TREE,
        )  # fmt: skip
        x = (read_at.load(LQ).to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)
    else:
        new = decays(new, a_log, bias, length, lower_bound, TOKENS, RAW, BOUNDED)
        gates_to = ring_g + b_head * stride_rg_head + wrap(fresh + b_token, ring_len)
        gl.store(gates_to, new, mask=b_token < length)
        gdn_tables(
            keys_at, raw_at, norm_at, score_at, coef_at, scale_at, fade_at, through_at, own, younger, new,
            parents, length, HEADS, ROWS, TOKENS, TREE,
        )  # fmt: skip
        x = columns.to(gl.float32)
    if READ == "bf16":
        inverse_at.store(gl.full([COLUMNS], 1.0, gl.float32, layout=gl.SliceLayout(1, LQ)))
    else:
        power, inverse = power_near(gl.sum(x * x, 1))
        x *= gl.expand_dims(power, 1)
        inverse_at.store(inverse)
    stage_columns(x_at, x, READ, EXACT)

    if late:
        gdc_wait()
        if READ == "nvfp4":
            unit = gl.load(global_scale + b_head, cache_modifier=".cg") * E2M1_UNIT
            view(unit_at, [HEADS, 1], PLAIN).store(unit)
    read_items(
        load_operands(x_at, READ, EXACT, COLUMNS, K), inverse_at, score_at, unit_at, through_at, fade_at, scale_at,
        beta_at, coef_at, codes, scales, v, ring_v, ring_u, out, start, live, length, fresh, ring_len, stride_v_token,
        stride_v_head, stride_rv_head, stride_ru_head, stride_out_token, stride_out_head, HEADS, K, V, ROWS, TOKENS,
        READ, KDA,
    )  # fmt: skip
