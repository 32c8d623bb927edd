"""Mamba-2, a window of tokens of every row in one launch, for NVIDIA GPUs: the tensor cores serve what is only read.

A program streams tiles of the checkpoint through shared memory and multiplies each by the C of all tokens at once. The
recurrence (a flush) never touches the tensor cores.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from replayssm.ops.gluon_flushers import is_taken, share_of_work
from replayssm.ops.gluon_window_parts import (
    columns_shared,
    fetch_rest,
    fetch_tile,
    heads_layout,
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
from replayssm.ops.mamba2.gluon_early import give_hints
from replayssm.ops.mamba2.gluon_window_flush import load_flush_x, replay_tile, stage_flush
from replayssm.ops.mamba2.gluon_window_weights import fill_tables, row_dt


@gluon.jit(do_not_specialize=["num_slots", "buffer_len", "pad_slot_id"])
def mamba2_window_kernel(
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, state_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr,
    cursors_ptr, slot_indices_ptr, query_start_loc_ptr, parents_ptr, out_ptr,
    num_slots, buffer_len, pad_slot_id,
    x_token, x_head, dt_token, dt_head, B_token, B_group, C_token, C_group, z_token, z_head, out_token, out_head,
    chunks_state_slot, chunks_state_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot,
    ring_dt_head,
    H: gl.constexpr, G: gl.constexpr, P: gl.constexpr, N: gl.constexpr, R: gl.constexpr,
    BV: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr, SETTLE: gl.constexpr, HINT: gl.constexpr,
    EARLY: gl.constexpr, FLUSHERS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, TREE: gl.constexpr,
    HAS_D: gl.constexpr, HAS_Z: gl.constexpr, HAS_BIAS: gl.constexpr, SOFTPLUS: gl.constexpr,
):  # fmt: skip
    """One program: TILES tiles of BV V-rows of the heads of one batch row and group."""
    WARPS: gl.constexpr = gl.num_warps()
    ACT: gl.constexpr = x_ptr.dtype.element_ty
    STATE: gl.constexpr = state_ptr.dtype.element_ty
    CHUNK: gl.constexpr = 128 // STATE.primitive_bitwidth
    PER_HEAD: gl.constexpr = P // BV
    CHUNKS: gl.constexpr = H // G * PER_HEAD // TILES
    EVEN: gl.constexpr = TILES % PER_HEAD == 0 or PER_HEAD % TILES == 0
    NUM_HEADS: gl.constexpr = (TILES + PER_HEAD - 1) // PER_HEAD if EVEN else (PER_HEAD + TILES - 2) // PER_HEAD + 1
    HEADS: gl.constexpr = 1 << (NUM_HEADS - 1).bit_length()
    MMA: gl.constexpr = mma_layout(WARPS)
    # k_width: 16-byte accesses along K; both operands of a product permute K alike.
    LS: gl.constexpr = gl.DotOperandLayout(0, MMA, CHUNK)
    LC: gl.constexpr = gl.DotOperandLayout(1, MMA, CHUNK)
    LX: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    LW: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    LH: gl.constexpr = heads_layout(WARPS)
    L2: gl.constexpr = rows_layout(BV, WARPS)
    LOUT: gl.constexpr = outputs_layout(TOKENS, WARPS)
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, min(8, BV // 8), order=[1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    A_ROW: gl.constexpr = CHUNKS * G
    num_rows = gl.num_programs(0) // A_ROW - FLUSHERS * TILES
    row = gl.program_id(0) // A_ROW
    part = gl.program_id(0) % A_ROW
    if HINT > 0:
        hint_g = (part // CHUNKS).to(gl.int64)
        give_hints(
            state_ptr, ring_x_ptr, ring_B_ptr, cursors_ptr, slot_indices_ptr + row, num_slots,
            hint_g * (H // G) + part % CHUNKS * TILES // PER_HEAD, part % CHUNKS * TILES % PER_HEAD * BV, hint_g,
            gl.to_tensor(chunks_state_slot).to(gl.int64) * CHUNK, gl.to_tensor(chunks_state_head).to(gl.int64) * CHUNK,
            ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, P, N, R, 1, TILES * BV, HINT,
        )  # fmt: skip
    gdc_wait()
    begin = 0
    end = TILES
    if FLUSHERS > 0:
        row, part, begin, end, flushes_only = share_of_work(
            slot_indices_ptr, query_start_loc_ptr, cursors_ptr, num_rows, num_slots, pad_slot_id, buffer_len, A_ROW,
            TILES, FLUSHERS, True,
        )  # fmt: skip
        if row >= num_rows:
            return
    elif SETTLE > 0:
        row = settle_row(
            row, slot_indices_ptr, query_start_loc_ptr, cursors_ptr, num_rows, num_slots, pad_slot_id, buffer_len,
            SETTLE,
        )  # fmt: skip
    chunk = part % CHUNKS
    g = (part // CHUNKS).to(gl.int64)
    slot = gl.load(slot_indices_ptr + row)
    first = gl.load(query_start_loc_ptr + row)
    length = gl.load(query_start_loc_ptr + row + 1) - first
    first = first.to(gl.int64)
    first_tile = chunk * TILES
    first_h = g * (H // G) + first_tile // PER_HEAD
    first_v = first_tile % PER_HEAD * BV
    out_ptr += first * out_token + first_h * out_head
    if (slot == pad_slot_id) | (slot < 0) | (slot >= num_slots):
        zero_rows(out_ptr, length, first_tile, out_token, out_head, BV, TILES, PER_HEAD)
        return
    base = slot.to(gl.int64)
    start = gl.load(cursors_ptr + base * 4)
    committed = gl.load(cursors_ptr + base * 4 + 1)
    limit = gl.load(cursors_ptr + base * 4 + 2)
    tiles = gl.allocate_shared_memory(STATE, [STAGES, BV, N], state_shared(STATE.primitive_bitwidth))
    state_head = chunks_state_head * CHUNK
    state_ptr += (base * chunks_state_slot + first_h * chunks_state_head) * CHUNK + first_v * N
    # The ring's rows must not queue behind more than this before the cursors are known.
    skipped = first_tile % PER_HEAD
    begin_h, begin_v = (skipped + begin) // PER_HEAD, (skipped + begin) % PER_HEAD * BV - first_v
    first_state = state_ptr + begin_h * state_head + begin_v * N
    if EARLY > 0:
        fetch_tile(tiles.index(0).slice(0, EARLY), first_state, N, EARLY)

    # Everything the tiles share.
    k = gl.arange(0, N, layout=gl.SliceLayout(1, LC))
    t = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, LC))
    C_ptrs = C_ptr + first * C_token + g * C_group + gl.expand_dims(t * C_token, 0) + gl.expand_dims(k, 1)
    C = gl.load(C_ptrs, mask=gl.expand_dims(t < length, 0), other=0.0)
    flush = (committed > 0) & (committed + length > gl.minimum(limit, buffer_len))
    idle = (length == 0) & (not flush)
    if FLUSHERS > 0:
        if flush & (not flushes_only):
            idle = is_taken(
                row, slot_indices_ptr, query_start_loc_ptr, cursors_ptr, num_rows, num_slots, pad_slot_id, buffer_len,
                FLUSHERS, True,
            )  # fmt: skip
    if idle:
        async_copy.commit_group()
        async_copy.wait_group(0)
        return
    count = gl.where(flush, 0, committed) + length
    ring_x_ptr += base * ring_x_slot + first_h * ring_x_head + first_v
    ring_B_ptr += base * ring_B_slot + g * ring_B_group
    ring_dt_ptr += base * ring_dt_slot + first_h * ring_dt_head
    x_ptr += first * x_token + first_h * x_head + first_v
    B_ptr += first * B_token + g * B_group
    dt_ptr += first * dt_token + first_h * dt_head
    age = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LS))
    kb = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, LS)), 0)
    B_rows = row_ptrs(B_ptr, ring_B_ptr, age, length, count, start, B_token, N, R)
    B = gl.load(gl.expand_dims(B_rows, 1) + kb, mask=gl.expand_dims(age < count, 1), other=0.0)
    age_x = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L2))
    new_x = gl.expand_dims(age_x < length, 1)
    in_x = gl.expand_dims(gl.arange(0, BV, layout=gl.SliceLayout(0, L2)), 0)
    x_new_rows = gl.expand_dims((length - 1 - age_x) * x_token, 1) + in_x
    x_old_rows = gl.expand_dims(wrap(start + count - 1 - age_x, R) * P, 1) + in_x
    last = start + committed + length - 1
    x_end_rows = gl.expand_dims(wrap(last - age_x, R) * P, 1) + in_x
    is_row = gl.expand_dims(age_x < count, 1)
    begin_new = x_ptr + (begin_h * x_head + begin_v) + x_new_rows
    begin_old = ring_x_ptr + (begin_h * ring_x_head + begin_v)
    x = gl.load(gl.where(new_x, begin_new, begin_old + x_old_rows), mask=is_row, other=0.0)
    age_h = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LH))
    h_of = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, LH)), 1)
    mask_of = h_of * PER_HEAD < TILES + skipped
    bias = gl.load(dt_bias_ptr + first_h + h_of, mask=mask_of, other=0.0).to(gl.float32) if HAS_BIAS else 0.0
    dt_ptrs, ring_dt_ptrs = dt_ptr + h_of * dt_head, ring_dt_ptr + h_of * ring_dt_head
    dt = row_dt(dt_ptrs, ring_dt_ptrs, bias, age_h, length, count, start, dt_token, mask_of, R, SOFTPLUS)
    dt_before = row_dt(dt_ptrs, ring_dt_ptrs, bias, age_h - 1, length, count, start, dt_token, mask_of, R, SOFTPLUS)
    x_f = load_flush_x(begin_old, start, gl.where(flush, committed, 0), P, R, BV, ROWS)
    for s in gl.static_range(STAGES):
        if s == 0:
            fetch_rest(tiles.index(0), first_state, N, BV, EARLY)
        elif begin + s < end:
            fetch_tile(tiles.index(s), state_ptr + s // PER_HEAD * state_head + s % PER_HEAD * BV * N, N, BV)
        async_copy.commit_group()
    staged_B = gl.allocate_shared_memory(gl.float32, [ROWS, N], FLAT)
    staged_dt = gl.allocate_shared_memory(gl.float32, [HEADS, ROWS], FLAT)
    staged_a = gl.allocate_shared_memory(gl.float32, [HEADS, ROWS], FLAT)
    if flush:
        A_f = gl.load(A_ptr + first_h + h_of, mask=mask_of, other=0.0)
        stage_flush(
            staged_B, staged_dt, staged_a, ring_B_ptr, ring_dt_ptrs, A_f, mask_of, start, committed,
            N, R, ROWS, HEADS, LH,
        )  # fmt: skip

    # Scores of all rows and tokens, once for all heads of the group.
    x_at = gl.allocate_shared_memory(ACT, [ROWS, BV], SWIZZLED)
    score_at = gl.allocate_shared_memory(gl.float32, [ROWS, TOKENS], PLAIN)
    weight_at = gl.allocate_shared_memory(gl.float32, [HEADS, TOKENS, ROWS], PLAIN)
    scale_at = gl.allocate_shared_memory(gl.float32, [HEADS, TOKENS], FLAT)
    dt_at = gl.allocate_shared_memory(gl.float32, [2, HEADS, ROWS], PLAIN)
    C_at = gl.allocate_shared_memory(ACT, [TOKENS, N], columns_shared(CHUNK))
    C_at.permute((1, 0)).store(C)
    dt_at.index(0).store(dt)
    dt_at.index(1).store(dt_before)
    score_at.store(mma_v2(B, C, gl.zeros([ROWS, TOKENS], gl.float32, layout=MMA)))
    fill_tables(
        weight_at, scale_at, score_at, dt_at, A_ptr + first_h, D_ptr + first_h, parents_ptr + first, length, count,
        TILES + skipped, PER_HEAD, HEADS, ROWS, TOKENS, TREE, HAS_D,
    )  # fmt: skip

    # Append the window; x follows tile by tile.
    whole = mask_of & (h_of * PER_HEAD >= skipped) & gl.expand_dims(age_h < length, 0) & (begin == 0)
    gl.store(ring_dt_ptrs + gl.expand_dims(wrap(last - age_h, R), 0), dt, mask=whole)
    if (chunk == 0) & (begin == 0):
        B_end = ring_B_ptr + (gl.expand_dims(wrap(last - age, R) * N, 1) + kb)
        gl.store(B_end, B, mask=gl.expand_dims(age < length, 1))
    gdc_launch_dependents()

    z_ptr += first * z_token + first_h * z_head
    staged_x = gl.allocate_shared_memory(gl.float32, [ROWS, BV], FLAT)
    v_in = gl.expand_dims(gl.arange(0, BV, layout=gl.SliceLayout(1, LS)), 1) * N + kb
    v_out = gl.expand_dims(gl.arange(0, BV, layout=gl.SliceLayout(1, LOUT)), 1)
    token = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, LOUT)), 0)
    for i in range(begin, end):
        at = skipped + i
        h = at // PER_HEAD
        v = at % PER_HEAD * BV
        if HAS_Z:
            z = gl.load(z_ptr + h * z_head + v + v_out + token * z_token, mask=token < length, other=0.0)
        x_at.store(x)
        gl.store(ring_x_ptr + (h * ring_x_head + v - first_v) + x_end_rows, x, mask=new_x)
        if i + 1 < end:
            next_h, next_v = (at + 1) // PER_HEAD, (at + 1) % PER_HEAD * BV - first_v
            next_new = x_ptr + (next_h * x_head + next_v) + x_new_rows
            next_old = ring_x_ptr + (next_h * ring_x_head + next_v) + x_old_rows
            x = gl.load(gl.where(new_x, next_new, next_old), mask=is_row, other=0.0)
        tile = tiles.index((i - begin) % STAGES)
        async_copy.wait_group(STAGES - 1)
        S = tile.load(LS)
        if TILES > STAGES:
            if i + STAGES < end:
                to_h, to_v = (at + STAGES) // PER_HEAD, (at + STAGES) % PER_HEAD * BV - first_v
                fetch_tile(tile, state_ptr + to_h * state_head + to_v * N, N, BV)
        async_copy.commit_group()
        if flush:
            now = x_f
            if i + 1 < end:
                next_x = ring_x_ptr + (at + 1) // PER_HEAD * ring_x_head + ((at + 1) % PER_HEAD * BV - first_v)
                x_f = load_flush_x(next_x, start, committed, P, R, BV, ROWS)
            S = replay_tile(S, now, staged_x, staged_B, staged_dt, staged_a, h, committed, ROWS, LS).to(STATE)
            gl.store(state_ptr + (h * state_head + (v - first_v) * N) + v_in, S)
        zero = gl.zeros([BV, TOKENS], gl.float32, layout=MMA)
        y = product(S, C_at.permute((1, 0)).load(LC), zero, ACT)
        y *= gl.expand_dims(scale_at.index(h).load(gl.SliceLayout(0, MMA)), 0)
        x_t = x_at.permute((1, 0)).load(LX).to(gl.float32)
        y = mma_v2(x_t, weight_at.index(h).permute((1, 0)).load(LW), y, input_precision="tf32")
        y = gl.convert_layout(y, LOUT)
        if HAS_Z:
            z = z.to(gl.float32)
            y *= z / (1.0 + gl.exp(-z))
        gl.store(
            out_ptr + h * out_head + v + v_out + token * out_token, y.to(out_ptr.dtype.element_ty), mask=token < length
        )
