"""What a flushing program of the window kernel computes once for all its tiles, in either form of a flush."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_window_flush import serial_tables, stage_flush
from replayssm.ops.delta.gluon_window_fold import allocate_parts
from replayssm.ops.delta.gluon_window_gdn_flush import gdn_inverse, stage_keys
from replayssm.ops.delta.gluon_window_kda_flush import kda_inverse, stage_decayed_keys
from replayssm.ops.gluon_chunk import num_parts


@gluon.jit
def prepare_fold(rows, rings, grown_at, flush, HEADS: gl.constexpr, KW: gl.constexpr, KDA: gl.constexpr):
    """The tables that `fold_tile` takes, filled if the row flushes.

    rows: staged raw keys and norms, and in registers keys, log decays and betas.
    """
    raw_at, norm_at, keys, own, beta = rows
    ring_k, ring_g, ring_beta, start, committed, ring_len, stride_rg_head, stride_rb_head = rings
    ROWS: gl.constexpr = raw_at.shape[0]
    K: gl.constexpr = raw_at.shape[1]
    PARTS: gl.constexpr = 3 if KDA else num_parts(raw_at.dtype)
    inverse_at = gl.allocate_shared_memory(
        gl.float32, [HEADS, ROWS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    )
    if KDA:
        if flush:
            kda_inverse(raw_at, norm_at, ring_g, start, committed, ring_len, beta, inverse_at, ROWS, K)
    keys_at = (raw_at,) if PARTS == 1 else allocate_parts(PARTS, ROWS, K)
    updates_at = allocate_parts(PARTS, ROWS, K)
    decayed_at = gl.allocate_shared_memory(gl.float32, [K if KDA else 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    if flush:
        if KDA:
            stage_decayed_keys(raw_at, norm_at, ring_g, start, committed, ring_len, keys_at, updates_at, decayed_at, KW)
        else:
            stage_keys(keys, keys_at, updates_at, KW)
            gdn_inverse(keys_at, norm_at, own, beta, grown_at, inverse_at, HEADS, ROWS, K)
    return keys_at, updates_at, inverse_at, decayed_at, norm_at, grown_at


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
