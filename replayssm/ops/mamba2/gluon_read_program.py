"""A program of the Mamba-2 read kernel that computes outputs from the read copy and the ring."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from replayssm.ops.gluon_formats import E2M1_UNIT
from replayssm.ops.gluon_hints import guess_slot, prefetch
from replayssm.ops.mamba2.gluon_names import view
from replayssm.ops.mamba2.gluon_read_rows import (
    add_rows,
    gated,
    load_rows_B,
    load_rows_dt,
    load_rows_x,
    own_weights,
    ring_B_layout,
    threads_layout,
    weigh_rows,
    weights_layout,
)
from replayssm.ops.mamba2.gluon_read_stages import fetch_stage, staged_sums, tiles_together
from replayssm.ops.mamba2.gluon_read_state import (
    block_of,
    load_columns,
    power_of_two,
    row_bytes,
    stage_columns,
    state_sums,
)
from replayssm.ops.mamba2.gluon_read_token import timestep


@gluon.jit
def hint_reads(
    item, ring_x_ptr, ring_B_ptr, cursors_ptr, slot_indices_ptr, codes_ptr, scales_ptr, num_slots, ring_x_slot,
    ring_x_head, ring_B_slot, ring_B_group, codes_slot, scales_slot,
    H: gl.constexpr, G: gl.constexpr, P: gl.constexpr, N: gl.constexpr, R: gl.constexpr, SPAN: gl.constexpr,
    READ: gl.constexpr,
):  # fmt: skip
    """Bring what a reading program will likely need to the L2 cache."""
    CHUNKS: gl.constexpr = H // G * P // SPAN
    SIZE: gl.constexpr = codes_ptr.dtype.element_ty.primitive_bitwidth // 8
    ACT_SIZE: gl.constexpr = ring_x_ptr.dtype.element_ty.primitive_bitwidth // 8
    SCALE_SIZE: gl.constexpr = scales_ptr.dtype.element_ty.primitive_bitwidth // 8
    g = (item // CHUNKS % G).to(gl.int64)
    first_row = g * (H // G * P) + item % CHUNKS * SPAN
    slot = guess_slot(slot_indices_ptr + item // (CHUNKS * G))
    prefetch(cursors_ptr, slot, num_slots, 16, 16)
    slot_bytes = gl.to_tensor(ring_B_slot).to(gl.int64) * ACT_SIZE
    prefetch(ring_B_ptr + g * ring_B_group, slot, num_slots, slot_bytes, R * N * ACT_SIZE)
    slot_bytes = gl.to_tensor(ring_x_slot).to(gl.int64) * ACT_SIZE
    for i in gl.static_range((SPAN + P - 1) // P):
        at = ring_x_ptr + (first_row // P + i) * ring_x_head
        prefetch(at, slot, num_slots, slot_bytes, R * P * ACT_SIZE)
    at = codes_ptr + first_row * row_bytes(READ, N)
    slot_bytes = gl.to_tensor(codes_slot).to(gl.int64) * SIZE
    prefetch(at, slot, num_slots, slot_bytes, SPAN * row_bytes(READ, N) * SIZE)
    if READ != "bf16":
        BLOCKS: gl.constexpr = N // block_of(READ) if block_of(READ) > 0 else 1
        slot_bytes = gl.to_tensor(scales_slot).to(gl.int64) * SCALE_SIZE
        prefetch(scales_ptr + first_row * BLOCKS, slot, num_slots, slot_bytes, SPAN * BLOCKS * SCALE_SIZE)


@gluon.jit
def stage_parts(columns, C, READ: gl.constexpr):
    """C as operands, a tensor for each of `columns`, and what their products are to be multiplied by."""
    factor, unit = power_of_two(C) if READ != "bf16" else (1.0, 1.0)
    lows, highs = (), ()
    for p in gl.static_range(len(columns)):
        low, high = stage_columns(columns[p], factor, READ)
        lows, highs = lows + (low,), highs + (high,)
    return lows, highs, unit


@gluon.jit
def read_program(
    item, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr,
    ring_x_ptr, ring_B_ptr, ring_dt_ptr, cursors_ptr, slot_indices_ptr, out_ptr, codes_ptr, scales_ptr, global_ptr,
    num_slots, buffer_len, pad_slot_id,
    x_token, x_head, dt_token, B_token, B_group, C_token, C_group, z_token, z_head, out_token, out_head,
    ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head,
    codes_slot, scales_slot, global_slot,
    H: gl.constexpr, G: gl.constexpr, P: gl.constexpr, N: gl.constexpr, R: gl.constexpr, TILES: gl.constexpr,
    GROUP: gl.constexpr, DEPTH: gl.constexpr, AHEAD: gl.constexpr, HINT: gl.constexpr, ROWS: gl.constexpr,
    READ: gl.constexpr, HAS_D: gl.constexpr, HAS_Z: gl.constexpr, HAS_BIAS: gl.constexpr, SOFTPLUS: gl.constexpr,
):  # fmt: skip
    """Outputs of TILES tiles of state rows of one batch row and group, unless the row flushes.

    HINT: no others wait for registers, so all that may be done early is.
    """
    WARPS: gl.constexpr = gl.num_warps()
    TILE: gl.constexpr = 16 * WARPS
    CHUNKS: gl.constexpr = H // G * P // (TILE * TILES)
    # Elements of K under the 8 columns of one accumulator.
    PART: gl.constexpr = min(N, 128) if block_of(READ) > 0 else N
    WIDTH: gl.constexpr = 1 << max((TILES + 1) // 2 - 1, 0).bit_length()
    STACKED: gl.constexpr = max(1 << (TILES - 1).bit_length(), 8)
    SPAN: gl.constexpr = TILE * TILES
    NUM_HEADS: gl.constexpr = SPAN // P if SPAN % P == 0 else (SPAN + P - 2) // P + 1
    HEADS: gl.constexpr = 1 << (NUM_HEADS - 1).bit_length()
    L2: gl.constexpr = threads_layout(WIDTH, WARPS)
    LT: gl.constexpr = gl.SliceLayout(1, L2)
    LH: gl.constexpr = gl.SliceLayout(0, weights_layout(ROWS, WARPS))
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    chunk = item % CHUNKS
    g = (item // CHUNKS % G).to(gl.int64)
    row = (item // (CHUNKS * G)).to(gl.int64)
    slot = gl.load(slot_indices_ptr + row)

    # Every thread has WIDTH state rows of one head.
    t = gl.arange(0, 32 * WARPS, layout=LT)
    own_row = gl.minimum(t * WIDTH, SPAN - WIDTH)
    first_h = g * (H // G) + chunk * SPAN // P
    own_head = (chunk * SPAN % P + own_row) // P
    v = (chunk * SPAN + own_row) % P
    h = first_h + own_head
    e = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L2)), 0)
    some = gl.expand_dims(t * WIDTH < SPAN, 1)
    out_ptrs = gl.expand_dims(out_ptr + row * out_token + h * out_head + v, 1) + e
    # A span that begins within a head may have fewer heads than others: past the layer's last one there is nothing.
    # Loads that keep their order (volatile): what needs no cursors is on its way while those are waited for.
    heads = gl.minimum(first_h + gl.minimum(gl.arange(0, HEADS, layout=LH), NUM_HEADS - 1), H - 1)
    A = gl.load(A_ptr + heads, volatile=True)
    D = gl.load(D_ptr + heads, volatile=True) if HAS_D else A * 0.0
    bias = gl.load(dt_bias_ptr + heads, volatile=True) if HAS_BIAS else A
    dt = gl.load(dt_ptr + row * dt_token + heads, volatile=True)
    C_ptr += row * C_token + g * C_group
    C = gl.load(C_ptr + gl.arange(0, N, layout=gl.SliceLayout(0, ring_B_layout(N, WARPS))), volatile=True)
    if (slot == pad_slot_id) | (slot < 0) | (slot >= num_slots):
        gl.store(out_ptrs, gl.zeros([32 * WARPS, WIDTH], out_ptr.dtype.element_ty, layout=L2), mask=some)
        return
    base = slot.to(gl.int64)
    start = gl.load(cursors_ptr + base * 4)
    live = gl.load(cursors_ptr + base * 4 + 1)
    limit = gl.load(cursors_ptr + base * 4 + 2)
    if (live > 0) & (live + 1 > gl.minimum(limit, buffer_len)):
        return
    first_row = g * (H // G) * P + chunk * SPAN
    codes_ptr += base * codes_slot + first_row * row_bytes(READ, N)
    scales_ptr += base * scales_slot + first_row * (N // block_of(READ) if block_of(READ) > 0 else 1)
    if DEPTH > 0:
        ROW: gl.constexpr = row_bytes(READ, N)
        BLOCKS: gl.constexpr = N // block_of(READ) if block_of(READ) > 0 else 1
        ROWS_AT_ONCE: gl.constexpr = tiles_together(GROUP) * TILE
        PLACES: gl.constexpr = DEPTH * GROUP * TILE // ROWS_AT_ONCE
        codes_at = gl.allocate_shared_memory(codes_ptr.dtype.element_ty, [PLACES, ROWS_AT_ONCE, ROW], PLAIN)
        scales_at = gl.allocate_shared_memory(scales_ptr.dtype.element_ty, [PLACES, ROWS_AT_ONCE, BLOCKS], PLAIN)
        for i in gl.static_range(DEPTH):
            fetch_stage(codes_at, scales_at, codes_ptr, scales_ptr, i, i, GROUP, READ)
            async_copy.commit_group()
    # Those first whose use comes last: nothing waits before all are asked for.
    x_ptrs = x_ptr + row * x_token + h * x_head + v
    ring_x_ptrs = ring_x_ptr + base * ring_x_slot + h * ring_x_head + v
    x = ()
    for i in gl.static_range(ROWS // 8 if HINT else 1 if AHEAD else 0):
        x = x + (load_rows_x(x_ptrs, ring_x_ptrs, start, live, i * 8, 8, P, R, WIDTH),)
    own_dt, younger_dt = load_rows_dt(ring_dt_ptr + base * ring_dt_slot + heads * ring_dt_head, start, live, ROWS, R)
    B = load_rows_B(
        B_ptr + row * B_token + g * B_group, ring_B_ptr + base * ring_B_slot + g * ring_B_group, start, live, ROWS, N, R
    )
    scale = gl.load(global_ptr + base * global_slot + heads, volatile=True) * E2M1_UNIT if READ == "nvfp4" else 1.0
    columns = load_columns(C_ptr, READ, N, PART, DEPTH > 0)

    lows, highs, unit = (), (), 1.0
    if HINT:
        lows, highs, unit = stage_parts(columns, C, READ)
    dt, D = timestep(dt, bias, HAS_BIAS, SOFTPLUS), D.to(gl.float32)
    weight, decay = weigh_rows(B, C, dt, own_dt, younger_dt, A, D, live)
    weights = own_weights(weight, own_head, L2)
    y = add_rows(x, weights, live, x_ptrs, ring_x_ptrs, start, ROWS, P, R, WIDTH)
    y = gl.convert_layout(y, L2, assert_trivial=True)
    # What the outputs need at last; memory is busy with the stages until then.
    z, row_scale = y, decay
    if HAS_Z:
        z = gl.load(gl.expand_dims(z_ptr + row * z_token + h * z_head + v, 1) + e, volatile=True)
    if READ == "fp8":
        row_scale = gl.load(gl.expand_dims(scales_ptr + own_row, 1) + e, volatile=True)
    if not HINT:
        lows, highs, unit = stage_parts(columns, C, READ)
    decay = gl.expand_dims(gl.gather(decay * unit * scale, own_head, 0), 1)
    sums = gl.allocate_shared_memory(gl.float32, [STACKED, TILE], LINE if DEPTH > 0 else PLAIN)
    if DEPTH > 0:
        staged_sums(sums, codes_at, scales_at, codes_ptr, scales_ptr, lows, highs, TILES, GROUP, DEPTH, READ, N, PART)
    else:
        sums.store(state_sums(codes_ptr, scales_ptr, lows, highs, TILES, GROUP, READ, N, PART))
    scaled = view(sums, [STACKED * TILE // WIDTH, WIDTH], PLAIN).slice(0, 32 * WARPS).load(L2) * decay
    if READ == "fp8":
        scaled *= row_scale
    y += scaled
    if HAS_Z:
        y = gated(y, z)
    gl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=some)
