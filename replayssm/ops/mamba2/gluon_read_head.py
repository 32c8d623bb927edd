"""A program of the Mamba-2 read kernel that flushes: one head, whole, since nvfp4's scale is the head's."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_formats import global_scale, largest_finite
from replayssm.ops.mamba2.gluon_names import barrier
from replayssm.ops.mamba2.gluon_parts import load_timestep
from replayssm.ops.mamba2.gluon_read_flush import (
    band_layout,
    keep_band,
    kept_band,
    load_bands,
    replay_rows,
    stage_rows,
    widen,
    write_fp8,
    write_nvfp4,
    write_plain,
    write_rounded,
)
from replayssm.ops.mamba2.gluon_read_rows import gated
from replayssm.ops.mamba2.gluon_read_state import block_of, row_bytes


@gluon.jit
def flush_head(
    row, h, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, state_ptr,
    ring_x_ptr, ring_B_ptr, ring_dt_ptr, cursors_ptr, slot_indices_ptr, out_ptr,
    state_scales_ptr, codes_ptr, scales_ptr, global_ptr,
    x_token, x_head, dt_token, B_token, B_group, C_token, C_group, z_token, z_head, out_token, out_head,
    state_slot, state_head, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head,
    state_scales_slot, codes_slot, scales_slot, global_slot,
    H: gl.constexpr, G: gl.constexpr, P: gl.constexpr, N: gl.constexpr, R: gl.constexpr, ROWS: gl.constexpr,
    READ: gl.constexpr, CHECKPOINT: gl.constexpr,
    HAS_D: gl.constexpr, HAS_Z: gl.constexpr, HAS_BIAS: gl.constexpr, SOFTPLUS: gl.constexpr,
):  # fmt: skip
    """Replay a head's ring into its checkpoint, renew its read copy, and compute its output from that."""
    HEIGHT: gl.constexpr = 4 * gl.num_warps()
    BANDS: gl.constexpr = P // HEIGHT
    BITS: gl.constexpr = max(state_ptr.dtype.element_ty.primitive_bitwidth, 16)
    L: gl.constexpr = band_layout(BITS, gl.num_warps())
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    base = gl.load(slot_indices_ptr + row).to(gl.int64)
    g = h // (H // G)
    state_ptr += base * state_slot + h * state_head
    state_scales_ptr += base * state_scales_slot + h * P
    loaded = load_bands(state_ptr, BANDS, N, L)
    start = gl.load(cursors_ptr + base * 4)
    committed = gl.load(cursors_ptr + base * 4 + 1)
    A = gl.load(A_ptr + h)
    staged_B = gl.allocate_shared_memory(gl.float32, [ROWS, N], LINE)
    staged_x = gl.allocate_shared_memory(gl.float32, [ROWS, 1 << (P - 1).bit_length()], LINE)
    staged_a = gl.allocate_shared_memory(gl.float32, [ROWS, 1], LINE)
    bands = ()
    for i in gl.static_range(BANDS):
        bands = bands + (widen(loaded[i], state_scales_ptr, i * HEIGHT, CHECKPOINT),)
    for first in range(0, committed, ROWS):
        barrier()
        stage_rows(
            staged_B, staged_x, staged_a, first, start, committed, A, ring_x_ptr + base * ring_x_slot + h * ring_x_head,
            ring_B_ptr + base * ring_B_slot + g * ring_B_group, ring_dt_ptr + base * ring_dt_slot + h * ring_dt_head,
            P, N, R,
        )  # fmt: skip
        barrier()
        bands = replay_rows(bands, staged_B, staged_x, staged_a, gl.minimum(committed - first, ROWS))
    # From here on in a loop over shared memory: all bands at once would need more registers than there are.
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    kept = gl.allocate_shared_memory(gl.float32, [BANDS, HEIGHT * N // 32, 32], SWIZZLED)
    largest = gl.to_tensor(0)
    if CHECKPOINT == "fp8":
        for i in gl.static_range(BANDS):
            keep_band(kept.index(i), bands[i])
        for i in range(BANDS):
            S = write_fp8(kept_band(kept.index(i), HEIGHT, N), state_ptr, state_scales_ptr, i * HEIGHT, N)
            if READ == "nvfp4":
                largest = gl.maximum(largest, gl.max(largest_finite(S), 0))
            keep_band(kept.index(i), S)
    else:
        for i in gl.static_range(BANDS):
            keep_band(kept.index(i), write_plain(bands[i], state_ptr, i * HEIGHT, N))
        if READ == "nvfp4":
            bits = largest_finite(kept_band(kept.index(0), HEIGHT, N))
            for i in range(1, BANDS):
                bits = gl.maximum(bits, largest_finite(kept_band(kept.index(i), HEIGHT, N)))
            largest = gl.max(bits, 0)
    scale, inverse = 1.0, 1.0
    if READ == "nvfp4":
        scale, inverse = global_scale(largest)
        gl.store(global_ptr + base * global_slot + h, scale)
    codes_ptr += base * codes_slot + h * (P * row_bytes(READ, N))
    scales_ptr += base * scales_slot + h * (P * (N // block_of(READ) if block_of(READ) > 0 else 1))
    dt = load_timestep(dt_ptr + row * dt_token, dt_bias_ptr, h, HAS_BIAS, SOFTPLUS)
    decay = gl.exp(A * dt)
    D = gl.load(D_ptr + h).to(gl.float32) if HAS_D else A * 0.0
    x_ptr += row * x_token + h * x_head
    z_ptr += row * z_token + h * z_head
    out_ptr += row * out_token + h * out_head
    B_ptr += row * B_token + g * B_group
    C_ptr += row * C_token + g * C_group
    LS: gl.constexpr = kept_band(kept.index(0), HEIGHT, N).type.layout
    k = gl.arange(0, N, layout=gl.SliceLayout(0, LS))
    C = gl.load(C_ptr + k).to(gl.float32)
    skip = dt * gl.sum(gl.load(B_ptr + k).to(gl.float32) * C, 0) + D
    doubts = gl.zeros([HEIGHT], gl.int32, layout=gl.SliceLayout(1, LS))
    for i in range(BANDS):
        S = kept_band(kept.index(i), HEIGHT, N)
        if READ == "nvfp4":
            y, doubtful = write_nvfp4(S, C, codes_ptr, scales_ptr, i * HEIGHT, scale, inverse, N, False)
            doubts = doubts | gl.convert_layout(gl.max(doubtful, 1), gl.SliceLayout(1, LS), assert_trivial=True)
        else:
            values = write_rounded(S, codes_ptr, scales_ptr, i * HEIGHT, N, READ)
            y = gl.sum(gl.convert_layout(values, LS, assert_trivial=True) * gl.expand_dims(C, 0), 1)
        finish_band(y, decay, skip, x_ptr, z_ptr, out_ptr, i * HEIGHT, HAS_Z)
    if READ == "nvfp4":
        # One head in a hundred: again, with sums that round exactly as the format says.
        if gl.max(doubts, 0) > 0:
            for i in range(BANDS):
                S = kept_band(kept.index(i), HEIGHT, N)
                y, _ = write_nvfp4(S, C, codes_ptr, scales_ptr, i * HEIGHT, scale, inverse, N, True)
                finish_band(y, decay, skip, x_ptr, z_ptr, out_ptr, i * HEIGHT, HAS_Z)


@gluon.jit
def finish_band(y, decay, skip, x_ptr, z_ptr, out_ptr, first_v, HAS_Z: gl.constexpr):
    """Outputs of a band, from the new read copy times C."""
    v = first_v + gl.arange(0, y.shape[0], layout=y.type.layout)
    y = decay * y + skip * gl.load(x_ptr + v).to(gl.float32)
    if HAS_Z:
        y = gated(y, gl.load(z_ptr + v))
    gl.store(out_ptr + v, y.to(out_ptr.dtype.element_ty))
