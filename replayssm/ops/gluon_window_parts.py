"""Device functions that the window kernels of all families share on NVIDIA GPUs.

Rows of the ring and of the window are named by age: the window's last token has 0, the oldest committed row the most.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

# Triton 3.9's name, and 3.6's.
copy_to_shared = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@gluon.constexpr_function
def mma_layout(warps):
    """Accumulators [rows, columns]: 16 rows a warp."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def state_shared(element_bits):
    """Shared memory of a checkpoint's tile: the two rows that a quarter warp reads at once lie in different banks."""
    return gl.SwizzledSharedLayout(512 // element_bits, 1, 2, order=[1, 0])


@gluon.constexpr_function
def columns_shared(k_width):
    """Shared memory of [columns, K], read as an operand with `k_width` elements a thread."""
    return gl.SwizzledSharedLayout(k_width, 1, 8, order=[1, 0])


@gluon.constexpr_function
def rows_layout(block_v, warps):
    """[ring rows, V]: 16-byte accesses."""
    return gl.BlockedLayout([1, 8], [256 // block_v, block_v // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def tables_layout(rows, warps):
    """[heads, columns, ring rows]: four lanes along the rows."""
    return gl.BlockedLayout([1, 1, rows // 4], [1, 8, 4], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def heads_layout(warps):
    """[heads, ring rows]: an element a thread."""
    return gl.BlockedLayout([1, 1], [2, 16], [warps, 1], [1, 0])


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def nearest_tf32(x):
    """x with half a unit of tf32 added to its magnitude: the tensor cores cut the last 13 bits off."""
    return (x.to(gl.int32, bitcast=True) + 0x1000).to(gl.float32, bitcast=True)


@gluon.jit
def row_flushes(row, slot_indices, query_start_loc, cursors, num_slots, pad_slot_id, buffer_len):
    """Whether a row of the batch flushes in this step."""
    slot = gl.load(slot_indices + row).to(gl.int64)
    length = gl.load(query_start_loc + row + 1) - gl.load(query_start_loc + row)
    owned = (slot != pad_slot_id) & (slot >= 0) & (slot < num_slots)
    committed = gl.load(cursors + slot * 4 + 1, mask=owned, other=0)
    limit = gl.minimum(gl.load(cursors + slot * 4 + 2, mask=owned, other=0), buffer_len)
    return (committed > 0) & (committed + length > limit)


@gluon.jit
def settle_row(
    position, slot_indices, query_start_loc, cursors, num_rows, num_slots, pad_slot_id, buffer_len, PARTS: gl.constexpr
):
    """Row of the batch at a grid position: a flushing row of the last of PARTS trades places with one of the first.

    A flush takes longer than a read, so one at the end of the grid would leave the other multiprocessors idle.
    """
    span = num_rows // PARTS
    other = position
    if position < span:
        other = position + num_rows - span
    if position >= num_rows - span:
        other = position - num_rows + span
    if other != position:
        high, low = gl.maximum(position, other), gl.minimum(position, other)
        late = row_flushes(high, slot_indices, query_start_loc, cursors, num_slots, pad_slot_id, buffer_len)
        early = row_flushes(low, slot_indices, query_start_loc, cursors, num_slots, pad_slot_id, buffer_len)
        position = gl.where(late & (not early), other, position)
    return position


@gluon.jit
def ancestor_bits(parents_ptr, length, t, TREE: gl.constexpr, TOKENS: gl.constexpr):
    """Bit i of each token's mask: whether token i of the window is its ancestor, or itself."""
    if TREE:
        bits = 1 << t
        at = gl.load(parents_ptr + t, mask=t < length, other=-1)
        for back in gl.static_range(TOKENS):
            i = TOKENS - 1 - back
            hit = (at == i) & (t > i)
            bits = bits | (hit.to(gl.int32) << i)
            at = gl.where(hit, gl.load(parents_ptr + i, mask=i < length, other=-1), at)
    else:
        bits = (2 << t) - 1
    return bits


@gluon.jit
def sees(bits, age, length, count):
    """Which rows (by age: the youngest, the window's last token, has 0) each token reads; [tokens, rows]."""
    i = gl.expand_dims(length - 1 - age, 0)
    inside = ((gl.expand_dims(bits, 1) >> gl.maximum(i, 0)) & 1) == 1
    age = gl.expand_dims(age, 0)
    return ((age >= length) | inside) & (age >= 0) & (age < count)


@gluon.jit
def wrap(row, ring_len):
    """Physical row of start + j, j <= ring_len."""
    return gl.where(row >= ring_len, row - ring_len, row)


@gluon.jit
def row_ptrs(new_ptr, ring_ptr, age, length, count, start, token_stride, row_stride, ring_len):
    """Pointers to rows by age: the window's in the inputs, then the committed ones in the ring."""
    new = new_ptr + (length - 1 - age) * token_stride
    return gl.where(age < length, new, ring_ptr + wrap(start + count - 1 - age, ring_len) * row_stride)


@gluon.jit
def zero_rows(
    out_ptr, length, first_tile, out_token, out_head, BV: gl.constexpr, TILES: gl.constexpr, PER_HEAD: gl.constexpr
):
    """A padding row's outputs: zeros for TILES tiles from `first_tile` on; the pointer is that of their first head."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    v = gl.arange(0, BV, layout=L)
    zero = gl.zeros([BV], out_ptr.dtype.element_ty, layout=L)
    for i in range(length * TILES):
        at = first_tile % PER_HEAD + i % TILES
        gl.store(out_ptr + (i // TILES) * out_token + at // PER_HEAD * out_head + at % PER_HEAD * BV + v, zero)


@gluon.jit
def product(S, columns, acc, ACT: gl.constexpr):
    """acc + S columns on the tensor cores: 16-bit operands as they are, others in tf32, rounded to nearest."""
    if columns.dtype == ACT and S.dtype == ACT:
        acc = mma_v2(S, columns, acc)
    elif S.dtype == gl.float32:
        acc = mma_v2(nearest_tf32(S), columns.to(gl.float32), acc, input_precision="tf32")
    else:
        acc = mma_v2(S.to(gl.float32), columns.to(gl.float32), acc, input_precision="tf32")
    return acc


@gluon.jit
def fetch_tile(tile, state_ptr, N: gl.constexpr, BV: gl.constexpr):
    """Start copying a [BV, N] tile of the checkpoint to shared memory."""
    BITS: gl.constexpr = state_ptr.dtype.element_ty.primitive_bitwidth
    LANES: gl.constexpr = min(32, N * BITS // 128)
    L: gl.constexpr = gl.BlockedLayout([1, 128 // BITS], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, BV, layout=gl.SliceLayout(1, L))
    k = gl.arange(0, N, layout=gl.SliceLayout(0, L))
    copy_to_shared(tile, state_ptr + gl.expand_dims(rows * N, 1) + gl.expand_dims(k, 0))
