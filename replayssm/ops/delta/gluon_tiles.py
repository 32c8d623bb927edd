"""The loops over a program's state tiles: read the checkpoint, or replay the ring into it first."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .gluon_common import add2, barrier, replay_rows, row_of, row_of_age, sum_k, table
from .gluon_layouts import copy_layout

# Triton 3.9's name, and 3.6's.
copy_to_shared = (
    async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
)


@gluon.jit
def fetch_rows(smem, state, first: gl.constexpr, ROWS: gl.constexpr, K: gl.constexpr):
    """Start copying ROWS V-rows of a state tile, from row `first` of it on."""
    COPY: gl.constexpr = copy_layout(state.dtype.element_ty.primitive_bitwidth, K, gl.num_warps())
    v = gl.expand_dims(first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY)), 1)
    k = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, COPY)), 0)
    copy_to_shared(smem.slice(first, ROWS), state + v * K + k)


@gluon.jit
def fetch(
    smem, v_smem, state, values, t, start, committed, ring_len, stride_state_head, stride_values_head,
    K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_L: gl.constexpr, TILE: gl.constexpr,
    ROWS: gl.constexpr, oldest_first,
):
    """Start copying state tile t (if TILE) and, youngest or oldest first, its columns of ring_u or ring_v (if ROWS)."""
    PER_HEAD: gl.constexpr = V // BLOCK_V
    h = t // PER_HEAD
    col = t % PER_HEAD * BLOCK_V
    if TILE:
        fetch_rows(smem, state + h * stride_state_head + col * K, 0, BLOCK_V, K)
    if ROWS:
        COPY_V: gl.constexpr = copy_layout(values.dtype.element_ty.primitive_bitwidth, BLOCK_V, gl.num_warps())
        age = gl.arange(0, BLOCK_L, layout=gl.SliceLayout(1, COPY_V))
        cols = gl.expand_dims(gl.arange(0, BLOCK_V, layout=gl.SliceLayout(0, COPY_V)), 0)
        age_at = gl.where(oldest_first, gl.maximum(committed - 1 - age, 0), age)
        rows = gl.expand_dims(row_of_age(start, committed, age_at, ring_len) * V, 1)
        copy_to_shared(v_smem, values + h * stride_values_head + col + rows + cols,
                       mask=gl.expand_dims(age < committed, 1))


@gluon.jit
def fetch_first(
    smem, values_smem, state, values, first, start, committed, ring_len, stride_state_head, stride_values_head,
    K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_L: gl.constexpr, EARLY: gl.constexpr, oldest_first,
):
    """Start copying what is left of tile `first` after its EARLY rows, behind its columns of ring_u or ring_v."""
    PIECE: gl.constexpr = EARLY if EARLY > 0 else BLOCK_V
    PER_HEAD: gl.constexpr = V // BLOCK_V
    fetch(smem, values_smem, state, values, first, start, committed, ring_len, stride_state_head, stride_values_head,
          K, V, BLOCK_V, BLOCK_L, False, True, oldest_first)
    state += first // PER_HEAD * stride_state_head + first % PER_HEAD * (BLOCK_V * K)
    for row in gl.static_range(EARLY, BLOCK_V, PIECE):
        fetch_rows(smem, state, row, PIECE, K)
    async_copy.commit_group()


@gluon.jit
def fetch_more(
    smem, u_smem, state, ring_u, start, committed, ring_len, stride_state_head, stride_ru_head,
    K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_L: gl.constexpr, NUM_TILES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Start copying the tiles after the first that fit into shared memory, for a row that reads."""
    for t in gl.static_range(1, STAGES):
        if t < NUM_TILES:
            fetch(smem.index(t), u_smem.index(t), state, ring_u, t, start, committed, ring_len, stride_state_head,
                  stride_ru_head, K, V, BLOCK_V, BLOCK_L, True, True, False)
        async_copy.commit_group()


