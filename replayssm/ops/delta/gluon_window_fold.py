"""A flush of the GDN/KDA window kernel as products on the tensor cores, accurate to fp32 (`gluon_chunk`).

With W = S K', R = v - decayed W and U = (I + A)^-1 beta R, the new tile is S decayed, plus U K. The inverse is made
once a head while the tiles are on their way. Rows are in the order of time; those past the committed ones are zero.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.delta.gluon_window_tile import store_tile
from replayssm.ops.gluon_chunk import left_parts, parts_of, products, row_of_columns, rows_shared, split3
from replayssm.ops.gluon_window_parts import mma_layout, product
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
def to_key_order(x, KW: gl.constexpr):
    """[rows, K] with its columns in the order in which products meet those of a thread that loads KW neighbours."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    x = gl.reshape(x, [rows, columns // (8 * KW), 2, 4, KW // 2, 2])
    return gl.reshape(gl.permute(x, (0, 1, 4, 2, 3, 5)), [rows, columns])


@gluon.jit
def key_operands(S, KW: gl.constexpr):
    """The parts of a chunk of a tile as left operands in `to_key_order`; no data moves."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, mma_layout(gl.num_warps()), 2)
    parts = parts_of(S)
    operands = ()
    for i in gl.static_range(len(parts)):
        operands = operands + (gl.convert_layout(to_key_order(parts[i], KW), LEFT, assert_trivial=True),)
    return operands


@gluon.constexpr_function
def band_layout(warps):
    """[heads, 4, rows]: a thread has a column of a head."""
    return gl.BlockedLayout([1, 4, 1], [1, 1, 32], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def inverse_bands(coef_at, HEADS: gl.constexpr, ROWS: gl.constexpr):
    """(I + A)^-1 by forward substitution as in `unit_lower_inverse`, a tuple of four rows each [heads, 4, rows].

    Rows above the one that is being substituted do not change and are left out.
    """
    L: gl.constexpr = band_layout(gl.num_warps())
    i = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, L))), 0), 2)
    j = gl.expand_dims(gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, L))), 0), 1)
    bands = ()
    for band in gl.static_range(ROWS // 4):
        unit = gl.where(i + 4 * band == j, 1.0, 0.0)
        bands = bands + (unit + gl.zeros([HEADS, 4, ROWS], gl.float32, layout=L),)
    for t in gl.static_range(ROWS - 1):
        solved = gl.expand_dims(row_of_columns(bands[t // 4], i, t % 4), 1)
        changed = ()
        for band in gl.static_range(ROWS // 4):
            X = bands[band]
            if 4 * band + 3 > t:
                column = gl.expand_dims(coef_at.index(t).slice(4 * band, 4, dim=1).load(gl.SliceLayout(2, L)), 2)
                column, X = gl.broadcast(column, X)
                each, X = gl.broadcast(solved, X)
                X = gl.fma(column, each, X)
            changed = changed + (X,)
        bands = changed
    return bands


@gluon.jit
def stage_inverse(A, beta_at, coef_at, inverse_at, HEADS: gl.constexpr, ROWS: gl.constexpr):
    """(I + A)^-1 with its columns times beta to inverse_at [heads, rows, rows].

    A [heads, rows, rows] is strictly lower and lies in `triangle_layout`; beta_at [heads, rows].
    """
    L: gl.constexpr = band_layout(gl.num_warps())
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    view(coef_at, [ROWS, HEADS, ROWS], CUBE).permute((1, 2, 0)).store(0.0 - A)
    bands = inverse_bands(view(coef_at, [ROWS, HEADS, ROWS], PLAIN), HEADS, ROWS)
    beta = gl.expand_dims(view(beta_at, [HEADS, ROWS], PLAIN).load(gl.SliceLayout(1, L)), 1)
    for band in gl.static_range(ROWS // 4):
        view(inverse_at, [HEADS, ROWS, ROWS], CUBE).slice(4 * band, 4, dim=1).store(bands[band] * beta)


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
def solve_rows(W, v_at, committed, inverse_at):
    """U [V, rows] from W; v_at [rows, V], of which `committed` count."""
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    ROWS: gl.constexpr = v_at.shape[0]
    BLOCK_V: gl.constexpr = v_at.shape[1]
    live = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, MMA)) < committed, 0)
    R = gl.where(live, v_at.permute((1, 0)).load(MMA).to(gl.float32) - W, 0.0)
    inverse = inverse_at.permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 2))
    return products(left_parts(R, MMA), split3(inverse), gl.zeros([BLOCK_V, ROWS], gl.float32, layout=MMA))


@gluon.jit
def fold_tile(S, state, v_at, committed, tables, folding, h, KW: gl.constexpr, LS: gl.constexpr):
    """GDN: a tile, a tuple of [V, columns] in `LS`, after the committed rows, stored at `state`.

    Returns what memory now holds. v_at [rows, V], of which `committed` count.
    """
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    IN_N: gl.constexpr = gl.SliceLayout(0, MMA)
    WIDTH: gl.constexpr = S[0].shape[1]
    ROWS: gl.constexpr = v_at.shape[0]
    BLOCK_V: gl.constexpr = v_at.shape[1]
    keys_at, updates_at, inverse_at, norm_at, grown_at = folding
    columns_at, solution_at, fade_at, through_at = tables
    through = gl.expand_dims(through_at.index(h).load(gl.SliceLayout(1, LS)), 1)
    norm = norm_at.slice(0, ROWS).load(IN_N)
    grow = grown_at.index(h).load(IN_N) * norm
    fade = fade_at.index(h).load(IN_N) * norm
    inverse_at = inverse_at.index(h)
    none = gl.zeros([BLOCK_V, ROWS], gl.float32, layout=MMA)
    W = none
    for c in gl.static_range(len(S)):
        seen = products(key_operands(S[c], KW), load_parts(keys_at, c, WIDTH, RIGHT, True), none)
        W = seen if c == 0 else W + seen
    U = solve_rows(W * gl.expand_dims(grow, 0), v_at, committed, inverse_at) * gl.expand_dims(fade, 0)
    left = left_parts(U, MMA)
    folded = ()
    for c in gl.static_range(len(S)):
        zero = gl.zeros([BLOCK_V, WIDTH], gl.float32, layout=MMA)
        delta = from_update_order(products(left, load_parts(updates_at, c, WIDTH, RIGHT, False), zero), KW, LS)
        decay, delta = gl.broadcast(through, delta)
        folded = folded + (gl.fma(S[c].to(gl.float32), decay, delta),)
    return store_tile(state, folded, len(S) * WIDTH, LS)


@gluon.jit
def three_of(memory, first, STEP: gl.constexpr):
    return memory.index(first), memory.index(first + STEP), memory.index(first + 2 * STEP)


@gluon.jit
def fold_chunks(tiles, tile, state, v_at, committed, columns_at, folding, ACT: gl.constexpr, LS: gl.constexpr):
    """KDA: as `fold_tile`, and the new tile's products with the columns.

    Chunk by chunk in short loops; the tile, from chunk `tile` of `tiles` on, stays in shared memory.
    """
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ROWS: gl.constexpr = v_at.shape[0]
    BLOCK_V: gl.constexpr = tiles.shape[1]
    WIDTH: gl.constexpr = tiles.shape[2]
    KW: gl.constexpr = WIDTH // 8
    NC: gl.constexpr = columns_at.shape[0]
    COLUMNS: gl.constexpr = columns_at.shape[1]
    operands_at, inverse_at, through_at = folding
    # A bound that the compiler does not fold, so that it does not unroll the loops.
    chunks = gl.minimum(committed + NC, NC)
    W = gl.zeros([BLOCK_V, ROWS], gl.float32, layout=MMA)
    for c in range(chunks):
        S = tiles.index(tile + c).load(LS)
        keys = load_parts(three_of(operands_at, c, NC), 0, WIDTH, RIGHT, True)
        W += products(key_operands(S, KW), keys, gl.zeros([BLOCK_V, ROWS], gl.float32, layout=MMA))
    U = left_parts(solve_rows(W, v_at, committed, inverse_at.index(0)), MMA)
    through_at = view(through_at, [NC, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    state += gl.expand_dims(gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, LS)), 1) * (NC * WIDTH)
    state += gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LS)), 0)
    X = gl.zeros([BLOCK_V, COLUMNS], gl.float32, layout=MMA)
    for c in range(chunks):
        updates = load_parts(three_of(operands_at, 3 * NC + c, NC), 0, WIDTH, RIGHT, False)
        delta = products(U, updates, gl.zeros([BLOCK_V, WIDTH], gl.float32, layout=MMA))
        decay = gl.expand_dims(through_at.index(c).load(gl.SliceLayout(0, LS)), 0)
        decay, delta = gl.broadcast(decay, from_update_order(delta, KW, LS))
        S = gl.fma(tiles.index(tile + c).load(LS).to(gl.float32), decay, delta).to(state.dtype.element_ty)
        gl.store(state + c * WIDTH, S)
        columns = columns_at.index(c).permute((1, 0)).load(gl.DotOperandLayout(1, MMA, KW))
        X += product(S, columns, gl.zeros([BLOCK_V, COLUMNS], gl.float32, layout=MMA), ACT)
    return X
