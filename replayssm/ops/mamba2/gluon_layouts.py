"""Register layouts of the Mamba-2 Gluon kernels; a tile is [heads, V-rows, K].

A warp covers 4 V-rows x 8 lanes along K, so a product with a K-vector costs three shuffles a row, and each access of
8 lanes is 128 contiguous bytes. Ring tiles are laid out so that their sums land where the state's sums land.
`head_warps` x `row_warps` warps cover heads x V-rows.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import constexpr_function


@constexpr_function
def _log2(n: int) -> int:
    return n.bit_length() - 1


@constexpr_function
def _bits(count: int, dim: int, start: int) -> list[list[int]]:
    """Bases start, 2 start, 4 start … along one of three dimensions; start 0 repeats the data."""
    return [[start << i if d == dim else 0 for d in range(3)] for i in range(count)]


@constexpr_function
def state_layout(block_v: int, element_bits: int, head_warps: int, row_warps: int) -> gl.BlockedLayout:
    """[heads, V, K]: 16-byte vectors along K, 8 lanes along K, neighbouring V-rows in one thread."""
    rows = block_v // (4 * row_warps)
    return gl.BlockedLayout([1, rows, 128 // element_bits], [1, 4, 8], [head_warps, row_warps, 1], [2, 1, 0])


@constexpr_function
def ring_x_layout(rows: int, block_v: int, head_warps: int, row_warps: int) -> gl.DistributedLinearLayout:
    """[rows, heads, V]: rows on the lanes that hold K in the state's layout, V as in the state's layout."""
    own = block_v // (4 * row_warps)
    registers = _bits(_log2(own), 2, 1) + _bits(_log2(rows // 8), 0, 1)
    lanes = _bits(3, 0, rows // 8) + _bits(2, 2, own)
    warps = _bits(_log2(row_warps), 2, 4 * own) + _bits(_log2(head_warps), 1, 1)
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, head_warps, block_v])


@constexpr_function
def wide_ring_x_layout(rows: int, width: int, heads: int) -> gl.DistributedLinearLayout:
    """[rows, heads, V] with a warp a head: rows as in `ring_x_layout`, 8 neighbouring V-rows in one thread."""
    own = min(width // 4, 8)
    registers = _bits(_log2(own), 2, 1) + _bits(_log2(rows // 8), 0, 1) + _bits(_log2(width // (4 * own)), 2, 4 * own)
    lanes = _bits(3, 0, rows // 8) + _bits(2, 2, own)
    return gl.DistributedLinearLayout(registers, lanes, _bits(_log2(heads), 1, 1), [], [rows, heads, width])


@constexpr_function
def pieces(width: int) -> tuple[int, int]:
    """A width as a power of two up to 64 and the rest (0, or a power of two)."""
    first = min(1 << (width.bit_length() - 1), 64)
    return first, width - first


@constexpr_function
def weight_layout(rows: int, head_warps: int, row_warps: int) -> gl.DistributedLinearLayout:
    """[rows, heads, rows]: the first two dimensions as in `ring_x_layout`, the last within a warp."""
    registers = _bits(_log2(rows // 8), 0, 1) + _bits(_log2(rows // 4), 2, 1)
    lanes = _bits(3, 0, rows // 8) + _bits(2, 2, rows // 4)
    warps = _bits(_log2(row_warps), 0, 0) + _bits(_log2(head_warps), 1, 1)
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, head_warps, rows])


@constexpr_function
def ring_B_layout(d_state: int, num_warps: int) -> gl.BlockedLayout:
    """[rows, K]: whole rows read by neighbouring lanes, 8 elements each."""
    lanes = min(d_state // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [num_warps, 1], [1, 0])


@constexpr_function
def tile_mma_layout(heads: int, num_warps: int) -> gl.NVMMADistributedLayout:
    """Accumulators [heads, V, columns]: 16 V-rows of a head a warp."""
    return gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[heads, num_warps // heads, 1], instr_shape=[1, 16, 8]
    )


@constexpr_function
def tile_shared(element_bits: int) -> gl.SwizzledSharedLayout:
    """A tile in shared memory: two V-rows that a quarter warp reads at once, 64 bytes each, lie in different banks."""
    return gl.SwizzledSharedLayout(512 // element_bits, 1, 2, order=[2, 1, 0])


@constexpr_function
def heads_by_row_layout(num_warps: int) -> gl.BlockedLayout:
    """[heads, ring rows]: an element a thread."""
    return gl.BlockedLayout([1, 1], [2, 16], [num_warps, 1], [1, 0])


@constexpr_function
def rows_replayed(ring_len: int) -> int:
    """Rows that a flush lays out at once: all that a ring may hold beside a new token, 16 at least."""
    return max(16, 1 << (ring_len - 2).bit_length())
