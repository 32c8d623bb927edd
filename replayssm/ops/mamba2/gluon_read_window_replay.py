"""The replay of a head in the Mamba-2 window step with a read copy: from a checkpoint in shared memory, and back there.

Bands are laid out for the encoder from the start: a thread has 16 neighbours along K, and B is staged in the order that
suits it.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_chunk import num_parts, rows_shared
from replayssm.ops.gluon_window_parts import wrap
from replayssm.ops.mamba2.gluon_names import barrier, view
from replayssm.ops.mamba2.gluon_read_chunk import (
    PIECE,
    chunk_band_layout,
    first_of,
    pieces_of,
    replay_band,
    span_at,
    spans_of,
    stage_chunk,
    stage_memory,
)
from replayssm.ops.mamba2.gluon_read_flush import keep_band, kept_band, vectors_layout


@gluon.jit
def load_span(
    first, start, committed, ring_x_ptr, ring_dt_ptr,
    BEGIN: gl.constexpr, WIDTH: gl.constexpr, P: gl.constexpr, R: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """x [ROWS, WIDTH] from V-row BEGIN on, and dt, of committed rows from number `first` on; zeros past the last."""
    L: gl.constexpr = vectors_layout(WIDTH, 16, gl.num_warps())
    r = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    v = BEGIN + gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L)), 0)
    at = wrap(r + start, R)
    dt = gl.load(ring_dt_ptr + at, mask=r < committed, other=0.0)
    x = gl.load(ring_x_ptr + (gl.expand_dims(at * P, 1) + v), mask=gl.expand_dims(r < committed, 1), other=0.0)
    return x, dt


@gluon.jit
def load_rows(first, start, committed, ring_x_ptr, ring_dt_ptr, P: gl.constexpr, R: gl.constexpr, ROWS: gl.constexpr):
    """`load_span` of all spans, as tuples."""
    xs, dts = (), ()
    for i in gl.static_range(len(spans_of(P))):
        x, dt = load_span(first, start, committed, ring_x_ptr, ring_dt_ptr, first_of(P, i), spans_of(P)[i], P, R, ROWS)
        xs, dts = xs + (x,), dts + (dt,)
    return xs, dts


@gluon.jit
def allocate_x(P: gl.constexpr, ROWS: gl.constexpr):
    """Shared memory for x, span by span."""
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    staged_x = ()
    for i in gl.static_range(len(spans_of(P))):
        staged_x = staged_x + (gl.allocate_shared_memory(gl.float32, [ROWS, spans_of(P)[i]], LINE),)
    return staged_x


@gluon.jit
def stage_rows(staged_x, staged_a, xs, dts, A):
    """Put dt x and exp(dt A) into shared memory [rows, ...], in float32."""
    for i in gl.static_range(len(xs)):
        to = view(staged_x[i], xs[i].shape, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        to.store(gl.expand_dims(dts[i], 1) * xs[i].to(gl.float32))
    ROWS: gl.constexpr = staged_a.shape[0]
    view(staged_a, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])).store(gl.exp(dts[0] * A))


@gluon.jit
def stage_B(staged_B, first, start, committed, ring_B_ptr, N: gl.constexpr, R: gl.constexpr):
    """Put B of the rows from `first` on into shared memory in float32: first the first 4 of every 16 elements."""
    ROWS: gl.constexpr = staged_B.shape[0]
    L: gl.constexpr = vectors_layout(N, 16, gl.num_warps())
    r = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    k = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, L)), 0)
    B_ptrs = ring_B_ptr + (gl.expand_dims(wrap(r + start, R) * N, 1) + k)
    B = gl.load(B_ptrs, mask=gl.expand_dims(r < committed, 1), other=0.0).to(gl.float32)
    B = gl.reshape(gl.permute(gl.reshape(B, [ROWS, N // 16, 4, 4]), (0, 2, 1, 3)), [ROWS, N])
    view(staged_B, [ROWS, N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(B)


@gluon.jit
def staged_row(row, L: gl.constexpr, N: gl.constexpr):
    """A row that `stage_B` has staged, for bands in layout L."""
    QUARTERS: gl.constexpr = gl.BlockedLayout([1, 4], [512 // N, N // 16], [gl.num_warps(), 1], [1, 0])
    B = gl.reshape(row.load(gl.SliceLayout(0, QUARTERS)), [4, N // 16, 4])
    return gl.convert_layout(gl.reshape(gl.permute(B, (1, 0, 2)), [N]), gl.SliceLayout(0, L), assert_trivial=True)


@gluon.jit
def replay_rows(bands, staged_B, staged_x, staged_a, count):
    """Run the recurrence over staged rows; the operations are those of `triton_math.update`."""
    L: gl.constexpr = bands[0].type.layout
    HEIGHT: gl.constexpr = bands[0].shape[0]
    P: gl.constexpr = len(bands) * HEIGHT
    for j in range(count):
        B = gl.expand_dims(staged_row(staged_B.index(j), L, bands[0].shape[1]), 0)
        a = gl.expand_dims(staged_a.index(j).load(gl.SliceLayout(1, L)), 1)
        new = ()
        for i in gl.static_range(len(bands)):
            x = staged_x[span_at(P, i * HEIGHT)[0]].index(j).slice(span_at(P, i * HEIGHT)[1], HEIGHT)
            x = x.load(gl.SliceLayout(1, L))
            new = new + (gl.fma(bands[i], a, gl.expand_dims(x, 1) * B),)
        bands = new
    return bands


@gluon.jit
def replay_serially(
    kept, staged_B, staged_x, staged_a, x, dt, A, start, committed, renew_B, ring_x_ptr, ring_B_ptr, ring_dt_ptr,
    P: gl.constexpr, N: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """Replay a head's committed rows, whose first ones have x and dt, into its checkpoint in shared memory."""
    ROWS: gl.constexpr = staged_B.shape[0]
    HEIGHT: gl.constexpr = kept.shape[1] * kept.shape[2] // N
    BANDS: gl.constexpr = kept.shape[0]
    bands = ()
    for i in gl.static_range(BANDS):
        bands = bands + (kept_band(kept.index(i), HEIGHT, N).to(gl.float32),)
    for first in tl.range(0, committed, ROWS, disable_licm=True):
        if first > 0:
            x, dt = load_rows(first, start, committed, ring_x_ptr, ring_dt_ptr, P, R, ROWS)
        barrier()
        if renew_B | (committed > ROWS):
            stage_B(staged_B, first, start, committed, ring_B_ptr, N, R)
        stage_rows(staged_x, staged_a, x, dt, A)
        barrier()
        bands = replay_rows(bands, staged_B, staged_x, staged_a, gl.minimum(committed - first, ROWS))
    for i in gl.static_range(BANDS):
        keep_band(kept.index(i), bands[i].to(kept.dtype))


