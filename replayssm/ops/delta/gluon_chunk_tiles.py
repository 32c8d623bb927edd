"""A flushing row's tiles in chunk form: every tile takes all committed rows at once, on the tensor cores."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from replayssm.ops.gluon_chunk import PIECE, chunk_layout, from_pieces, num_parts, rows_shared, to_pieces
from replayssm.ops.gluon_window_parts import mma_layout

from .gluon_chunk_gdn import chunk_tables, load_keys, replay_chunks, solve_operands, stage_keys
from .gluon_chunk_kda import kda_chunk_tables, kda_replay_chunks
from .gluon_common import row_of
from .gluon_read16 import COLUMNS, finish_columns, stage_columns
from .gluon_space import spare_table, spare_words
from .gluon_tiles import fetch, finish_rows


@gluon.constexpr_function
def whole_layout(block_v, k_dim, warps):
    """[V rows, K]: `chunk_layout` of width 32, repeated along K."""
    one = chunk_layout(block_v, PIECE.value, warps)
    more = [[0, PIECE.value << i] for i in range((k_dim // PIECE.value).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [*one.reg_bases, *more], one.lane_bases, one.warp_bases, one.block_bases, [block_v, k_dim]
    )


@gluon.jit
def halves(x):
    """[V, K] as two tensors of half the columns each, which threads hold apart."""
    rows: gl.constexpr = x.shape[0]
    half: gl.constexpr = x.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(x, [rows, 2, half]), (0, 2, 1)))


@gluon.jit
def tile_pieces(x, MMA: gl.constexpr):
    """A tile in `whole_layout` as a tuple of pieces [V, 32] in the accumulators' layout; no data moves."""
    if x.shape[1] > PIECE:
        left, right = halves(x)
        pieces = tile_pieces(left, MMA) + tile_pieces(right, MMA)
    else:
        pieces = to_pieces(x, MMA)
    return pieces


@gluon.jit
def store_pieces(state, pieces, K: gl.constexpr, LAYOUT: gl.constexpr):
    """Write the pieces of a tile; the pointer is that of its first row."""
    BLOCK_V: gl.constexpr = pieces[0].shape[0]
    rows = gl.expand_dims(gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, LAYOUT)), 1) * K
    at = state + (rows + gl.expand_dims(gl.arange(0, PIECE, layout=gl.SliceLayout(0, LAYOUT)), 0))
    for c in gl.static_range(len(pieces)):
        gl.store(at + c * PIECE, from_pieces((pieces[c],), LAYOUT))


@gluon.jit
def sums_of(pieces, k_at, q_at, CHUNK: gl.constexpr, IN_V: gl.constexpr):
    """Products of a tile's pieces with k and q, summed over K in fp32."""
    at_k = gl.zeros([pieces[0].shape[0]], gl.float32, layout=gl.SliceLayout(1, CHUNK))
    at_q = at_k
    for c in gl.static_range(len(pieces)):
        x = from_pieces((pieces[c],), CHUNK).to(gl.float32)
        at_k += gl.sum(x * gl.expand_dims(k_at.slice(c * PIECE, PIECE).load(gl.SliceLayout(0, CHUNK)), 0), 1)
        at_q += gl.sum(x * gl.expand_dims(q_at.slice(c * PIECE, PIECE).load(gl.SliceLayout(0, CHUNK)), 0), 1)
    return gl.convert_layout(at_k, IN_V, assert_trivial=True), gl.convert_layout(at_q, IN_V, assert_trivial=True)