@gluon.jit
def finish_rows(at_k, at_q, v_now, kq, beta, ring_u, out, KEEP: gl.constexpr = False):
    """Output and u of some V rows from what checkpoint and ring give for k and q.

    To pointers of these rows, or (KEEP) to shared memory for `write_kept`.
    """
    u = beta * (v_now.to(gl.float32) - at_k)
    o = at_q + kq * u
    if KEEP:
        out.store(o.to(out.dtype))
        ring_u.store(u.to(ring_u.dtype))
    else:
        gl.store(out, o.to(out.dtype.element_ty))
        gl.store(ring_u, u.to(ring_u.dtype.element_ty))


@gluon.jit
def finish_tile(S, acc_k, acc_q, v_now, kq, k_at, q_at, through, beta, ring_u, out, TILE: gl.constexpr,
                KEEP: gl.constexpr = False):
    """Output and u of a tile's V rows, written as by `finish_rows`."""
    k = k_at.load(gl.SliceLayout(0, TILE))
    q = q_at.load(gl.SliceLayout(0, TILE))
    S = S.to(gl.float32)
    at_k = sum_k(S * gl.expand_dims(k, 0), TILE)
    at_q = sum_k(S * gl.expand_dims(q, 0), TILE)
    finish_rows(acc_k + at_k * through, acc_q + at_q * through, v_now, kq, beta, ring_u, out, KEEP)


@gluon.jit
def write_kept(kept_u, kept_out, ring_u, out, line_head, line_col, new, stride_ru_head, stride_out_head,
               V: gl.constexpr):
    """Write u and outputs of all tiles at once, behind the reads of the state; the pointers are of a v-head's row 0."""
    barrier()
    LINE: gl.constexpr = line_col.type.layout
    gl.store(ring_u + line_head * stride_ru_head + new * V + line_col, kept_u.load(LINE))
    gl.store(out + line_head * stride_out_head + line_col, kept_out.load(LINE))


@gluon.jit
def append_row(
    v, k, decay, beta, ring_v, ring_k, ring_g, ring_beta, new, cols, line_head, line_col, offs_h, mask_h, first_tile,
    stride_rv_head, stride_rg_head, stride_rb_head, K: gl.constexpr, V: gl.constexpr, PER_HEAD: gl.constexpr,
    KDA: gl.constexpr,
):
    """Write this token's raw inputs to ring row `new`, each by one program; u comes with the tiles."""
    gl.store(ring_v + line_head * stride_rv_head + new * V + line_col, v)
    if first_tile % PER_HEAD == 0:
        gl.store(ring_beta + offs_h * stride_rb_head + new, beta, mask=mask_h)
        if KDA:
            gl.store(ring_g + new * K + cols, decay)
        else:
            gl.store(ring_g + offs_h * stride_rg_head + new, decay, mask=mask_h)
        if first_tile == 0:
            gl.store(ring_k + new * K + cols, k)


@gluon.jit
def read_tiles(
    smem, u_smem, k_at, q_at, v_at, seen_k_at, seen_q_at, through_at, beta_at, state, ring_u, out, kq, start, committed,
    new, ring_len, stride_state_head, stride_ru_head, stride_out_head,
    K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_L: gl.constexpr, NUM_TILES: gl.constexpr,
    STAGES: gl.constexpr, PAD_HEADS: gl.constexpr, TILE: gl.constexpr, VALUES: gl.constexpr,
    kept_u, kept_out, LATE: gl.constexpr,
):
    """Outputs of a row that does not flush; the first STAGES tiles are on their way.

    LATE: outputs and u go to kept_out and kept_u.
    """
    PER_HEAD: gl.constexpr = V // BLOCK_V
    IN_V: gl.constexpr = gl.SliceLayout(1, TILE)
    IN_ROWS: gl.constexpr = gl.SliceLayout(1, VALUES)
    v = gl.arange(0, BLOCK_V, layout=IN_V)
    live = gl.expand_dims(gl.arange(0, BLOCK_L, layout=IN_ROWS) < committed, 1)
    for t in range(NUM_TILES):
        h = t // PER_HEAD
        col = t % PER_HEAD * BLOCK_V
        stage = t % STAGES
        weight_k = gl.expand_dims(row_of(seen_k_at, h, PAD_HEADS, BLOCK_L).load(IN_ROWS), 1)
        weight_q = gl.expand_dims(row_of(seen_q_at, h, PAD_HEADS, BLOCK_L).load(IN_ROWS), 1)
        async_copy.wait_group(STAGES - 1)
        S = smem.index(stage).load(TILE)
        u = gl.where(live, u_smem.index(stage).load(VALUES).to(gl.float32), 0.0)
        if NUM_TILES > STAGES:
            if t + STAGES < NUM_TILES:
                fetch(smem.index(stage), u_smem.index(stage), state, ring_u, t + STAGES, start, committed, ring_len,
                      stride_state_head, stride_ru_head, K, V, BLOCK_V, BLOCK_L, True, True, False)
        async_copy.commit_group()
        acc_k, acc_q = gl.reduce((u * weight_k, u * weight_q), 0, add2)
        finish_tile(S, gl.convert_layout(acc_k, IN_V, assert_trivial=True),
                    gl.convert_layout(acc_q, IN_V, assert_trivial=True),
                    row_of(v_at, t, NUM_TILES, BLOCK_V).load(IN_V), kq, k_at, q_at,
                    row_of(through_at, h, PAD_HEADS, 1).load(IN_V), row_of(beta_at, h, PAD_HEADS, 1).load(IN_V),
                    row_of(kept_u, t, NUM_TILES, BLOCK_V) if LATE else ring_u + h * stride_ru_head + new * V + col + v,
                    row_of(kept_out, t, NUM_TILES, BLOCK_V) if LATE else out + h * stride_out_head + col + v, TILE,
                    LATE)


