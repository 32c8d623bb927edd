"""GDN and KDA, a window of tokens of every row in one launch, for NVIDIA GPUs: tensor cores serve what is only read.

A program streams tiles of the checkpoint through shared memory and multiplies each by the k and q of all tokens at
once; the window's triangular system is solved by forward substitution in registers. Columns are the tokens' k, then
their q. The recurrence (a flush) never touches the tensor cores.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.ops.delta.gluon_common import sigmoid
from replayssm.ops.delta.gluon_early import give_hints
from replayssm.ops.delta.gluon_layouts import tile_layout
from replayssm.ops.delta.gluon_window_flush import load_flush_v, replay_tile, stage_flush
from replayssm.ops.delta.gluon_window_gdn import gdn_tables
from replayssm.ops.delta.gluon_window_kda import kda_tables
from replayssm.ops.delta.gluon_window_solve import substitute
from replayssm.ops.gluon_flushers import is_taken, share_of_work
from replayssm.ops.gluon_window_parts import (
    columns_shared,
    fetch_rest,
    fetch_tile,
    mma_layout,
    outputs_layout,
    product,
    row_ptrs,
    rows_layout,
    settle_row,
    state_shared,
    wrap,
    zero_rows,
)
from replayssm.ops.mamba2.gluon_names import view


@gluon.jit(do_not_specialize=["num_slots", "ring_len", "buffer_len", "pad_slot_id"])
def delta_window_kernel(
    q, k, v, g, beta, A_log, dt_bias, state, ring_k, ring_v, ring_u, ring_g, ring_beta, cursors, slot_indices,
    query_start_loc, parents, out,
    num_slots, ring_len, buffer_len, pad_slot_id, scale, lower_bound,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, stride_out_token, stride_out_head,
    chunks_state_slot, chunks_state_head, stride_rk_slot, stride_rk_head, stride_rv_slot, stride_rv_head,
    stride_ru_slot, stride_ru_head, stride_rg_slot, stride_rg_head, stride_rb_slot, stride_rb_head,
    HV: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    BLOCK_V: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr, SETTLE: gl.constexpr, HINT: gl.constexpr,
    EARLY: gl.constexpr, FLUSHERS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, TREE: gl.constexpr,
    KDA: gl.constexpr, RAW: gl.constexpr, HAS_BIAS: gl.constexpr, BOUNDED: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """One program: TILES tiles of BLOCK_V rows of the v-heads of one batch row and k-head."""
    WARPS: gl.constexpr = gl.num_warps()
    ACT: gl.constexpr = q.dtype.element_ty
    STATE: gl.constexpr = state.dtype.element_ty
    BITS: gl.constexpr = STATE.primitive_bitwidth
    COLUMNS: gl.constexpr = 2 * TOKENS
    PER_HEAD: gl.constexpr = V // BLOCK_V
    CHUNKS: gl.constexpr = GROUP * PER_HEAD // TILES
    HEADS: gl.constexpr = (TILES + PER_HEAD - 1) // PER_HEAD
    HK: gl.constexpr = HV // GROUP
    MMA: gl.constexpr = mma_layout(WARPS)
    # k_width: 16-byte accesses along K; both operands of a product permute K alike.
    LS: gl.constexpr = gl.DotOperandLayout(0, MMA, 128 // BITS)
    LC: gl.constexpr = gl.DotOperandLayout(1, MMA, 128 // BITS)
    LU: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    LW: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    TILE: gl.constexpr = tile_layout(BITS, BLOCK_V, WARPS)
    L2: gl.constexpr = rows_layout(BLOCK_V, WARPS)
    LB: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [WARPS, 1], [1, 0])
    LOUT: gl.constexpr = outputs_layout(COLUMNS, WARPS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, min(8, BLOCK_V // 8), order=[1, 0])
    A_ROW: gl.constexpr = CHUNKS * HK
    num_rows = gl.num_programs(0) // A_ROW - FLUSHERS * TILES
    row = gl.program_id(0) // A_ROW
    part = gl.program_id(0) % A_ROW
    if HINT > 0:
        give_hints(
            state, ring_k, ring_u, cursors, slot_indices + row, num_slots, ring_len, part % CHUNKS * TILES,
            part // CHUNKS, chunks_state_slot, chunks_state_head, stride_rk_slot, stride_rk_head, stride_ru_slot,
            stride_ru_head, GROUP, K, V, BLOCK_V, TILES, PER_HEAD, HEADS, HINT,
        )  # fmt: skip
    gdc_wait()
    begin = 0
    end = TILES
    if FLUSHERS > 0:
        row, part, begin, end, flushes_only = share_of_work(
            slot_indices, query_start_loc, cursors, num_rows, num_slots, pad_slot_id, buffer_len, A_ROW, TILES,
            FLUSHERS, True,
        )  # fmt: skip
        if row >= num_rows:
            return
    elif SETTLE > 0:
        row = settle_row(
            row, slot_indices, query_start_loc, cursors, num_rows, num_slots, pad_slot_id, buffer_len, SETTLE
        )
    chunk = part % CHUNKS
    k_head = (part // CHUNKS).to(gl.int64)
    slot = gl.load(slot_indices + row).to(gl.int64)
    first = gl.load(query_start_loc + row)
    length = gl.load(query_start_loc + row + 1) - first
    first = first.to(gl.int64)
    head = k_head * GROUP + chunk * TILES // PER_HEAD
    first_v = chunk * TILES % PER_HEAD * BLOCK_V
    out += first * stride_out_token + head * stride_out_head
    if (slot == pad_slot_id) | (slot < 0) | (slot >= num_slots):
        zero_rows(out, length, chunk * TILES, stride_out_token, stride_out_head, BLOCK_V, TILES, PER_HEAD)
        return
    start = gl.load(cursors + slot * 4)
    committed = gl.load(cursors + slot * 4 + 1)
    limit = gl.load(cursors + slot * 4 + 2)
    tiles = gl.allocate_shared_memory(STATE, [STAGES, BLOCK_V, K], state_shared(BITS))
    # Strides of the state come in 16-byte chunks, which proves its alignment.
    stride_state_head = chunks_state_head * (128 // BITS)
    state += (slot * chunks_state_slot + head * chunks_state_head) * (128 // BITS) + first_v * K
    # The ring's rows must not queue behind more than this before the cursors are known.
    first_state = state + (begin // PER_HEAD * stride_state_head + begin % PER_HEAD * (BLOCK_V * K))
    if EARLY > 0:
        fetch_tile(tiles.index(0).slice(0, EARLY), first_state, K, EARLY)
    q += first * stride_q_token + k_head * stride_q_head
    k += first * stride_k_token + k_head * stride_k_head
    v += first * stride_v_token + head * stride_v_head + first_v
    g += first * stride_g_token + head * stride_g_head
    beta += first * stride_beta_token + head * stride_beta_head
    flush = (committed > 0) & (committed + length > gl.minimum(limit, buffer_len))
    idle = (length == 0) & (not flush)
    if FLUSHERS > 0:
        if flush & (not flushes_only):
            idle = is_taken(
                row, slot_indices, query_start_loc, cursors, num_rows, num_slots, pad_slot_id, buffer_len, FLUSHERS,
                True,
            )  # fmt: skip
    if idle:
        async_copy.commit_group()
        async_copy.wait_group(0)
        return
    count = gl.where(flush, 0, committed) + length
    last = start + committed + length - 1
    ring_k += slot * stride_rk_slot + k_head * stride_rk_head
    ring_v += slot * stride_rv_slot + head * stride_rv_head + first_v
    ring_u += slot * stride_ru_slot + head * stride_ru_head + first_v
    ring_g += slot * stride_rg_slot + head * stride_rg_head
    ring_beta += slot * stride_rb_slot + head * stride_rb_head

    age = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LS))
    inner = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, LS)), 0)
    key_rows = row_ptrs(k, ring_k, age, length, count, start, stride_k_token, K, ring_len)
    keys = gl.load(gl.expand_dims(key_rows, 1) + inner, mask=gl.expand_dims(age < count, 1), other=0.0)
    cols = gl.expand_dims(gl.arange(0, BLOCK_V, layout=gl.SliceLayout(0, L2)), 0)
    age_u = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L2))
    u_mask = gl.expand_dims((age_u >= length) & (age_u < count), 1)
    u_rows = gl.expand_dims(wrap(start + count - 1 - age_u, ring_len) * V, 1) + cols
    begin_col = begin % PER_HEAD * BLOCK_V
    u_old = gl.load(ring_u + (begin // PER_HEAD * stride_ru_head + begin_col) + u_rows, mask=u_mask, other=0.0)
    v_token = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, L2))
    v_mask = gl.expand_dims(v_token < length, 1)
    v_rows = gl.expand_dims(v_token * stride_v_token, 1) + cols
    v_ring = gl.expand_dims(wrap(last - (length - 1) + v_token, ring_len) * V, 1) + cols
    v_new = gl.load(v + (begin // PER_HEAD * stride_v_head + begin_col) + v_rows, mask=v_mask, other=0.0)
    b_head = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, LB)), 1)
    b_token = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, LB)), 0)
    b_new = beta + b_head * stride_beta_head + b_token * stride_beta_token
    b = gl.load(b_new, mask=b_token < length, other=0.0).to(gl.float32)
    if RAW:
        b = gl.where(b_token < length, sigmoid(b), 0.0)

    begin_v = ring_v + (begin // PER_HEAD * stride_rv_head + begin_col)
    v_f = load_flush_v(begin_v, start, gl.where(flush, committed, 0), ring_len, V, BLOCK_V, ROWS)
    for s in gl.static_range(STAGES):
        if s == 0:
            fetch_rest(tiles.index(0), first_state, K, BLOCK_V, EARLY)
        elif begin + s < end:
            to = state + (s // PER_HEAD * stride_state_head + s % PER_HEAD * BLOCK_V * K)
            fetch_tile(tiles.index(s), to, K, BLOCK_V)
        async_copy.commit_group()
    # A flush's rows: where KDA's tables are dead, else early, as their loads take long.
    if not KDA:
        keys_at = gl.allocate_shared_memory(gl.float32, [ROWS * K], FLAT)
        gates_at = gl.allocate_shared_memory(gl.float32, [1], FLAT)
        decay_at = gl.allocate_shared_memory(gl.float32, [HEADS * ROWS], FLAT)
        old_beta_at = gl.allocate_shared_memory(gl.float32, [HEADS * ROWS], FLAT)
        if flush:
            stage_flush(
                keys_at, gates_at, decay_at, old_beta_at, ring_k, ring_g, ring_beta, start, committed, ring_len,
                stride_rg_head, stride_rb_head, HEADS, K, ROWS, KDA, NORM,
            )  # fmt: skip

    READ: gl.constexpr = gl.float32 if KDA else ACT
    columns_at = gl.allocate_shared_memory(READ, [COLUMNS, K], columns_shared(128 // BITS))
    weight_at = gl.allocate_shared_memory(gl.float32, [HEADS, ROWS, COLUMNS], PLAIN)
    coef_at = gl.allocate_shared_memory(gl.float32, [HEADS * ROWS, COLUMNS], FLAT)
    scale_at = gl.allocate_shared_memory(gl.float32, [HEADS, COLUMNS], FLAT)
    beta_at = gl.allocate_shared_memory(gl.float32, [HEADS * TOKENS, 1], FLAT)
    u_old_at = gl.allocate_shared_memory(ACT, [ROWS, BLOCK_V], SWIZZLED)
    v_at = gl.allocate_shared_memory(ACT, [TOKENS, BLOCK_V], FLAT)
    view(beta_at, [HEADS, TOKENS], PLAIN).store(b)
    # Of the window's rows, those that all V-rows share are appended once.
    skipped = gl.where(begin == 0, gl.where(first_v == 0, 0, 1), HEADS)
    if KDA:
        kda_tables(
            keys, columns_at, weight_at, coef_at, q, k, g, ring_g, A_log + head, dt_bias + head * K, parents + first,
            length, count, start, last, ring_len, skipped == 0, scale, lower_bound, stride_q_token, stride_k_token,
            stride_g_token, K, ROWS, TOKENS, MMA, LC, LS, TREE, RAW, HAS_BIAS, BOUNDED, NORM,
        )  # fmt: skip
    else:
        n = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LC))
        t = n % TOKENS
        rows = gl.where(n < TOKENS, k + t * stride_k_token, q + t * stride_q_token)
        at = gl.expand_dims(rows, 0) + gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(1, LC)), 1)
        columns = gl.load(at, mask=gl.expand_dims(t < length, 0), other=0.0)
        columns_at.permute((1, 0)).store(columns)
        gdn_tables(
            keys, columns, weight_at, coef_at, scale_at, g, ring_g, A_log + head, dt_bias + head, parents + first,
            length, count, start, last, ring_len, HEADS, skipped, scale, lower_bound, stride_g_token, stride_g_head,
            stride_rg_head, HEADS, ROWS, TOKENS, MMA, LC, LS, TREE, RAW, HAS_BIAS, BOUNDED, NORM,
        )  # fmt: skip

    if KDA:
        keys_at = gl.allocate_shared_memory(gl.float32, [ROWS * K], FLAT)
        gates_at = gl.allocate_shared_memory(gl.float32, [ROWS * K], FLAT)
        decay_at = gl.allocate_shared_memory(gl.float32, [HEADS * ROWS], FLAT)
        old_beta_at = gl.allocate_shared_memory(gl.float32, [HEADS * ROWS], FLAT)
        if flush:
            stage_flush(
                keys_at, gates_at, decay_at, old_beta_at, ring_k, ring_g, ring_beta, start, committed, ring_len,
                stride_rg_head, stride_rb_head, HEADS, K, ROWS, KDA, NORM,
            )  # fmt: skip

    # Append the window; u follows with the outputs.
    b_at = ring_beta + b_head * stride_rb_head + wrap(last - (length - 1) + b_token, ring_len)
    gl.store(b_at, b, mask=(b_head >= skipped) & (b_token < length))
    if (chunk == 0) & (begin == 0):
        key_end = ring_k + (gl.expand_dims(wrap(last - age, ring_len) * K, 1) + inner)
        gl.store(key_end, keys, mask=gl.expand_dims(age < length, 1))
    gdc_launch_dependents()

    flush_at = gl.allocate_shared_memory(ACT, [ROWS * BLOCK_V], FLAT)
    v_row = gl.expand_dims(gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, LOUT)), 1)
    n = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LOUT)), 0)
    u_at = v_row + wrap(last - (length - 1) + n, ring_len) * V
    o_at = v_row + (n - TOKENS) * stride_out_token
    out += first_v
    # A bound that the compiler does not fold: Triton 3.6 crashes on the single turn of one tile.
    for i in range(begin, gl.minimum(committed + end, end)):
        h = i // PER_HEAD
        col = i % PER_HEAD * BLOCK_V
        u_old_at.store(u_old)
        view(v_at, [TOKENS, BLOCK_V], PLAIN).store(v_new)
        gl.store(ring_v + (h * stride_rv_head + col) + v_ring, v_new, mask=v_mask)
        if i + 1 < end:
            next_h, next_col = (i + 1) // PER_HEAD, (i + 1) % PER_HEAD * BLOCK_V
            u_old = gl.load(ring_u + (next_h * stride_ru_head + next_col) + u_rows, mask=u_mask, other=0.0)
            v_new = gl.load(v + (next_h * stride_v_head + next_col) + v_rows, mask=v_mask, other=0.0)
        tile = tiles.index((i - begin) % STAGES)
        async_copy.wait_group(STAGES - 1)
        ahead = state + (i + STAGES) // PER_HEAD * stride_state_head + (i + STAGES) % PER_HEAD * BLOCK_V * K
        if flush:
            old = tile.load(TILE)
            if i + STAGES < end:
                fetch_tile(tile, ahead, K, BLOCK_V)
            async_copy.commit_group()
            values = v_f
            if i + 1 < end:
                next_v = ring_v + ((i + 1) // PER_HEAD * stride_rv_head + (i + 1) % PER_HEAD * BLOCK_V)
                v_f = load_flush_v(next_v, start, committed, ring_len, V, BLOCK_V, ROWS)
            here = state + (h * stride_state_head + col * K)
            new = replay_tile(
                old, values, here, flush_at, keys_at, gates_at, decay_at, old_beta_at, h, committed,
                HEADS, K, BLOCK_V, ROWS, KDA, TILE,
            )  # fmt: skip
            S = gl.convert_layout(new, LS)
        else:
            S = tile.load(LS)
            if i + STAGES < end:
                fetch_tile(tile, ahead, K, BLOCK_V)
            async_copy.commit_group()
        zero = gl.zeros([BLOCK_V, COLUMNS], gl.float32, layout=MMA)
        X = product(S, columns_at.permute((1, 0)).load(LC), zero, ACT)
        if not KDA:
            X *= gl.expand_dims(scale_at.index(h).load(gl.SliceLayout(0, MMA)), 0)
        u_seen = u_old_at.permute((1, 0)).load(LU).to(gl.float32)
        X = mma_v2(u_seen, weight_at.index(h).load(LW), X, input_precision="tf32")
        X = substitute(X, v_at, coef_at, beta_at, h, length, ROWS, TOKENS, KDA, MMA)
        X = gl.convert_layout(X, LOUT)
        is_u = n < gl.minimum(length, TOKENS)
        gl.store(ring_u + (h * stride_ru_head + col) + u_at, X.to(ring_u.dtype.element_ty), mask=is_u)
        is_out = (n >= TOKENS) & (n < TOKENS + length)
        gl.store(out + (h * stride_out_head + col) + o_at, X.to(out.dtype.element_ty), mask=is_out)
