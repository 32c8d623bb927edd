"""Outputs of a window of Mamba-2 from the read copy: some heads of one group and row, on the tensor cores.

State rows are the V-rows of the program's heads, one after the other, in tiles that lie in one head or in two
neighbouring ones. Then every token has two columns, one for each head; each state row keeps those of its own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_wait

from replayssm.ops.delta.gluon_read_scores import power_near
from replayssm.ops.gluon_formats import E2M1_UNIT, scales_a_row
from replayssm.ops.gluon_read_window_codes import (
    allocate_columns,
    codes_a_row,
    load_codes,
    load_operands,
    load_scales,
    multiply,
    stage_columns,
    staging_layout,
)
from replayssm.ops.gluon_window_parts import heads_layout, mma_layout, row_ptrs, rows_layout, wrap
from replayssm.ops.mamba2.gluon_names import view
from replayssm.ops.mamba2.gluon_window_weights import fill_tables, row_dt


@gluon.constexpr_function
def tile_span(tile, head_dim, heads):
    """Heads that a tile may touch."""
    return 1 if head_dim % tile == 0 or heads == 1 else 2


@gluon.constexpr_function
def first_head(i, tile, head_dim, heads):
    """First of the heads whose columns tile i has."""
    return min(i * tile // head_dim, heads - tile_span(tile, head_dim, heads))


@gluon.constexpr_function
def outputs_layout(tile, span, tokens, warps):
    """[state rows, heads of a tile, tokens]: a state row's tokens in one lane or in neighbouring ones."""
    lanes = max(1, min(tokens, 32 * warps // tile))
    return gl.BlockedLayout([1, span, tokens // lanes], [32 // lanes, 1, lanes], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def columns_of(table, i: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Shared memory [COLUMNS, ROWS] from head i of a table [heads, tokens, ROWS] on."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return view(table.index(i), [COLUMNS, ROWS], PLAIN)


@gluon.jit
def own_columns(X, TILE: gl.constexpr, SPAN: gl.constexpr, TOKENS: gl.constexpr, second_head):
    """[state rows, tokens]: of X [state rows, heads x tokens], each row's own head's."""
    L: gl.constexpr = outputs_layout(TILE, SPAN, TOKENS, gl.num_warps())
    X = gl.convert_layout(gl.reshape(X, [TILE, SPAN, TOKENS]), L)
    if SPAN == 1:
        y = gl.reshape(X, [TILE, TOKENS])
    else:
        lower, upper = gl.split(gl.permute(X, (0, 2, 1)))
        row = gl.expand_dims(gl.arange(0, TILE, layout=gl.SliceLayout(1, lower.type.layout)), 1)
        y = gl.where(row >= second_head, upper, lower)
    return y


@gluon.jit
def load_tiles(
    codes_ptr, scales_ptr, BEGIN: gl.constexpr, END: gl.constexpr, ROWS: gl.constexpr, READ: gl.constexpr,
    TILE: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Codes and scales of tiles BEGIN to END - 1 of ROWS state rows, as tuples."""
    tiles, scales = (), ()
    for i in gl.static_range(BEGIN, END):
        tile = load_codes(codes_ptr + i * TILE * codes_a_row(READ, N), READ, TILE, N, ROWS - i * TILE)
        scale = load_scales(scales_ptr + i * TILE * scales_a_row(READ, N), tile, READ, TILE, N, ROWS - i * TILE)
        tiles, scales = tiles + (tile,), scales + (scale,)
    return tiles, scales


@gluon.jit
def read_window(
    slot, first, length, start, committed, live, g, first_h, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr,
    dt_bias_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr, parents_ptr, out_ptr, codes_ptr, scales_ptr, global_ptr,
    x_token, x_head, dt_token, dt_head, B_token, B_group, C_token, C_group, z_token, z_head, out_token, out_head,
    ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head, codes_slot, scales_slot,
    global_slot,
    H: gl.constexpr, G: gl.constexpr, P: gl.constexpr, N: gl.constexpr, R: gl.constexpr, HEADS: gl.constexpr,
    TILE: gl.constexpr, ROWS: gl.constexpr, WINDOW: gl.constexpr, READ: gl.constexpr, TREE: gl.constexpr,
    HAS_D: gl.constexpr, HAS_Z: gl.constexpr, HAS_BIAS: gl.constexpr, SOFTPLUS: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """Outputs and ring rows of `length` tokens from token `first` on, of HEADS heads of group g from `first_h` on.

    live: committed rows that are read beside the copy (none after a flush); new rows follow all `committed` ones.
    """
    WARPS: gl.constexpr = gl.num_warps()
    ACT: gl.constexpr = x_ptr.dtype.element_ty
    EXACT: gl.constexpr = ACT == gl.bfloat16
    SPAN: gl.constexpr = tile_span(TILE, P, HEADS)
    # A product has at least eight columns.
    TOKENS: gl.constexpr = max(WINDOW, 8 // SPAN)
    COLUMNS: gl.constexpr = SPAN * TOKENS
    TILES: gl.constexpr = (HEADS * P + TILE - 1) // TILE
    MMA: gl.constexpr = mma_layout(WARPS)
    LX: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    LW: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    LH: gl.constexpr = heads_layout(WARPS)
    L2: gl.constexpr = rows_layout(TILE, WARPS)
    LQ: gl.constexpr = staging_layout(N, WARPS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROWS_SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, min(8, TILE // 8), order=[1, 0])
    codes_ptr += slot * codes_slot + first_h * (P * codes_a_row(READ, N))
    scales_ptr += slot * scales_slot + first_h * (P * scales_a_row(READ, N))
    # The rest of the copy is asked for when the inputs' registers are free.
    EARLY: gl.constexpr = 0 if LATE else TILES - TILES // 2 if TILES > 2 else TILES
    tiles, tile_scales = load_tiles(codes_ptr, scales_ptr, 0, EARLY, HEADS * P, READ, TILE, N)
    x_ptr += first * x_token + first_h * x_head
    B_ptr += first * B_token + g * B_group
    C_ptr += first * C_token + g * C_group
    dt_ptr += first * dt_token + first_h * dt_head
    z_ptr += first * z_token + first_h * z_head
    out_ptr += first * out_token + first_h * out_head
    ring_x_ptr += slot * ring_x_slot + first_h * ring_x_head
    ring_B_ptr += slot * ring_B_slot + g * ring_B_group
    ring_dt_ptr += slot * ring_dt_slot + first_h * ring_dt_head
    count = live + length
    last = start + committed + length - 1

    age = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LQ))
    k = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, LQ)), 0)
    B_rows = row_ptrs(B_ptr, ring_B_ptr, age, length, count, start, B_token, N, R)
    B = gl.load(gl.expand_dims(B_rows, 1) + k, mask=gl.expand_dims(age < count, 1), other=0.0)
    n = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, LQ)) % TOKENS, 1)
    C = gl.load(C_ptr + (n * C_token + k), mask=n < length, other=0.0)
    age_h = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LH))
    h_of = gl.expand_dims(gl.arange(0, HEADS, layout=gl.SliceLayout(1, LH)), 1)
    mask_of = h_of < HEADS
    bias = gl.load(dt_bias_ptr + first_h + h_of).to(gl.float32) if HAS_BIAS else 0.0
    dt_ptrs, ring_dt_ptrs = dt_ptr + h_of * dt_head, ring_dt_ptr + h_of * ring_dt_head
    dt = row_dt(dt_ptrs, ring_dt_ptrs, bias, age_h, length, count, start, dt_token, mask_of, R, SOFTPLUS)
    dt_before = row_dt(dt_ptrs, ring_dt_ptrs, bias, age_h - 1, length, count, start, dt_token, mask_of, R, SOFTPLUS)
    age_x = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, L2)), 1)
    in_tile = gl.expand_dims(gl.arange(0, TILE, layout=gl.SliceLayout(0, L2)), 0)
    new_rows = (length - 1 - age_x) * x_token
    old_rows = wrap(start + count - 1 - age_x, R) * P
    end_rows = wrap(last - age_x, R) * P
    xs = ()
    for i in gl.static_range(TILES):
        v = i * TILE + in_tile
        h = v // P
        new = x_ptr + (h * x_head + v % P + new_rows)
        old = ring_x_ptr + (h * ring_x_head + v % P + old_rows)
        xs = xs + (gl.load(gl.where(age_x < length, new, old), mask=(age_x < count) & (h < HEADS), other=0.0),)

    # Scores of all rows and tokens, once for all heads.
    B_at = gl.allocate_shared_memory(ACT, [ROWS, N], ROWS_SHARED)
    C_at = gl.allocate_shared_memory(ACT, [COLUMNS, N], ROWS_SHARED)
    score_at = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], PLAIN)
    weight_at = gl.allocate_shared_memory(gl.float32, [HEADS, TOKENS, ROWS], PLAIN)
    scale_at = gl.allocate_shared_memory(gl.float32, [HEADS, TOKENS, 1], PLAIN)
    dt_at = gl.allocate_shared_memory(gl.float32, [2, HEADS, ROWS], PLAIN)
    inverse_at = gl.allocate_shared_memory(gl.float32, [COLUMNS], FLAT)
    x_at = gl.allocate_shared_memory(ACT, [TILES, ROWS, TILE], SWIZZLED)
    columns_at = allocate_columns(READ, EXACT, COLUMNS, N)
    dt_at.index(0).store(dt)
    dt_at.index(1).store(dt_before)
    B_at.store(B)
    C_at.store(C)
    right = C_at.permute((1, 0)).load(LW)
    score_at.store(mma_v2(B_at.load(LX), right, gl.zeros([ROWS, COLUMNS], gl.float32, layout=MMA)))
    columns = C.to(gl.float32)
    inverse = gl.full([COLUMNS], 1.0, gl.float32, layout=gl.SliceLayout(1, LQ))
    if READ != "bf16":
        power, inverse = power_near(gl.sum(columns * columns, 1))
        columns *= gl.expand_dims(power, 1)
    inverse_at.store(inverse)
    stage_columns(columns_at, columns, READ, EXACT)
    fill_tables(
        weight_at, scale_at, score_at.slice(0, TOKENS, dim=1), dt_at, A_ptr + first_h, D_ptr + first_h,
        parents_ptr + first, length, count, HEADS, HEADS, ROWS, TOKENS, TREE, HAS_D,
    )  # fmt: skip
    # Append the window.
    for i in gl.static_range(TILES):
        x_at.index(i).store(xs[i])
        v = i * TILE + in_tile
        to = ring_x_ptr + (v // P * ring_x_head + v % P + end_rows)
        gl.store(to, xs[i], mask=(age_x < length) & (v // P < HEADS))
    gl.store(ring_dt_ptrs + gl.expand_dims(wrap(last - age_h, R), 0), dt, mask=gl.expand_dims(age_h < length, 0))
    if first_h % (H // G) == 0:
        B_end = ring_B_ptr + (gl.expand_dims(wrap(last - age, R) * N, 1) + k)
        gl.store(B_end, B, mask=gl.expand_dims(age < length, 1))

    if LATE:
        gdc_wait()
    more, more_scales = load_tiles(codes_ptr, scales_ptr, EARLY, TILES, HEADS * P, READ, TILE, N)
    tiles, tile_scales = tiles + more, tile_scales + more_scales
    operands = load_operands(columns_at, READ, EXACT, COLUMNS, N)
    inverse = inverse_at.load(gl.SliceLayout(0, MMA))
    head_of = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, MMA)) // TOKENS
    for i in gl.static_range(TILES):
        scale = view(scale_at.index(first_head(i, TILE, P, HEADS)), [COLUMNS], FLAT)
        factor = inverse * scale.load(gl.SliceLayout(0, MMA))
        if READ == "nvfp4":
            head = first_h + first_head(i, TILE, P, HEADS) + head_of
            factor *= gl.load(global_ptr + slot * global_slot + head) * E2M1_UNIT
        X = multiply(tiles[i], tile_scales[i], operands, READ, COLUMNS) * gl.expand_dims(factor, 0)
        weight = columns_of(weight_at, first_head(i, TILE, P, HEADS), ROWS, COLUMNS).permute((1, 0)).load(LW)
        X = mma_v2(x_at.index(i).permute((1, 0)).load(LX).to(gl.float32), weight, X, input_precision="tf32")
        y = own_columns(X, TILE, SPAN, TOKENS, (first_head(i, TILE, P, HEADS) + 1) * P - i * TILE)
        v = i * TILE + gl.expand_dims(gl.arange(0, TILE, layout=gl.SliceLayout(1, y.type.layout)), 1)
        token = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, y.type.layout)), 0)
        mask = (token < length) & (v // P < HEADS)
        if HAS_Z:
            z = gl.load(z_ptr + (v // P * z_head + v % P + token * z_token), mask=mask, other=0.0).to(gl.float32)
            y *= z / (1.0 + gl.exp(-z))
        gl.store(out_ptr + (v // P * out_head + v % P + token * out_token), y.to(ACT), mask=mask)
