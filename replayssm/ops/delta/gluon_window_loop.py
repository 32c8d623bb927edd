"""The loop over a window program's tiles of the checkpoint: replay the ring into a tile, or read it."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from replayssm.ops.delta.gluon_window_flush import replay_tile
from replayssm.ops.delta.gluon_window_fold import chunk_width, fold_chunks, fold_tile
from replayssm.ops.delta.gluon_window_solve import solve_tile
from replayssm.ops.delta.gluon_window_tile import (
    add_rows,
    append_tile,
    fetch_rows,
    fetch_values,
    load_tile,
    read_tile,
    store_results,
    tile_of,
)
from replayssm.ops.gluon_window_parts import mma_layout


@gluon.jit
def run_tiles(
    memory, weight, tables, folding, places, strides, begin, end, start, committed, length, ring_len,
    HEADS: gl.constexpr, K: gl.constexpr, V: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    FLUSH: gl.constexpr, CHUNK: gl.constexpr, KDA: gl.constexpr,
):  # fmt: skip
    """Tiles from `begin` to `end`, the first of which are on their way; pointers are of the program's first V-row.

    old: the committed rows' v where they are replayed, their u where they are read; they go to values_at. What a tile
    gives waits in kept_at for a barrier of the next one.
    """
    tiles, values_at, v_at, kept_at = memory
    state, old, v, ring_v, ring_u, out = places
    (
        stride_state_head, stride_old_head, stride_v_token, stride_v_head, stride_rv_head, stride_ru_head,
        stride_out_token, stride_out_head,
    ) = strides  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    ACT: gl.constexpr = v.dtype.element_ty
    NC: gl.constexpr = K // tiles.shape[2]
    STAGES: gl.constexpr = tiles.shape[0] // NC
    # A fold chunk by chunk leaves the tile where it is, so that the next is asked for after it.
    ROLLED: gl.constexpr = FLUSH and KDA and CHUNK
    BLOCK_V: gl.constexpr = tiles.shape[1]
    PER_HEAD: gl.constexpr = V // BLOCK_V
    BITS: gl.constexpr = state.dtype.element_ty.primitive_bitwidth
    WIDTH: gl.constexpr = chunk_width(BITS) if CHUNK else K
    MMA: gl.constexpr = mma_layout(WARPS)
    LS: gl.constexpr = gl.DotOperandLayout(0, MMA, 128 // BITS)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 128 // BITS)
    columns_at, solution_at, fade_at, through_at = tables
    fresh = start + committed
    # More columns, or KDA's, would leave too few registers for a tile.
    HELD: gl.constexpr = TOKENS <= 4 and not FLUSH and not KDA
    if HELD:
        columns = load_tile(columns_at, 0, K, WIDTH, RIGHT, True)
    # A bound that the compiler does not fold: Triton 3.6 crashes on the single turn of one tile.
    for i in range(begin, gl.minimum(committed + end, end)):
        h = i // PER_HEAD
        col = i % PER_HEAD * BLOCK_V
        stage = (i - begin) % STAGES
        tile = tile_of(tiles, stage, NC)
        async_copy.wait_group(STAGES - 1)
        if not ROLLED:
            S = load_tile(tiles, stage, K, WIDTH, LS)
        rows_at = values_at.index((i - begin) % (STAGES + 1))
        new_at = v_at.index((i - begin) % (STAGES + 1))
        if i + STAGES < end:
            ahead_h, ahead_col = (i + STAGES) // PER_HEAD, (i + STAGES) % PER_HEAD * BLOCK_V
            if not ROLLED:
                fetch_rows(tile, state + (ahead_h * stride_state_head + ahead_col * K), 0, BLOCK_V, K)
            buffer = (i + STAGES - begin) % (STAGES + 1)
            fetch_values(
                values_at.index(buffer), v_at.index(buffer), old + (ahead_h * stride_old_head + ahead_col),
                v + (ahead_h * stride_v_head + ahead_col), start, committed, length, ring_len, stride_v_token, V,
            )  # fmt: skip
        if not ROLLED:
            async_copy.commit_group()
        if i > begin:
            last_h, last_col = (i - 1) // PER_HEAD, (i - 1) % PER_HEAD * BLOCK_V
            store_results(
                kept_at, ring_u + (last_h * stride_ru_head + last_col), out + (last_h * stride_out_head + last_col),
                fresh, length, ring_len, stride_out_token, V, TOKENS,
            )  # fmt: skip
        append_tile(ring_v + (h * stride_rv_head + col), new_at, fresh, length, ring_len, V)
        here = state + (h * stride_state_head + col * K)
        if FLUSH:
            if ROLLED:
                X = fold_chunks(tiles, stage * NC, here, rows_at, committed, columns_at, folding, ACT, LS)
                if i + STAGES < end:
                    ahead_h, ahead_col = (i + STAGES) // PER_HEAD, (i + STAGES) % PER_HEAD * BLOCK_V
                    fetch_rows(tile, state + (ahead_h * stride_state_head + ahead_col * K), 0, BLOCK_V, K)
                async_copy.commit_group()
            elif CHUNK:
                S = fold_tile(S, here, rows_at, committed, tables, folding, h, 128 // BITS, LS)
            else:
                S = replay_tile(
                    S, ring_v + (h * stride_rv_head + col), here, folding, h, start, committed, ring_len, HEADS, K, V,
                    BLOCK_V, ROWS, KDA, LS,
                )  # fmt: skip
            if not ROLLED:
                X = read_tile(S, load_tile(columns_at, 0, K, WIDTH, RIGHT, True), ACT)
        else:
            if not HELD:
                columns = load_tile(columns_at, 0, K, WIDTH, RIGHT, True)
            X = read_tile(S, columns, ACT)
            seen_weight = weight
            if not KDA:
                X *= gl.expand_dims(through_at.index(h).load(gl.SliceLayout(1, MMA)), 1)
                seen_weight *= gl.expand_dims(fade_at.index(h).load(gl.SliceLayout(1, weight.type.layout)), 1)
            X = add_rows(X, rows_at, seen_weight, committed)
        X = solve_tile(X, new_at, solution_at, h, length, HEADS, TOKENS)
        kept_at.store(gl.permute(X.to(ACT), (1, 0)))
    last_h, last_col = (end - 1) // PER_HEAD, (end - 1) % PER_HEAD * BLOCK_V
    store_results(
        kept_at, ring_u + (last_h * stride_ru_head + last_col), out + (last_h * stride_out_head + last_col), fresh,
        length, ring_len, stride_out_token, V, TOKENS,
    )  # fmt: skip
