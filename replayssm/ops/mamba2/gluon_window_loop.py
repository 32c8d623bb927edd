"""The loop over the tiles of a Mamba-2 window program: replay, product with the C of all tokens, outputs."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from replayssm.ops.gluon_flushers import opaque
from replayssm.ops.gluon_window_parts import product
from replayssm.ops.mamba2.gluon_chunk_replay import replay_chunk
from replayssm.ops.mamba2.gluon_layouts import tile_mma_layout, tile_shared
from replayssm.ops.mamba2.gluon_names import view
from replayssm.ops.mamba2.gluon_replayed import load_replayed_x, own_rows
from replayssm.ops.mamba2.gluon_window_flush import replay_layout, replay_tile, stage_x, store_tile
from replayssm.ops.mamba2.gluon_window_tiles import (
    append_x,
    for_all_heads,
    load_x,
    store_outputs,
    take_tile,
    tile_at,
    tile_outputs_layout,
)


@gluon.jit
def run_tiles(
    begin, end, x, x_f, flush, start, committed, length, count, tiles, C_at, weight_at, scale_at, staged_B, staged_dt,
    staged_a, state_ptr, x_ptr, ring_x_ptr, z_ptr, out_ptr, state_head, x_token, x_head, ring_x_head, z_token, z_head,
    out_token, out_head,
    P: gl.constexpr, R: gl.constexpr, HW: gl.constexpr, TILES: gl.constexpr, APPENDS: gl.constexpr,
    CHUNKED: gl.constexpr, HAS_Z: gl.constexpr,
):  # fmt: skip
    """Tiles `begin` to `end`, the first of which are on their way to `tiles`; x and x_f are the first one's rows.

    x: of the rows that are read, by age, [heads, rows, V]; x_f: of those that a flush replays, [rows, heads, V].
    """
    STAGES: gl.constexpr = tiles.shape[0]
    N: gl.constexpr = tiles.shape[2]
    BV: gl.constexpr = x.shape[2]
    ROWS: gl.constexpr = x.shape[1]
    FLUSH_ROWS: gl.constexpr = x_f.shape[0]
    TOKENS: gl.constexpr = C_at.shape[0]
    HEADS: gl.constexpr = weight_at.shape[0]
    ACT: gl.constexpr = x.dtype
    STATE: gl.constexpr = tiles.dtype
    BITS: gl.constexpr = STATE.primitive_bitwidth
    PER_BLOCK: gl.constexpr = P // BV
    MMA: gl.constexpr = tile_mma_layout(HW, gl.num_warps())
    # k_width: 16-byte accesses along K; both operands of a product permute K alike.
    LS: gl.constexpr = gl.DotOperandLayout(0, MMA, 128 // BITS)
    LC: gl.constexpr = gl.DotOperandLayout(1, MMA, 128 // BITS)
    LX: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    LW: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    L3: gl.constexpr = x.type.layout
    OWN: gl.constexpr = own_rows(CHUNKED)
    LREPLAY: gl.constexpr = replay_layout(BITS, HW, BV, N)
    LOUT: gl.constexpr = tile_outputs_layout(TOKENS, HW, gl.num_warps())
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    CUBES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    x_at = gl.allocate_shared_memory(ACT, [HW, ROWS, BV], gl.SwizzledSharedLayout(8, 1, min(8, BV // 8), [2, 1, 0]))
    staged_x = gl.allocate_shared_memory(gl.float32, [FLUSH_ROWS, HW, BV], PLAIN)
    weights = view(weight_at, [HEADS // HW, HW, TOKENS, ROWS], CUBES)
    scales = view(scale_at, [HEADS // HW, HW, TOKENS], PLAIN)
    C_all = C_at.permute((1, 0))
    replayed = gl.where(flush, committed, 0)
    last = start + committed + length - 1
    for i in range(begin, end):
        block, h, v = tile_at(i, PER_BLOCK, HW, BV)
        _, next_h, next_v = tile_at(i + 1, PER_BLOCK, HW, BV)
        x_at.store(x)
        if APPENDS:
            append_x(x, ring_x_ptr + (h * ring_x_head + v), ring_x_head, last, length, P, R, HW, BV)
        x_f_now = x_f
        if TILES > 1:
            # Masked, not behind a branch, at whose end the compiler would wait for them.
            from_row, tokens = opaque(start), opaque(length)
            read, again = gl.where(i + 1 < end, count, 0), gl.where(i + 1 < end, replayed, 0)
            x_new, x_old = x_ptr + (next_h * x_head + next_v), ring_x_ptr + (next_h * ring_x_head + next_v)
            x = load_x(x_new, x_old, x_token, x_head, ring_x_head, from_row, tokens, read, P, R, ROWS, HW, BV, L3)
            x_f = load_replayed_x(x_old, ring_x_head, from_row, again, P, R, FLUSH_ROWS, HW, BV, OWN)
        rows = tiles.index((i - begin) % STAGES)
        tile = view(rows, [HW, BV, N], tile_shared(STATE.primitive_bitwidth))
        tile_ptr = state_ptr + h * state_head + v * N
        async_copy.wait_group(STAGES - 1)
        _, to_h, to_v = tile_at(i + STAGES, PER_BLOCK, HW, BV)
        to_ptr = state_ptr + to_h * state_head + to_v * N
        more = i + STAGES < end
        if CHUNKED:
            if flush:
                replay_chunk(tile, x_f_now, staged_x, staged_B, staged_dt, staged_a, block, tile_ptr, state_head, MMA)
            S = take_tile(tile, rows, to_ptr, state_head, more, TILES > STAGES, LS)
        elif flush:
            S = take_tile(tile, rows, to_ptr, state_head, more, TILES > STAGES, LREPLAY)
            stage_x(staged_x, x_f_now, staged_dt, block)
            S = replay_tile(S, staged_x, staged_B, staged_a, block, opaque(committed)).to(STATE)
            store_tile(S, tile_ptr, state_head)
            S = gl.convert_layout(S, LS)
        else:
            S = take_tile(tile, rows, to_ptr, state_head, more, TILES > STAGES, LS)
        async_copy.commit_group()
        later = opaque(length)
        C_t = for_all_heads(C_all.load(gl.SliceLayout(0, LC)), HW, LC)
        y = product(S, C_t, gl.zeros([HW, BV, TOKENS], gl.float32, layout=MMA), ACT)
        y *= gl.expand_dims(scales.index(block).load(gl.SliceLayout(1, MMA)), 1)
        x_t = x_at.permute((0, 2, 1)).load(LX).to(gl.float32)
        y = mma_v2(x_t, weights.index(block).permute((0, 2, 1)).load(LW), y, input_precision="tf32")
        store_outputs(
            gl.convert_layout(y, LOUT), out_ptr + (h * out_head + v), z_ptr + (h * z_head + v), out_token, out_head,
            z_token, z_head, later, HAS_Z,
        )  # fmt: skip
