"""What a flushing program of the window kernel computes once for all its tiles, in either form of a flush."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_read_codes import as_shape
from replayssm.ops.delta.gluon_window_flush import serial_tables, stage_flush
from replayssm.ops.delta.gluon_window_fold import allocate_parts
from replayssm.ops.delta.gluon_window_gdn_flush import gdn_inverse, stage_keys, stage_updates
from replayssm.ops.delta.gluon_window_kda_flush import kda_inverse, stage_decayed_keys
from replayssm.ops.gluon_chunk import num_parts


@gluon.jit
def prepare_fold(rows, grown_at, flush, HEADS: gl.constexpr, KW: gl.constexpr):
    """The tables that `fold_tile` takes, filled if the row flushes.

    rows: staged raw keys and norms, and in registers keys, log decays and betas.
    """
    raw_at, norm_at, keys, own, beta = rows
    ROWS: gl.constexpr = raw_at.shape[0]
    K: gl.constexpr = raw_at.shape[1]
    PARTS: gl.constexpr = num_parts(raw_at.dtype)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    inverse_at = gl.allocate_shared_memory(gl.float32, [HEADS, ROWS, ROWS], PLAIN)
    keys_at = (raw_at,) if PARTS == 1 else allocate_parts(PARTS, ROWS, K)
    if flush:
        stage_keys(keys, keys_at, KW)
        gdn_inverse(keys_at, norm_at, own, beta, grown_at, inverse_at, HEADS, ROWS, K)
    # Where the inverse had its tables.
    updates_at = allocate_parts(PARTS, ROWS, K)
    if flush:
        stage_updates(keys, updates_at, KW)
    return keys_at, updates_at, inverse_at, norm_at, grown_at


@gluon.jit
def prepare_channel_fold(space, beta, flush, committed, ROWS: gl.constexpr, K: gl.constexpr, KW: gl.constexpr):
    """The tables that `fold_chunks` takes, filled if the row flushes; `channel_space` is used up."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    inverse_at = gl.allocate_shared_memory(gl.float32, [1, ROWS, ROWS], PLAIN)
    through_at = gl.allocate_shared_memory(gl.float32, [K], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    # Operands of both products without bank conflicts.
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 8 // KW, KW, order=[1, 0])
    operands_at = as_shape(space, gl.bfloat16, [6 * K // (8 * KW), ROWS, 8 * KW], SHARED)
    if flush:
        kda_inverse(space, beta, inverse_at, committed, ROWS, K)
        stage_decayed_keys(space, operands_at, through_at, ROWS, K, KW)
    return operands_at, inverse_at, through_at


@gluon.jit
def prepare_replay(
    rings, flush,
    HEADS: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr, KDA: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """The tables that `replay_tile` takes, filled if the row flushes."""
    ring_k, ring_g, ring_beta, start, committed, ring_len, stride_rg_head, stride_rb_head = rings
    tables = serial_tables(HEADS, K, ROWS, KDA)
    if flush:
        stage_flush(
            tables, ring_k, ring_g, ring_beta, start, committed, ring_len, stride_rg_head, stride_rb_head, HEADS, K,
            ROWS, KDA, NORM,
        )  # fmt: skip
    return tables
