"""What the tiles of a Mamba-2 window program share, from what it has loaded: tables in shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from replayssm.ops.gluon_chunk import num_parts
from replayssm.ops.gluon_window_parts import columns_shared, mma_layout
from replayssm.ops.mamba2.gluon_chunk_replay import stage_chunk
from replayssm.ops.mamba2.gluon_names import view
from replayssm.ops.mamba2.gluon_window_flush import stage_rows
from replayssm.ops.mamba2.gluon_window_weights import fill_tables_of


@gluon.jit
def stage_replay(flush, B, dt, dt_after, A, BLOCKS: gl.constexpr, HW: gl.constexpr, CHUNKED: gl.constexpr):
    """What a flush takes of its rows, in shared memory (filled if the row flushes): B, dt or weights, decays.

    B, dt and dt_after are those of `load_replayed`, A is [heads, 1].
    """
    ROWS: gl.constexpr = B.shape[0]
    N: gl.constexpr = B.shape[1]
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if CHUNKED:
        staged_B = gl.allocate_shared_memory(gl.bfloat16, [num_parts(B.dtype), N, ROWS], PLAIN)
        staged_a = gl.allocate_shared_memory(gl.float32, [BLOCKS, HW], FLAT)
    else:
        staged_B = gl.allocate_shared_memory(gl.float32, [ROWS, N], FLAT)
        staged_a = gl.allocate_shared_memory(gl.float32, [BLOCKS * ROWS, HW], FLAT)
    staged_dt = gl.allocate_shared_memory(gl.float32, [BLOCKS, ROWS, HW], PLAIN)
    if flush:
        if CHUNKED:
            stage_chunk(staged_B, staged_dt, staged_a, B, dt, dt_after, A)
        else:
            stage_rows(staged_B, staged_dt, staged_a, B, dt, A)
    return staged_B, staged_dt, staged_a


@gluon.jit
def weigh_rows(B, C, dt, A, D, bits, length, count, STATE_BITS: gl.constexpr):
    """C [tokens, K], and the tables of `fill_tables_of`, in shared memory.

    B: [rows by age, K]; dt: of each row and, below it, of the row after it, [2 heads, rows].
    """
    ROWS: gl.constexpr = B.shape[0]
    N: gl.constexpr = B.shape[1]
    TOKENS: gl.constexpr = C.shape[0]
    HEADS: gl.constexpr = A.shape[0]
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    OPERAND: gl.constexpr = columns_shared(128 // STATE_BITS)
    SCORE: gl.constexpr = mma_layout(gl.num_warps())
    LB: gl.constexpr = gl.DotOperandLayout(0, SCORE, 128 // STATE_BITS)
    LC: gl.constexpr = gl.DotOperandLayout(1, SCORE, 128 // STATE_BITS)
    score_at = gl.allocate_shared_memory(gl.float32, [ROWS, TOKENS], PLAIN)
    weight_at = gl.allocate_shared_memory(gl.float32, [HEADS, TOKENS, ROWS], PLAIN)
    scale_at = gl.allocate_shared_memory(gl.float32, [HEADS, TOKENS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    dt_at = gl.allocate_shared_memory(gl.float32, [2, HEADS, ROWS], PLAIN)
    B_at = gl.allocate_shared_memory(B.dtype, [ROWS, N], OPERAND)
    C_at = gl.allocate_shared_memory(C.dtype, [TOKENS, N], OPERAND)
    B_at.store(B)
    C_at.store(C)
    view(dt_at, [2 * HEADS, ROWS], PLAIN).store(dt)
    # Scores of all rows and tokens, once for all heads of the group.
    score = mma_v2(B_at.load(LB), C_at.permute((1, 0)).load(LC), gl.zeros([ROWS, TOKENS], gl.float32, layout=SCORE))
    score_at.store(score)
    fill_tables_of(weight_at, scale_at, score_at, dt_at, A, D, bits, length, count, HEADS, ROWS, TOKENS)
    return C_at, weight_at, scale_at