@gluon.jit
def replay_by_chunks(
    kept, start, committed, A, ring_x_ptr, ring_B_ptr, ring_dt_ptr, P: gl.constexpr, N: gl.constexpr, R: gl.constexpr
):
    """Replay a head's committed rows into its checkpoint in shared memory, all at once on the tensor cores."""
    PARTS: gl.constexpr = num_parts(ring_B_ptr.dtype.element_ty)
    BANDS: gl.constexpr = kept.shape[0]
    L: gl.constexpr = chunk_band_layout(N, gl.num_warps())
    LL: gl.constexpr = gl.reshape(gl.zeros([16, N], gl.float32, layout=L), [kept.shape[1], kept.shape[2]]).type.layout
    staged_U = stage_memory(P, R)
    staged_B = gl.allocate_shared_memory(gl.bfloat16, [pieces_of(R) * PARTS, PIECE, N], rows_shared())
    decay = stage_chunk(staged_U, staged_B, start, committed, A, ring_x_ptr, ring_B_ptr, ring_dt_ptr, P, N, R)
    for i in gl.static_range(BANDS):
        S = gl.reshape(kept.index(i).load(LL), [16, N]).to(gl.float32)
        S = gl.convert_layout(S, L, assert_trivial=True)
        S = replay_band(S, decay, i * 16, staged_U, staged_B, committed, P, R, PARTS)
        keep_band(kept.index(i), S.to(kept.dtype))
    barrier()
