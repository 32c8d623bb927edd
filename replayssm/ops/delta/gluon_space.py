"""Shared memory for a flush: in the stages that a flushing program leaves unused, where it fits."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_common import view_as
from .gluon_read_codes import as_shape


@gluon.jit
def stage_part(
    smem, stage: gl.constexpr, at: gl.constexpr, words: gl.constexpr, STAGES: gl.constexpr, STAGE_WORDS: gl.constexpr
):
    """Part of a stage's shared memory as fp32 words."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    return view_as(smem, gl.float32, STAGES, STAGE_WORDS, FLAT).index(stage).slice(at, words)


@gluon.jit
def flush_space(
    smem, VALUE_TYPE: gl.constexpr, K: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_L: gl.constexpr,
    STAGES: gl.constexpr, KDA: gl.constexpr,
):
    """Where a flushing row keeps the keys, (KDA) decays and values of its ring rows.

    In the stages of `smem` that it leaves unused, if they fit: it has only the first in flight.
    """
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    STAGE_WORDS: gl.constexpr = BLOCK_V * K * smem.dtype.primitive_bitwidth // 32
    KEY_WORDS: gl.constexpr = BLOCK_L * K * (2 if KDA else 1)
    VALUE_WORDS: gl.constexpr = BLOCK_L * BLOCK_V
    BEHIND_KEYS: gl.constexpr = KEY_WORDS + VALUE_WORDS <= STAGE_WORDS
    KEYS_SHARE: gl.constexpr = STAGES >= 2 and KEY_WORDS <= STAGE_WORDS
    if KEYS_SHARE:
        keys_at = stage_part(smem, 1, 0, BLOCK_L * K, STAGES, STAGE_WORDS)
        gates_at = stage_part(smem, 1, KEY_WORDS - BLOCK_L * K, BLOCK_L * K, STAGES, STAGE_WORDS)
    else:
        keys_at = gl.allocate_shared_memory(gl.float32, [BLOCK_L * K], FLAT)
        gates_at = keys_at
        if KDA:
            gates_at = gl.allocate_shared_memory(gl.float32, [BLOCK_L * K], FLAT)
    if KEYS_SHARE and (STAGES >= 3 or BEHIND_KEYS):
        values_at = stage_part(smem, 1 if BEHIND_KEYS else 2, KEY_WORDS if BEHIND_KEYS else 0, VALUE_WORDS, STAGES,
                               STAGE_WORDS)
    else:
        values_at = gl.allocate_shared_memory(VALUE_TYPE, [VALUE_WORDS], FLAT)
    return keys_at, gates_at, values_at


@gluon.jit
def spare_words(smem, PART: gl.constexpr, PARTS: gl.constexpr, BLOCK_V: gl.constexpr, K: gl.constexpr,
                STAGES: gl.constexpr):
    """One of PARTS equal parts of the second stage, which a flush leaves unused, as fp32 words."""
    STAGE_WORDS: gl.constexpr = BLOCK_V * K * smem.dtype.primitive_bitwidth // 32
    return stage_part(smem, 1, PART * (STAGE_WORDS // PARTS), STAGE_WORDS // PARTS, STAGES, STAGE_WORDS)


@gluon.jit
def spare_table(
    smem, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, PART: gl.constexpr, BLOCK_V: gl.constexpr, K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Shared memory for a bf16 table of a flush in chunk form: in a half of the second stage, where it fits."""
    WORDS: gl.constexpr = BLOCK_V * K * smem.dtype.primitive_bitwidth // 64
    if STAGES >= 2 and SHAPE[0] * SHAPE[1] * SHAPE[2] // 2 <= WORDS:
        table_at = as_shape(spare_words(smem, PART, 2, BLOCK_V, K, STAGES), gl.bfloat16, SHAPE, LAYOUT)
    else:
        table_at = gl.allocate_shared_memory(gl.bfloat16, SHAPE, LAYOUT)
    return table_at


@gluon.jit
def late_space(ring_u, out, ROWS: gl.constexpr, LATE: gl.constexpr):
    """Where a program that reads keeps u and outputs of its ROWS V rows until its end (if LATE)."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    kept_u = gl.allocate_shared_memory(ring_u.dtype.element_ty, [ROWS], FLAT) if LATE else ring_u
    kept_out = gl.allocate_shared_memory(out.dtype.element_ty, [ROWS], FLAT) if LATE else out
    return kept_u, kept_out


@gluon.jit
def token_space(K: gl.constexpr, PAD_HEADS: gl.constexpr, BLOCK_L: gl.constexpr):
    """Where a program keeps k and q, the weights of the ring's rows through them, and the checkpoint's decay."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    k_at = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    q_at = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    seen_k_at = gl.allocate_shared_memory(gl.float32, [PAD_HEADS * BLOCK_L], FLAT)
    seen_q_at = gl.allocate_shared_memory(gl.float32, [PAD_HEADS * BLOCK_L], FLAT)
    through_at = gl.allocate_shared_memory(gl.float32, [PAD_HEADS], FLAT)
    return k_at, q_at, seen_k_at, seen_q_at, through_at
