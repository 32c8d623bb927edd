"""A flush of the GDN/KDA window kernel as products on the tensor cores, accurate to fp32 (`gluon_chunk`).

With W = S K', R = v - decayed W and U = (I + A)^-1 beta R, the new tile is S decayed, plus U K. The inverse is made
once a head while the tiles are on their way. Rows are in the order of time; those past the committed ones are zero.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_chunk import (
    left_parts,
    parts_of,
    products,
    rows_shared,
    split3,
    triangle_layout,
    unit_lower_inverse,
)
from replayssm.ops.gluon_window_parts import mma_layout
from replayssm.ops.mamba2.gluon_names import view


@gluon.constexpr_function
def chunk_width(element_bits):
    """Columns of a state's tile that are one tensor: as many as two products take with 16-byte accesses."""
    return 1024 // element_bits


@gluon.jit
def to_update_order(x, KW: gl.constexpr):
    """[rows, K] with its columns as accumulators have them whose lanes own KW neighbours along K."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    x = gl.reshape(x, [rows, columns // (4 * KW), 4, KW // 2, 2])
    return gl.reshape(gl.permute(x, (0, 1, 3, 2, 4)), [rows, columns])


@gluon.jit
def from_update_order(x, KW: gl.constexpr, LS: gl.constexpr):
    """Accumulators [V, columns] in the order of memory and the layout of a state's operand; no data moves."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    x = gl.reshape(x, [rows, columns // (4 * KW), KW // 2, 4, 2])
    return gl.convert_layout(gl.reshape(gl.permute(x, (0, 1, 3, 2, 4)), [rows, columns]), LS, assert_trivial=True)


@gluon.jit
def stage_inverse(A, beta_at, coef_at, inverse_at, HEADS: gl.constexpr, ROWS: gl.constexpr):
    """(I + A)^-1 with its columns times beta to inverse_at [heads, rows, rows].

    A [heads, rows, rows] is strictly lower and lies in `triangle_layout`; beta_at [heads, rows].
    """
    L: gl.constexpr = triangle_layout(ROWS, gl.num_warps())
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    view(coef_at, [ROWS, HEADS, ROWS], CUBE).permute((1, 2, 0)).store(0.0 - A)
    inverse = unit_lower_inverse(view(coef_at, [ROWS, HEADS, ROWS], PLAIN), HEADS, ROWS)
    beta = gl.expand_dims(view(beta_at, [HEADS, ROWS], PLAIN).load(gl.SliceLayout(1, L)), 1)
    view(inverse_at, [HEADS, ROWS, ROWS], CUBE).store(inverse * beta)


@gluon.jit
def allocate_parts(PARTS: gl.constexpr, ROWS: gl.constexpr, K: gl.constexpr):
    """Shared memory for parts [rows, K], a tuple."""
    memory = gl.allocate_shared_memory(gl.bfloat16, [PARTS, ROWS, K], rows_shared())
    parts = ()
    for i in gl.static_range(PARTS):
        parts = parts + (memory.index(i),)
    return parts


@gluon.jit
def load_parts(parts_at, c: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr, TURNED: gl.constexpr):
    """Chunk c of the columns of operands in shared memory, a tuple of [rows, K]; TURNED: as [columns, rows]."""
    parts = ()
    for i in gl.static_range(len(parts_at)):
        part = parts_at[i].slice(c * WIDTH, WIDTH, dim=1)
        if TURNED:
            parts = parts + (part.permute((1, 0)).load(LAYOUT),)
        else:
            parts = parts + (part.load(LAYOUT),)
    return parts


@gluon.jit
def fold_rows(
    S,
    v_at,
    committed,
    keys_at,
    updates_at,
    inverse_at,
    through,
    grow,
    fade,
    KDA: gl.constexpr,
    KW: gl.constexpr,
    LS: gl.constexpr,
):
    """The tile, a tuple of [V, columns] in `LS`, after the committed rows, in fp32.

    v_at [rows, V], of which `committed` count; keys_at: parts [rows, K] of what multiplies the tile; updates_at: what U
    multiplies, in `to_update_order`; through: what the tile's columns decay by, a tuple; grow, fade [rows]: what W and
    U are multiplied by, where that is not in the keys already (KDA).
    """
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    WIDTH: gl.constexpr = S[0].shape[1]
    ROWS: gl.constexpr = v_at.shape[0]
    BLOCK_V: gl.constexpr = v_at.shape[1]
    none = gl.zeros([BLOCK_V, ROWS], gl.float32, layout=MMA)
    W = none
    for c in gl.static_range(len(S)):
        W += products(parts_of(S[c]), load_parts(keys_at, c, WIDTH, gl.DotOperandLayout(1, MMA, KW), True), none)
    if not KDA:
        W *= gl.expand_dims(grow, 0)
    live = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, MMA)) < committed, 0)
    R = gl.where(live, v_at.permute((1, 0)).load(MMA).to(gl.float32) - W, 0.0)
    inverse = inverse_at.permute((1, 0)).load(RIGHT)
    U = products(left_parts(R, MMA), split3(inverse), none)
    if not KDA:
        U *= gl.expand_dims(fade, 0)
    left = left_parts(U, MMA)
    folded = ()
    for c in gl.static_range(len(S)):
        zero = gl.zeros([BLOCK_V, WIDTH], gl.float32, layout=MMA)
        delta = from_update_order(products(left, load_parts(updates_at, c, WIDTH, RIGHT, False), zero), KW, LS)
        decay, delta = gl.broadcast(through[c], delta)
        folded = folded + (gl.fma(S[c].to(gl.float32), decay, delta),)
    return folded
