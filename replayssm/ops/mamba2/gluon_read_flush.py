"""What a flush in the Mamba-2 kernels with read copies is made of; a band is 4 V-rows a warp of a head."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_encode import encode_numbers_int8, from_e4m3
from replayssm.ops.gluon_encode_rows import encode_rows
from replayssm.ops.gluon_formats import encode_nvfp4_numbers
from replayssm.ops.gluon_window_parts import wrap
from replayssm.ops.mamba2.gluon_names import view


@gluon.constexpr_function
def band_layout(element_bits, warps):
    """[V-rows, K] of a band: a V-row a thread, 16-byte vectors and 8 lanes along K."""
    return gl.BlockedLayout([1, 128 // element_bits], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def vectors_layout(width, element_bits, warps):
    """[V-rows, width]: 16-byte accesses, as far as a row goes."""
    vector = min(128 // element_bits, width)
    lanes = min(width // vector, 32)
    return gl.BlockedLayout([1, vector], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def line_of(element_bits):
    """Elements of a line of shared memory in which bands are kept."""
    return 1024 // max(element_bits, 16)


@gluon.constexpr_function
def blocks_layout(line, warps):
    """[lines, line]: 16 neighbours along K a thread, so that a block of nvfp4 is one thread's."""
    return gl.BlockedLayout([1, 16], [512 // line, line // 16], [warps, 1], [1, 0])


@gluon.constexpr_function
def kept_shared(element_bits):
    """Shared memory of kept bands [lines, line]: blocks and vectors without bank conflicts."""
    return gl.SwizzledSharedLayout(128 // element_bits, 1, 8, [1, 0])


@gluon.jit
def put(ptr, tile):
    """Write a tile to contiguous memory, as its threads hold it."""
    L: gl.constexpr = tile.type.layout
    WIDTH: gl.constexpr = tile.shape[1]
    v = gl.expand_dims(gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, L)) * WIDTH, 1)
    gl.store(ptr + v + gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L)), 0), tile)


@gluon.jit
def keep_band(kept, S):
    """Put a band into shared memory [lines, line], from where `kept_band` reads it in another layout."""
    gl.static_assert(S.shape[1] % kept.shape[1] == 0)
    kept.store(gl.reshape(S, kept.shape))


@gluon.jit
def keep_part(kept, S, number: gl.constexpr):
    """`keep_band` of a band that may be lower than those of `kept` [bands, lines, line]."""
    LINES: gl.constexpr = S.shape[0] * S.shape[1] // kept.shape[2]
    EACH: gl.constexpr = kept.shape[1] // LINES
    keep_band(kept.index(number // EACH).slice(number % EACH * LINES, LINES), S)


@gluon.jit
def kept_band(kept, HEIGHT: gl.constexpr, N: gl.constexpr):
    """A band from shared memory, blocks of 16 in a thread."""
    return gl.reshape(kept.load(blocks_layout(kept.shape[1], gl.num_warps())), [HEIGHT, N])


@gluon.jit
def stage_rows(
    staged_B, staged_x, staged_a, first, start, committed, A, ring_x_ptr, ring_B_ptr, ring_dt_ptr,
    P: gl.constexpr, N: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """Put B, dt x and exp(dt A) of the rows `first` and on into shared memory, in float32."""
    ROWS: gl.constexpr = staged_x.shape[0]
    WIDTH: gl.constexpr = staged_x.shape[1]
    LX: gl.constexpr = vectors_layout(WIDTH, 16, gl.num_warps())
    LB: gl.constexpr = vectors_layout(N, 16, gl.num_warps())
    r = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LX))
    v = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LX)), 0)
    r_B = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LB))
    k = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, LB)), 0)
    dt = gl.load(ring_dt_ptr + wrap(r + start, R), mask=r < committed, other=0.0)
    x_ptrs = ring_x_ptr + gl.expand_dims(wrap(r + start, R) * P, 1) + v
    x = gl.load(x_ptrs, mask=gl.expand_dims(r < committed, 1) & (v < P), other=0.0).to(gl.float32)
    B_ptrs = ring_B_ptr + gl.expand_dims(wrap(r_B + start, R) * N, 1) + k
    B = gl.load(B_ptrs, mask=gl.expand_dims(r_B < committed, 1), other=0.0).to(gl.float32)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    view(staged_x, [ROWS, WIDTH], PLAIN).store(gl.expand_dims(dt, 1) * x)
    view(staged_B, [ROWS, N], PLAIN).store(B)
    view(staged_a, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])).store(gl.exp(dt * A))


@gluon.jit
def replay_rows(bands, staged_B, staged_x, staged_a, count):
    """Run the recurrence over staged rows; the operations are those of `triton_math.update`."""
    L: gl.constexpr = bands[0].type.layout
    HEIGHT: gl.constexpr = bands[0].shape[0]
    for j in range(count):
        B = gl.expand_dims(staged_B.index(j).load(gl.SliceLayout(0, L)), 0)
        a = gl.expand_dims(staged_a.index(j).load(gl.SliceLayout(1, L)), 1)
        new = ()
        for i in gl.static_range(len(bands)):
            x = staged_x.index(j).slice(i * HEIGHT, HEIGHT).load(gl.SliceLayout(1, L))
            new = new + (gl.fma(bands[i], a, gl.expand_dims(x, 1) * B),)
        bands = new
    return bands


