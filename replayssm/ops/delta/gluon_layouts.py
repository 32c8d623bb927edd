"""Layouts of the delta kernels' tiles in registers and shared memory.

A state tile is [V rows, K] with four lanes along K, so a product over K costs two shuffles a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def rows_a_thread(block_v, warps):
    return 2 if block_v >= 16 * warps else 1


@gluon.constexpr_function
def tile_layout(element_bits, block_v, warps):
    """[V rows, K]: 16-byte accesses, 4 lanes along K, 8 lanes along the rows."""
    return gl.BlockedLayout([rows_a_thread(block_v, warps), 128 // element_bits], [8, 4], [warps, 1], [1, 0])


@gluon.constexpr_function
def tile_shared(element_bits, block_v, warps):
    """Shared memory of a tile: the two rows that a quarter warp reads at once lie in different banks."""
    return gl.SwizzledSharedLayout(512 // element_bits, rows_a_thread(block_v, warps), 2, order=[1, 0])


@gluon.constexpr_function
def copy_layout(element_bits, k_dim, warps):
    """[V rows, K]: 16-byte chunks, a warp copies whole rows."""
    lanes = min(32, k_dim * element_bits // 128)
    return gl.BlockedLayout([1, 128 // element_bits], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def values_layout(rows, block_v, warps):
    """[ring rows, V]: the V rows lie in the same lanes as those of the tile, four lanes along the ring."""
    return gl.BlockedLayout([max(1, rows // 4), rows_a_thread(block_v, warps)], [4, 8], [1, warps], [0, 1])


@gluon.constexpr_function
def values_shared(act_bits, block_v, block_l):
    """Shared memory of ring rows [rows, V], read by `values_layout` without bank conflicts at 64 bf16 a row."""
    return gl.SwizzledSharedLayout(min(256 // act_bits, block_v), max(1, block_l // 4), 4, order=[1, 0])


@gluon.constexpr_function
def keys_layout(rows, k_dim, warps):
    """[ring rows, K]: a warp holds whole rows."""
    return gl.BlockedLayout([max(1, rows // warps), max(1, k_dim // 32)], [1, 32], [warps, 1], [1, 0])


@gluon.constexpr_function
def scores_layout(rows, k_dim, warps, kda):
    """[ring rows, K] where rows are scored: few shuffles a row, or (KDA) few steps of the scan along the rows."""
    if kda:
        return keys_layout(rows, k_dim, warps)
    return gl.BlockedLayout([1, 4], [4, 8], [warps, 1], [1, 0])
