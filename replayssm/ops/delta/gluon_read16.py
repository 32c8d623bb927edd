"""Reads of a 16-bit checkpoint on the tensor cores.

The checkpoint's elements are exact operands. What multiplies them, k and q in fp32, goes in as three numbers of the
checkpoint's type that sum up to it: columns 0 to 2 for k, 3 to 5 for q. The same with u and its weights.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from replayssm.ops.gluon_chunk import PIECE, in_chunk_order
from replayssm.ops.gluon_split import PARTS, split
from replayssm.ops.gluon_window_parts import columns_shared, mma_layout

from .gluon_common import row_of, table
from .gluon_tiles import fetch, finish_rows

COLUMNS = gl.constexpr(8)


@gluon.jit
def part_of(column):
    """Which part of k (columns 0 to 2) or q (3 to 5) a column holds."""
    return gl.where(column < 2 * PARTS, column % PARTS, PARTS)


@gluon.jit
def stage_columns(k_at, q_at, K: gl.constexpr, TYPE: gl.constexpr, CHUNK: gl.constexpr):
    """Shared memory with the columns that multiply the checkpoint, [columns, K], in chunk order if CHUNK."""
    L: gl.constexpr = gl.BlockedLayout([1, K // 32], [1, 32], [gl.num_warps(), 1], [1, 0])
    n = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, L)), 1)
    k = gl.expand_dims(k_at.load(gl.SliceLayout(0, L)), 0)
    q = gl.expand_dims(q_at.load(gl.SliceLayout(0, L)), 0)
    columns_at = gl.allocate_shared_memory(TYPE, [COLUMNS, K], columns_shared(8))
    columns = split(gl.where(n < PARTS, k, q), part_of(n), TYPE)
    columns_at.store(in_chunk_order(columns, PIECE) if CHUNK else columns)
    return columns_at


@gluon.jit
def finish_columns(X, v_now, kq, beta, ring_u, out, KEEP: gl.constexpr = False):
    """Output and u of a tile's V rows from the sums of the columns' products, written as by `finish_rows`."""
    n = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, X.type.layout)), 0)
    at_k = gl.sum(gl.where(n < PARTS, X, 0.0), 1)
    at_q = gl.sum(gl.where(n < PARTS, 0.0, X), 1)
    finish_rows(at_k, at_q, v_now, kq, beta, ring_u, out, KEEP)


@gluon.jit
def stage_weights(
    seen_k_at, seen_q_at, HEADS: gl.constexpr, PAD_HEADS: gl.constexpr, BLOCK_L: gl.constexpr, TYPE: gl.constexpr
):
    """Shared memory with the columns that multiply u, [heads][columns, ring rows]."""
    L: gl.constexpr = gl.BlockedLayout([1, BLOCK_L // 16], [2, 16], [gl.num_warps(), 1], [1, 0])
    n = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, L)), 1)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    weights_at = gl.allocate_shared_memory(TYPE, [PAD_HEADS * COLUMNS * BLOCK_L], FLAT)
    for h in gl.static_range(HEADS):
        k = gl.expand_dims(row_of(seen_k_at, h, PAD_HEADS, BLOCK_L).load(gl.SliceLayout(0, L)), 0)
        q = gl.expand_dims(row_of(seen_q_at, h, PAD_HEADS, BLOCK_L).load(gl.SliceLayout(0, L)), 0)
        weights = split(gl.where(n < PARTS, k, q), part_of(n), TYPE)
        table(row_of(weights_at, h, PAD_HEADS, COLUMNS * BLOCK_L), COLUMNS, BLOCK_L).store(weights)
    return weights_at


@gluon.jit
def read_tiles_16(
    smem, u_smem, k_at, q_at, v_at, seen_k_at, seen_q_at, through_at, beta_at, state, ring_u, out, kq, start, committed,
    new, ring_len, stride_state_head, stride_ru_head, stride_out_head,
    K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_L: gl.constexpr, NUM_TILES: gl.constexpr,
    STAGES: gl.constexpr, PAD_HEADS: gl.constexpr, kept_u, kept_out, LATE: gl.constexpr,
):
    """As `gluon_tiles.read_tiles`; a warp has 16 V-rows of a tile."""
    PER_HEAD: gl.constexpr = V // BLOCK_V
    TYPE: gl.constexpr = state.dtype.element_ty
    ACT: gl.constexpr = ring_u.dtype.element_ty
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    # k_width 8: 16-byte accesses along K; both operands of a product permute K alike.
    LS: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    LC: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    LU: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    LW: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    IN_V: gl.constexpr = gl.SliceLayout(1, MMA)
    v = gl.arange(0, BLOCK_V, layout=IN_V)
    live = gl.expand_dims(gl.arange(0, BLOCK_L, layout=gl.SliceLayout(0, LU)) < committed, 0)
    HEADS: gl.constexpr = (NUM_TILES + PER_HEAD - 1) // PER_HEAD
    weights_at = stage_weights(seen_k_at, seen_q_at, HEADS, PAD_HEADS, BLOCK_L, ACT)
    columns = stage_columns(k_at, q_at, K, TYPE, False).permute((1, 0)).load(LC)
    for t in range(NUM_TILES):
        h = t // PER_HEAD
        col = t % PER_HEAD * BLOCK_V
        stage = t % STAGES
        weights = table(row_of(weights_at, h, PAD_HEADS, COLUMNS * BLOCK_L), COLUMNS, BLOCK_L)
        async_copy.wait_group(STAGES - 1)
        S = smem.index(stage).load(LS)
        u = u_smem.index(stage).permute((1, 0)).load(LU)
        u = gl.where(live, u, gl.zeros_like(u))
        if NUM_TILES > STAGES:
            if t + STAGES < NUM_TILES:
                fetch(smem.index(stage), u_smem.index(stage), state, ring_u, t + STAGES, start, committed, ring_len,
                      stride_state_head, stride_ru_head, K, V, BLOCK_V, BLOCK_L, True, True, False)
        async_copy.commit_group()
        X = mma_v2(S, columns, gl.zeros([BLOCK_V, COLUMNS], gl.float32, layout=MMA))
        X = X * gl.expand_dims(row_of(through_at, h, PAD_HEADS, 1).load(IN_V), 1)
        X = mma_v2(u, weights.permute((1, 0)).load(LW), X)
        finish_columns(X, row_of(v_at, t, NUM_TILES, BLOCK_V).load(IN_V), kq,
                       row_of(beta_at, h, PAD_HEADS, 1).load(IN_V),
                       row_of(kept_u, t, NUM_TILES, BLOCK_V) if LATE else
                       ring_u + h * stride_ru_head + new * V + col + v,
                       row_of(kept_out, t, NUM_TILES, BLOCK_V) if LATE else out + h * stride_out_head + col + v, LATE)