@gluon.jit
def flush_tiles(
    smem, v_smem, keys_at, values_at, gates_at, decay_at, betas_at, k_at, q_at, v_at, through_at, beta_at, state,
    ring_v, ring_u, out, kq, start, committed, new, ring_len, stride_state_head, stride_rv_head, stride_ru_head,
    stride_out_head,
    K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_L: gl.constexpr, NUM_TILES: gl.constexpr,
    PAD_HEADS: gl.constexpr, KDA: gl.constexpr, TILE: gl.constexpr, VALUES: gl.constexpr,
    begin, end,
):
    """Replay the committed rows into the tiles from `begin` to `end`, write them, and compute outputs from them.

    The rows are staged already, except for v, which comes with the tile.
    """
    PER_HEAD: gl.constexpr = V // BLOCK_V
    IN_V: gl.constexpr = gl.SliceLayout(1, TILE)
    v = gl.arange(0, BLOCK_V, layout=IN_V)
    inner = gl.expand_dims(v, 1) * K + gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, TILE)), 0)
    none = gl.full([BLOCK_V], 0.0, gl.float32, layout=IN_V)
    live = gl.expand_dims(gl.arange(0, BLOCK_L, layout=gl.SliceLayout(1, VALUES)) < committed, 1)
    for t in range(begin, end):
        h = t // PER_HEAD
        col = t % PER_HEAD * BLOCK_V
        async_copy.wait_group(0)
        S = smem.load(TILE).to(gl.float32)
        values = gl.where(live, v_smem.load(VALUES).to(gl.float32), 0.0)
        if NUM_TILES > 1:
            if t + 1 < end:
                fetch(smem, v_smem, state, ring_v, t + 1, start, committed, ring_len, stride_state_head, stride_rv_head,
                      K, V, BLOCK_V, BLOCK_L, True, True, False)
        async_copy.commit_group()
        table(values_at, BLOCK_L, BLOCK_V).store(values.to(values_at.dtype))
        S = replay_rows(S, keys_at, values_at, gates_at, row_of(decay_at, h, PAD_HEADS, BLOCK_L),
                        row_of(betas_at, h, PAD_HEADS, BLOCK_L), committed, K, BLOCK_V, BLOCK_L, KDA, TILE)
        stored = S.to(state.dtype.element_ty)
        gl.store(state + h * stride_state_head + col * K + inner, stored)
        finish_tile(stored, none, none, row_of(v_at, t, NUM_TILES, BLOCK_V).load(IN_V), kq, k_at, q_at,
                    row_of(through_at, h, PAD_HEADS, 1).load(IN_V), row_of(beta_at, h, PAD_HEADS, 1).load(IN_V),
                    ring_u + h * stride_ru_head + new * V + col + v, out + h * stride_out_head + col + v, TILE)