@gluon.jit
def flush_chunks(
    stages, v_smem, k_at, q_at, v_at, through_at, beta_at, state, ring_k, ring_v, ring_g, ring_beta, ring_u, out, kq,
    start, committed, new, ring_len, stride_state_head, stride_rv_head, stride_ru_head, stride_rg_head, stride_rb_head,
    stride_out_head,
    K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr, ROWS: gl.constexpr, NUM_TILES: gl.constexpr,
    STAGES: gl.constexpr, PAD_HEADS: gl.constexpr, KDA: gl.constexpr, NORM: gl.constexpr, begin, end,
):  # fmt: skip
    """As `gluon_tiles.flush_tiles`; stages its tables itself. v comes with the tiles, the oldest row first."""
    smem = stages.index(0)
    PER_HEAD: gl.constexpr = V // BLOCK_V
    HEADS: gl.constexpr = (NUM_TILES + PER_HEAD - 1) // PER_HEAD
    TYPE: gl.constexpr = state.dtype.element_ty
    # Columns through unit keys fit any 16-bit type.
    COLUMNS_FIT: gl.constexpr = TYPE != gl.float32 and NORM
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    WHOLE: gl.constexpr = whole_layout(BLOCK_V, K, gl.num_warps())
    CHUNK: gl.constexpr = chunk_layout(BLOCK_V, PIECE, gl.num_warps())
    IN_V: gl.constexpr = gl.SliceLayout(1, MMA)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    if KDA:
        spare = None
        if STAGES >= 2 and 2 * ROWS * K <= BLOCK_V * K * TYPE.primitive_bitwidth // 32:
            spare = spare_words(stages, 0, 1, BLOCK_V, K, STAGES)
        fresh_at, left_at, solve_at, last_at = kda_chunk_tables(
            ring_k, ring_g, ring_beta, start, committed, ring_len, K, ROWS, NORM, PIECE, spare
        )
    else:
        KEY_PARTS: gl.constexpr = num_parts(ring_k.dtype.element_ty)
        keys_at = spare_table(stages, [KEY_PARTS, ROWS, K], rows_shared(), 0, BLOCK_V, K, STAGES)
        solve_at = spare_table(stages, [3, HEADS * ROWS, ROWS], PLAIN, 1, BLOCK_V, K, STAGES)
        norm_at = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)
        faded_at = gl.allocate_shared_memory(gl.float32, [HEADS * ROWS], FLAT)
        last_at = gl.allocate_shared_memory(gl.float32, [HEADS], FLAT)
        stage_keys(keys_at, norm_at, load_keys(ring_k, start, committed, ring_len, K, ROWS), PIECE, NORM)
        chunk_tables(solve_at, faded_at, last_at, keys_at, norm_at, ring_g, ring_beta, start, committed, ring_len,
                     stride_rg_head, stride_rb_head, HEADS, ROWS, K)
    if COLUMNS_FIT:
        columns_at = stage_columns(k_at, q_at, K, TYPE, True)
    v = gl.arange(0, BLOCK_V, layout=IN_V)
    live = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, MMA)) < committed, 0)
    for t in range(begin, end):
        h = t // PER_HEAD
        col = t % PER_HEAD * BLOCK_V
        async_copy.wait_group(0)
        S = tile_pieces(smem.load(WHOLE), MMA)
        values = gl.where(live, v_smem.permute((1, 0)).load(MMA).to(gl.float32), 0.0)
        if NUM_TILES > 1:
            if t + 1 < end:
                fetch(smem, v_smem, state, ring_v, t + 1, start, committed, ring_len, stride_state_head, stride_rv_head,
                      K, V, BLOCK_V, ROWS, True, True, True)
        async_copy.commit_group()
        solve = solve_operands(solve_at, h, HEADS, ROWS)
        if KDA:
            S = kda_replay_chunks(S, values, fresh_at, left_at, last_at, solve, K)
        else:
            S = replay_chunks(S, values, keys_at, faded_at, last_at, solve, h, HEADS, BLOCK_V, ROWS, K)
        stored = ()
        for c in gl.static_range(len(S)):
            stored = stored + (S[c].to(TYPE),)
        store_pieces(state + h * stride_state_head + col * K, stored, K, CHUNK)
        through = row_of(through_at, h, PAD_HEADS, 1).load(IN_V)
        beta = row_of(beta_at, h, PAD_HEADS, 1).load(IN_V)
        v_now = row_of(v_at, t, NUM_TILES, BLOCK_V).load(IN_V)
        u_to = ring_u + h * stride_ru_head + new * V + col + v
        out_to = out + h * stride_out_head + col + v
        if COLUMNS_FIT:
            X = gl.zeros([BLOCK_V, COLUMNS], gl.float32, layout=MMA)
            for c in gl.static_range(len(S)):
                column = columns_at.slice(c * PIECE, PIECE, dim=1).permute((1, 0)).load(RIGHT)
                X = mma_v2(gl.convert_layout(stored[c], LEFT, assert_trivial=True), column, X)
            finish_columns(X * gl.expand_dims(through, 1), v_now, kq, beta, u_to, out_to)
        else:
            at_k, at_q = sums_of(stored, k_at, q_at, CHUNK, IN_V)
            finish_rows(at_k * through, at_q * through, v_now, kq, beta, u_to, out_to)
