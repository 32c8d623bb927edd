"""KDA: what the rows of the ring and of the window weigh in the columns (k, then q) of a window's tokens.

Sums over K are products on the tensor cores, of unit vectors in fp16; where vectors are taken as they come, in tf32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from replayssm.ops.delta.gluon_common import view_as
from replayssm.ops.delta.gluon_read_codes import as_shape
from replayssm.ops.delta.gluon_window_channels import fade_rows, load_rows, stack
from replayssm.ops.delta.gluon_window_gates import decay_of
from replayssm.ops.delta.gluon_window_tile import store_chunks, tile_of
from replayssm.ops.gluon_chunk import rows_shared
from replayssm.ops.gluon_window_parts import columns_shared, mma_layout, nearest_tf32


@gluon.constexpr_function
def operand_type(norm):
    """Unit vectors that have decayed fit fp16, which has the mantissa of tf32."""
    return gl.float16 if norm else gl.float32


@gluon.constexpr_function
def operand_shared(norm):
    return rows_shared() if norm else columns_shared(4)


@gluon.jit
def ancestors(parents, length, TREE: gl.constexpr, TOKENS: gl.constexpr):
    """Of each token a mask, a tuple: bit i is whether token i of the window is its ancestor, or itself."""
    masks = ()
    above = ()
    for t in gl.static_range(TOKENS):
        bits = 1 << t
        if TREE:
            above = above + (gl.load(parents + t, mask=t < length, other=-1),)
            at = above[t]
            for i in gl.static_range(t - 1, -1, -1):
                hit = at == i
                bits = gl.where(hit, bits | (1 << i), bits)
                at = gl.where(hit, above[i], at)
        masks = masks + (bits,)
    return masks


@gluon.jit
def narrow(rows, NORM: gl.constexpr):
    """A tuple of [K] as operands of the tensor cores."""
    narrowed = ()
    for i in gl.static_range(len(rows)):
        narrowed = narrowed + (rows[i].to(gl.float16) if NORM else nearest_tf32(rows[i]),)
    return narrowed


@gluon.jit
def pair_tokens(k, new, parents, length, TREE: gl.constexpr):
    """Keys of tokens i as decayed to each token t that sees them, a tuple of [K] in the order i * tokens + t, and the
    decays from the last committed row to each token."""
    TOKENS: gl.constexpr = len(k)
    masks = ancestors(parents, length, TREE, TOKENS)
    paths = ()
    for t in gl.static_range(TOKENS):
        paths = paths + (k[t] * 0.0 + 1.0,)
    pairs = ()
    for i in gl.static_range(TOKENS - 1, -1, -1):
        decay = decay_of(new[i])
        group = ()
        longer = ()
        for t in gl.static_range(TOKENS):
            if t < i:
                group = group + (k[t] * 0.0,)
                longer = longer + (paths[t],)
            elif TREE:
                seen = ((masks[t] >> i) & 1) == 1
                group = group + (gl.where(seen, k[i] * paths[t], 0.0),)
                longer = longer + (gl.where(seen, paths[t] * decay, paths[t]),)
            else:
                group = group + (k[i] * paths[t],)
                longer = longer + (paths[t] * decay,)
        pairs = group + pairs
        paths = longer
    return pairs, paths


@gluon.jit
def sum_products(left_at, right_at, scale, TOKENS: gl.constexpr):
    """Products [rows, columns] of staged rows and columns; scale: of q."""
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    KW: gl.constexpr = 2 if left_at.dtype == gl.float16 else 4
    SHAPE: gl.constexpr = [left_at.shape[0], 2 * TOKENS]
    right = right_at.permute((1, 0)).load(gl.DotOperandLayout(1, MMA, KW))
    left = left_at.load(gl.DotOperandLayout(0, MMA, KW))
    total = mma_v2(left, right, gl.zeros(SHAPE, gl.float32, layout=MMA), input_precision="tf32")
    n = gl.arange(0, 2 * TOKENS, layout=gl.SliceLayout(0, MMA))
    return total * gl.expand_dims(gl.where(n < TOKENS, 1.0, scale), 0)


@gluon.jit
def stage_pairs(weights, coef_at, TOKENS: gl.constexpr):
    """coef_at [token i, columns] from weights [i * tokens + t, columns], of which column n needs t = n % tokens."""
    COLUMNS: gl.constexpr = 2 * TOKENS
    L: gl.constexpr = gl.BlockedLayout([1, TOKENS, 1], [4, 1, 8], [gl.num_warps(), 1, 1], [2, 1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    weights_at = gl.allocate_shared_memory(gl.float32, [TOKENS * TOKENS * COLUMNS], FLAT)
    view_as(weights_at, gl.float32, TOKENS * TOKENS, COLUMNS, PLAIN).store(weights)
    all_weights = as_shape(weights_at, gl.float32, [TOKENS, TOKENS, COLUMNS], CUBE).load(L)
    i = gl.expand_dims(gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(1, gl.SliceLayout(2, L))), 1), 2)
    t = gl.expand_dims(gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(2, L))), 0), 2)
    n = gl.expand_dims(gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(1, L))), 0), 1)
    own = (n % TOKENS == t) & ((i != t) | (n >= TOKENS))
    as_shape(coef_at, gl.float32, [TOKENS, COLUMNS], PLAIN).store(gl.sum(gl.where(own, all_weights, 0.0), 1))


@gluon.jit
def channel_tables(
    space, columns_at, read_at, score_at, coef_at, new, parents, length, flush, scale,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, TREE: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """read_at [chunks, columns, K]: what multiplies the checkpoint; score_at [rows, columns]: what each committed row's
    u weighs; coef_at [token, columns]: the same of the window's tokens."""
    K: gl.constexpr = read_at.shape[0] * read_at.shape[2]
    TYPE: gl.constexpr = operand_type(NORM)
    SHARED: gl.constexpr = operand_shared(NORM)
    if NORM and TOKENS * TOKENS == ROWS:
        halves_at = as_shape(space.index(2), TYPE, [2, ROWS, K], SHARED)
        faded_at = halves_at.index(0)
        pairs_at = halves_at.index(1)
    else:
        faded_at = gl.allocate_shared_memory(TYPE, [ROWS, K], SHARED)
        pairs_at = gl.allocate_shared_memory(TYPE, [TOKENS * TOKENS, K], SHARED)
    faded, through = fade_rows(space, ROWS, K)
    faded_at.store(stack(narrow(faded, NORM)))
    through = gl.where(flush, 1.0, through)
    columns = load_rows(columns_at, 2 * TOKENS, K)
    k = ()
    q = ()
    for t in gl.static_range(TOKENS):
        k = k + (columns[t],)
        q = q + (columns[TOKENS + t],)
    right_at = gl.allocate_shared_memory(TYPE, [2, 2 * TOKENS, K], SHARED)
    right_at.index(1).store(stack(narrow(columns, NORM)))
    pairs, paths = pair_tokens(k, new, parents, length, TREE)
    for i in gl.static_range(TOKENS * TOKENS // 16):
        some = ()
        for j in gl.static_range(16):
            some = some + (pairs[16 * i + j],)
        pairs_at.slice(16 * i, 16).store(stack(narrow(some, NORM)))
    decayed = ()
    read = ()
    for n in gl.static_range(2 * TOKENS):
        x = (k[n] if n < TOKENS else q[n - TOKENS]) * paths[n % TOKENS]
        decayed = decayed + (x,)
        read = read + (nearest_tf32(x * (through if n < TOKENS else through * scale)),)
    right_at.index(0).store(stack(narrow(decayed, NORM)))
    store_chunks(tile_of(read_at, 0, read_at.shape[0]), stack(read))
    score_at.store(sum_products(faded_at, right_at.index(0), scale, TOKENS))
    stage_pairs(sum_products(pairs_at, right_at.index(1), scale, TOKENS), coef_at, TOKENS)
