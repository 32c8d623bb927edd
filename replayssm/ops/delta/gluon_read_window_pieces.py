"""Pieces of 32 columns in shared memory, for flushes in chunk form: of what they multiply by, and of a whole head."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from replayssm.ops.delta.gluon_chunk_gdn import chunk_tables, load_keys, solve_operands, stage_keys
from replayssm.ops.delta.gluon_common import row_of
from replayssm.ops.delta.gluon_read_codes import as_shape
from replayssm.ops.delta.gluon_read_renew import block_layout, most
from replayssm.ops.gluon_chunk import PIECE, in_chunk_order, num_parts, parts_of, rows_shared
from replayssm.ops.gluon_encode import larger
from replayssm.ops.gluon_formats import largest_finite
from replayssm.ops.gluon_window_parts import copy_to_shared, mma_layout


@gluon.constexpr_function
def pieces_shared(rank):
    """Shared memory of pieces [.., rows, 32] of 16 bits: operands of both products without bank conflicts."""
    return gl.SwizzledSharedLayout(8, 2, 4, order=list(range(rank))[::-1])


@gluon.jit
def stage_pieces(pieces_at, x):
    """Put the parts of x [rows, K] into shared memory [parts * K / 32, rows, 32], in chunk order."""
    parts = parts_of(x)
    COUNT: gl.constexpr = x.shape[1] // PIECE
    SHAPE: gl.constexpr = [pieces_at.shape[0], pieces_at.shape[1], pieces_at.shape[2]]
    whole_at = as_shape(pieces_at, gl.bfloat16, SHAPE, pieces_shared(3))
    for p in gl.static_range(len(parts)):
        turned = gl.permute(gl.reshape(in_chunk_order(parts[p], PIECE), [x.shape[0], COUNT, PIECE]), (1, 0, 2))
        whole_at.slice(p * COUNT, COUNT).store(turned)


@gluon.jit
def piece_operands(pieces_at, c, PARTS: gl.constexpr, COUNT: gl.constexpr, TURNED: gl.constexpr, MMA: gl.constexpr):
    """The parts of staged piece c as right operands: [rows, 32], or (TURNED) [32, rows]."""
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    parts = ()
    for p in gl.static_range(PARTS):
        part_at = pieces_at.index(p * COUNT + c)
        if TURNED:
            parts = parts + (part_at.permute((1, 0)).load(RIGHT),)
        else:
            parts = parts + (part_at.load(RIGHT),)
    return parts


@gluon.jit
def stage_flush(
    ring_k, ring_g, ring_beta, start, count, ring_len, stride_rg_head, stride_rb_head, K: gl.constexpr,
    HEADS: gl.constexpr, ROWS: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """What the flush of some v-heads of a k-head multiplies by: staged keys, and a tuple of `chunk_tables`'."""
    PARTS: gl.constexpr = num_parts(ring_k.dtype.element_ty)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    rows_at = gl.allocate_shared_memory(gl.bfloat16, [PARTS, ROWS, K], rows_shared())
    seen_at = gl.allocate_shared_memory(gl.bfloat16, [PARTS * (K // PIECE), ROWS, PIECE], pieces_shared(2))
    norm_at = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)
    through_at = gl.allocate_shared_memory(gl.float32, [HEADS * ROWS], FLAT)
    last_at = gl.allocate_shared_memory(gl.float32, [HEADS], FLAT)
    solve_at = gl.allocate_shared_memory(gl.bfloat16, [3, HEADS * ROWS, ROWS], PLAIN)
    keys = load_keys(ring_k, start, count, ring_len, K, ROWS)
    stage_keys(rows_at, norm_at, keys, PIECE, NORM)
    stage_pieces(seen_at, keys)
    chunk_tables(
        solve_at, through_at, last_at, rows_at, norm_at, ring_g, ring_beta, start, count, ring_len, stride_rg_head,
        stride_rb_head, HEADS, ROWS, K,
    )  # fmt: skip
    return seen_at, (through_at, last_at, solve_at)


@gluon.jit
def tables_of(tables, h, HEADS: gl.constexpr, ROWS: gl.constexpr):
    """Of a head, what `stage_flush` gave: what multiplies the first products, what the state fades by, the inverse."""
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    through_at, last_at, solve_at = tables
    through = row_of(through_at, h, HEADS, ROWS).load(gl.SliceLayout(0, MMA))
    last = gl.expand_dims(row_of(last_at, h, HEADS, 1).load(gl.SliceLayout(1, MMA)), 1)
    return through, last, solve_operands(solve_at, h, HEADS, ROWS)


@gluon.jit
def store_columns(to, x, PITCH: gl.constexpr):
    """Store x as columns of rows of PITCH elements."""
    rows = gl.expand_dims(gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, x.type.layout)) * PITCH, 1)
    gl.store(to + (rows + gl.expand_dims(gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout)), 0)), x)


@gluon.constexpr_function
def kept_shared(bits):
    """Shared memory of pieces [V rows, 32]: blocks and accumulators' rows without bank conflicts."""
    return gl.SwizzledSharedLayout(128 // bits, 32 // bits, bits // 4, order=[1, 0])


@gluon.constexpr_function
def lines_layout(bits, warps):
    """[V rows, 32]: 16-byte accesses to neighbouring bytes."""
    lanes = bits // 4
    return gl.BlockedLayout([1, 128 // bits], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def line_ptrs(state, V: gl.constexpr, K: gl.constexpr):
    """Pointers to a head's first piece."""
    L: gl.constexpr = lines_layout(state.dtype.element_ty.primitive_bitwidth, gl.num_warps())
    rows = gl.expand_dims(gl.arange(0, V, layout=gl.SliceLayout(1, L)) * K, 1)
    return state + (rows + gl.expand_dims(gl.arange(0, PIECE, layout=gl.SliceLayout(0, L)), 0))


@gluon.jit
def allocate_kept(TYPE: gl.constexpr, V: gl.constexpr, K: gl.constexpr):
    """Shared memory for a head [pieces, V rows, 32]."""
    return gl.allocate_shared_memory(TYPE, [K // PIECE, V, PIECE], kept_shared(TYPE.primitive_bitwidth))


@gluon.jit
def fetch_kept(kept, state, K: gl.constexpr):
    """Start copying a head to shared memory."""
    COUNT: gl.constexpr = kept.shape[0]
    ptrs = line_ptrs(state, kept.shape[1], K)
    for c in gl.static_range(COUNT):
        copy_to_shared(kept.index(c), ptrs + c * PIECE)
    async_copy.commit_group()


@gluon.jit
def largest_kept(kept, largest):
    """The largest magnitude of what is kept among blocks without NaN and infinity, as bits; largest: of all."""
    bits = gl.reduce(gl.reduce(largest, 1, larger), 0, larger).to(gl.int32, bitcast=True)
    if bits >= 0x7F800000:
        bits = 0
        for c in range(kept.shape[0]):
            x = kept.index(c).load(block_layout(gl.num_warps())).to(gl.float32)
            bits = gl.maximum(bits, gl.reduce(largest_finite(x), 0, most))
    return bits