@gluon.jit
def load_bands(state_ptr, COUNT: gl.constexpr, HEIGHT: gl.constexpr, N: gl.constexpr, L: gl.constexpr):
    """A head's checkpoint as a tuple of bands of V-rows, fp8 as bytes."""
    v = gl.expand_dims(gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, L)) * N, 1)
    k = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, L)), 0)
    bands = ()
    for i in gl.static_range(COUNT):
        bands = bands + (gl.load(state_ptr + i * HEIGHT * N + v + k, volatile=True),)
    return bands


@gluon.jit
def widen_codes(band):
    """A band of the checkpoint in fp32, still to be multiplied by its rows' scales if it is fp8."""
    if band.dtype == gl.uint8:
        return from_e4m3(band, True)
    else:
        return band.to(gl.float32)


@gluon.jit
def load_row_scales(state_scales_ptr, first_v, HEIGHT: gl.constexpr, L: gl.constexpr, CHECKPOINT: gl.constexpr):
    """What multiplies a band's `widen_codes`, [HEIGHT, 1] for bands in layout L: fp8's scales, or 1."""
    if CHECKPOINT == "fp8":
        v = first_v + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, L))
        return gl.expand_dims(gl.load(state_scales_ptr + v, volatile=True), 1)
    else:
        return 1.0


@gluon.jit
def widen(band, state_scales_ptr, first_v, CHECKPOINT: gl.constexpr):
    """A band of the checkpoint in fp32."""
    HEIGHT: gl.constexpr = band.shape[0]
    L: gl.constexpr = band.type.layout
    return widen_codes(band) * load_row_scales(state_scales_ptr, first_v, HEIGHT, L, CHECKPOINT)


@gluon.jit
def write_plain(S, state_ptr, first_v, N: gl.constexpr):
    """Round a band to the checkpoint's dtype and write; returns what the memory now holds."""
    L: gl.constexpr = S.type.layout
    stored = S.to(state_ptr.dtype.element_ty)
    v = gl.expand_dims((first_v + gl.arange(0, S.shape[0], layout=gl.SliceLayout(1, L))) * N, 1)
    gl.store(state_ptr + v + gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, L)), 0), stored)
    return stored


@gluon.jit
def blocks_times(numbers, C, scales, L: gl.constexpr):
    """Rows of codes [V, blocks, block] times C [K], each block's sum times its scale: [V] of a band in layout L."""
    C = gl.reshape(C, [numbers.shape[1], numbers.shape[2]])
    C = gl.convert_layout(C, gl.SliceLayout(0, numbers.type.layout), assert_trivial=True)
    y = gl.sum(gl.sum(numbers * gl.expand_dims(C, 0), 2) * scales, 1)
    return gl.convert_layout(y, gl.SliceLayout(1, L), assert_trivial=True)


@gluon.jit
def write_nvfp4(S, C, codes_ptr, scales_ptr, first_v, scale, inverse, N: gl.constexpr, EXACT: gl.constexpr):
    """Round a band to nvfp4 and write; returns what a read gives times C, and where `EXACT` might round otherwise."""
    codes, scales, numbers, read, doubtful = encode_nvfp4_numbers(S, scale, inverse, EXACT, True)
    put(codes_ptr + first_v * (N // 2), codes)
    put(scales_ptr + first_v * (N // 16), scales)
    L: gl.constexpr = S.type.layout
    y = blocks_times(numbers, C, read, L)
    return y, doubtful.to(gl.int32)


@gluon.jit
def write_rounded(S, C, codes_ptr, scales_ptr, first_v, N: gl.constexpr, READ: gl.constexpr, EXACT: gl.constexpr):
    """`write_nvfp4` for formats without a head's scale."""
    L: gl.constexpr = S.type.layout
    doubtful = gl.zeros([S.shape[0]], gl.int32, layout=gl.SliceLayout(1, L))
    if READ == "int8":
        codes, scales, numbers = encode_numbers_int8(S)
        put(codes_ptr + first_v * N, codes)
        put(scales_ptr + first_v * (N // 32), scales)
        y = blocks_times(numbers, C, scales.to(gl.float32), L)
    elif READ == "fp8":
        codes, factor, values, doubts = encode_rows(S, EXACT)
        put(codes_ptr + first_v * N, codes)
        gl.store(scales_ptr + first_v + gl.arange(0, S.shape[0], layout=factor.type.layout), factor)
        doubtful = doubts.to(gl.int32)
        y = gl.sum(gl.convert_layout(values, L, assert_trivial=True) * gl.expand_dims(C, 0), 1) * factor
    elif READ == "bf16":
        codes = S.to(gl.bfloat16)
        put(codes_ptr + first_v * N, codes)
        y = gl.sum(codes.to(gl.float32) * gl.expand_dims(C, 0), 1)
    else:
        y = gl.sum(S * gl.expand_dims(C, 0), 1)
    return y, doubtful


@gluon.jit
def rows_to_flush(first, batch, slot_indices_ptr, cursors_ptr, num_slots, buffer_len, pad_slot_id, COUNT: gl.constexpr):
    """Bit i: row first + i of the batch flushes in this step."""
    i = gl.arange(0, COUNT, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    slot = gl.load(slot_indices_ptr + first + i, mask=first + i < batch, other=-1)
    valid = (slot != pad_slot_id) & (slot >= 0) & (slot < num_slots)
    cursor = cursors_ptr + slot.to(gl.int64) * 4
    committed = gl.load(cursor + 1, mask=valid, other=0)
    limit = gl.load(cursor + 2, mask=valid, other=0)
    return gl.sum(gl.where((committed > 0) & (committed + 1 > gl.minimum(limit, buffer_len)), 1 << i, 0), 0)
