"""A window's u and outputs as one linear map of what checkpoint and committed rows give its columns, and of v.

Forward substitution on the unit vectors gives the map of a head once, while the tiles are on their way; a tile then
takes one product instead of a step for each token. Its operands are sums of two bf16 numbers each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from replayssm.ops.gluon_chunk import either, parts_of, split3
from replayssm.ops.gluon_window_parts import mma_layout
from replayssm.ops.mamba2.gluon_names import view


@gluon.constexpr_function
def solution_shared(columns):
    """Shared memory of 16-bit rows, read as a right operand: 16 bytes each of eight rows lie in different banks."""
    return gl.SwizzledSharedLayout(8, 64 // columns, columns // 8, order=[1, 0])


@gluon.constexpr_function
def map_layout(heads, tokens, warps):
    """[heads, 4 tokens, columns]: a thread has a row of the map."""
    share = min(heads, warps)
    lanes = [32 // (4 * tokens), 4 * tokens, 1]
    return gl.BlockedLayout([1, 1, 2 * tokens], lanes, [share, warps // share, 1], [2, 1, 0])


@gluon.jit
def stage_solution(
    coef_at, beta_at, scale_at, solution_at,
    HEADS: gl.constexpr, TOKENS: gl.constexpr, WINDOW: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """solution_at [2 parts * heads, 4 tokens, columns]: what each column (k, then q; rows of the map), and v of each
    token (the next rows; the last are zero), add to u of the tokens, then to their outputs.

    coef_at [tokens * heads, columns], beta_at [tokens, heads]; scale_at [heads, columns]: what a column is multiplied
    by, if SCALED. WINDOW: the longest window.
    """
    COLUMNS: gl.constexpr = 2 * TOKENS
    INPUTS: gl.constexpr = 4 * TOKENS
    WARPS: gl.constexpr = gl.num_warps()
    L: gl.constexpr = map_layout(HEADS, TOKENS, WARPS)
    IN_H: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L))
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    m = gl.arange(0, INPUTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    m = gl.expand_dims(gl.expand_dims(m, 0), 2)
    n = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    n = gl.expand_dims(gl.expand_dims(n, 0), 1)
    X = gl.zeros([HEADS, INPUTS, COLUMNS], gl.float32, layout=L)
    if SCALED:
        X += gl.expand_dims(view(scale_at, [HEADS, COLUMNS], PLAIN).load(gl.SliceLayout(1, L)), 1)
    else:
        X += 1.0
    X = gl.where(m == n, X, 0.0)
    for i in gl.static_range(WINDOW):
        coef = view(view(coef_at, [TOKENS, HEADS * COLUMNS], FLAT).index(i), [HEADS, COLUMNS], PLAIN)
        coef = gl.expand_dims(coef.load(gl.SliceLayout(1, L)), 1)
        beta = view(beta_at, [TOKENS, HEADS], FLAT).index(i).load(IN_H)
        beta = gl.expand_dims(gl.expand_dims(beta, 1), 2)
        seen = gl.reduce(gl.where(n == i, X.to(gl.int32, bitcast=True), 0), 2, either).to(gl.float32, bitcast=True)
        u = beta * (gl.where(m == COLUMNS + i, 1.0, 0.0) - gl.expand_dims(seen, 2))
        X = gl.where(n == i, u, X + u * coef)
    high, low, _ = split3(gl.reshape(X, [HEADS * INPUTS, COLUMNS]))
    parts_at = view(solution_at, [2, HEADS * INPUTS, COLUMNS], solution_shared(COLUMNS))
    parts_at.index(0).store(high)
    parts_at.index(1).store(low)


@gluon.jit
def beside(a, b):
    """Accumulators [V, columns] of two tensors side by side; no data moves."""
    rows: gl.constexpr = a.shape[0]
    columns: gl.constexpr = a.shape[1]
    both = gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), [rows, 2 * columns])
    return gl.convert_layout(both, gl.DotOperandLayout(0, mma_layout(gl.num_warps()), 2), assert_trivial=True)


@gluon.jit
def solve_tile(X, v_at, solution_at, h, length, HEADS: gl.constexpr, TOKENS: gl.constexpr):
    """u, then the outputs [V, columns] of a tile from what checkpoint and committed rows give its columns.

    v_at [2 tokens, V], the window's tokens.
    """
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    n = gl.expand_dims(gl.arange(0, 2 * TOKENS, layout=gl.SliceLayout(0, MMA)), 0)
    v = parts_of(gl.where(n < gl.minimum(length, TOKENS), v_at.permute((1, 0)).load(MMA), 0.0))
    X_high, X_low, _ = split3(X)
    high = beside(X_high, v[0])
    if len(v) == 1:
        low = beside(X_low, v[0] * 0.0)
    else:
        low = beside(X_low, v[1])
    right = solution_at.index(h).load(RIGHT)
    none = gl.zeros([X.shape[0], 2 * TOKENS], gl.float32, layout=MMA)
    X = mma_v2(high, solution_at.index(HEADS + h).load(RIGHT), mma_v2(low, right, none))
    return mma_v2(high, right, X)
