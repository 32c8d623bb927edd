"""Device functions of the delta kernels for NVIDIA GPUs: gates, norms, ring rows, and the recurrence."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_layouts import scores_layout, tile_layout, values_layout  # noqa: F401

# Names that Gluon changed between Triton 3.6 and 3.9.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
PUBLIC_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@gluon.jit
def softplus(x):
    """log(1 + exp(x)), linear above 20; keeps full relative precision for very negative x."""
    e = gl.exp(gl.minimum(x, 20.0))
    one_plus = 1.0 + e
    rounded = one_plus - 1.0
    small = gl.where(rounded == 0.0, e, gl.log(one_plus) * (e / gl.where(rounded == 0.0, 1.0, rounded)))
    return gl.where(x > 20.0, x, small)


@gluon.jit
def sigmoid(x):
    e = gl.exp(-gl.abs(x))
    return gl.where(x >= 0.0, 1.0, e) / (1.0 + e)


@gluon.jit
def log_decay(raw, a_log, bias, lower_bound, BOUNDED: gl.constexpr):
    """The log decay of a raw gate; BOUNDED picks the sigmoid form with a lower bound."""
    if BOUNDED:
        decay = lower_bound * sigmoid(gl.exp(a_log) * (raw + bias))
    else:
        decay = -gl.exp(a_log) * softplus(raw + bias)
    return decay


@gluon.jit
def inverse_norm(x, axis: gl.constexpr, NORM: gl.constexpr):
    """1 / L2 norm along an axis (eps inside the root), or 1."""
    if NORM:
        inverse = gl.rsqrt(gl.sum(x * x, axis=axis) + 1e-6)
    else:
        inverse = gl.sum(x * 0.0, axis=axis) + 1.0
    return inverse


@gluon.jit
def wrap(row, ring_len):
    """Physical row of start + j, j <= ring_len."""
    return gl.where(row >= ring_len, row - ring_len, row)


@gluon.jit
def row_of_age(start, committed, age, ring_len):
    """Physical row of the committed row of an age (the youngest has 0); some row of the ring for other ages."""
    return wrap(start + gl.maximum(committed - 1 - age, 0), ring_len)


@gluon.jit
def sum_k(x, TILE: gl.constexpr):
    """Sum of [V, K] over K: first over the parts of K that a thread holds apart, which are independent chains."""
    rows: gl.constexpr = x.shape[0]
    inner: gl.constexpr = TILE.size_per_thread[1] * TILE.threads_per_warp[1]
    x = gl.sum(gl.reshape(x, [rows, x.shape[1] // inner, inner]), axis=1)
    return gl.convert_layout(gl.sum(x, axis=1), gl.SliceLayout(1, TILE), assert_trivial=True)


@gluon.jit
def recur(S, decay, k, v, beta, TILE: gl.constexpr):
    """One token of the recurrence on S [V, K]: the only place that updates a state."""
    S = S * decay
    u = beta * (v - sum_k(S * gl.expand_dims(k, 0), TILE))
    u_tile, S = gl.broadcast(gl.expand_dims(u, 1), S)
    k_tile, S = gl.broadcast(gl.expand_dims(k, 0), S)
    return gl.fma(u_tile, k_tile, S)



@gluon.jit
def view_as(smem, TYPE: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr, LAYOUT: gl.constexpr):
    """Shared memory as [rows, columns] of another type; a LAYOUT of one dimension lets rows be picked at run time."""
    if PUBLIC_REINTERPRET:
        view = smem.reinterpret(TYPE, [rows, columns], LAYOUT)
    else:
        view = smem._reinterpret(TYPE, [rows, columns], LAYOUT)
    return view


@gluon.jit
def table(flat, rows: gl.constexpr, columns: gl.constexpr):
    """Flat shared memory as [rows, columns]."""
    return view_as(flat, flat.dtype, rows, columns, gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))


@gluon.jit
def row_of(flat, n, rows: gl.constexpr, columns: gl.constexpr):
    """Row n of flat shared memory seen as [rows, columns]."""
    return view_as(flat, flat.dtype, rows, columns, gl.SwizzledSharedLayout(1, 1, 1, order=[0])).index(n)


@gluon.jit
def stage_rows(
    keys_at, values_at, gates_at, decay_at, beta_at, ring_k, ring_v, ring_g, ring_beta, start, first, count, ring_len,
    K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_L: gl.constexpr, KDA: gl.constexpr,
    NORM: gl.constexpr,
):
    """Put the `count` <= BLOCK_L rows from logical row `first` into shared memory, the youngest first."""
    WARPS: gl.constexpr = gl.num_warps()
    SCORES: gl.constexpr = scores_layout(BLOCK_L, K, WARPS, KDA)
    VALUES: gl.constexpr = values_layout(BLOCK_L, BLOCK_V, WARPS)
    i = gl.arange(0, BLOCK_L, layout=gl.SliceLayout(1, VALUES))
    values = gl.load(ring_v + gl.expand_dims(row_of_age(start + first, count, i, ring_len), 1) * V
                     + gl.expand_dims(gl.arange(0, BLOCK_V, layout=gl.SliceLayout(0, VALUES)), 0),
                     mask=gl.expand_dims(i < count, 1), other=0.0)
    j = gl.arange(0, BLOCK_L, layout=gl.SliceLayout(1, SCORES))
    row = row_of_age(start + first, count, j, ring_len)
    beta = gl.load(ring_beta + row, mask=j < count, other=0.0)
    inner = gl.expand_dims(row, 1) * K + gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, SCORES)), 0)
    live = gl.expand_dims(j < count, 1)
    keys = gl.load(ring_k + inner, mask=live, other=0.0).to(gl.float32)
    if KDA:
        gates = gl.load(ring_g + inner, mask=live, other=0.0)
        table(gates_at, BLOCK_L, K).store(gl.exp(gates))
    else:
        decay_at.store(gl.exp(gl.load(ring_g + row, mask=j < count, other=0.0)))
    beta_at.store(beta)
    table(keys_at, BLOCK_L, K).store(keys * gl.expand_dims(inverse_norm(keys, 1, NORM), 1))
    table(values_at, BLOCK_L, BLOCK_V).store(values.to(values_at.dtype))


@gluon.jit
def replay_rows(
    S, keys_at, values_at, gates_at, decay_at, beta_at, count,
    K: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_L: gl.constexpr, KDA: gl.constexpr, TILE: gl.constexpr,
):
    """Fold `count` staged rows into the tile S, token by token, the oldest (staged last) first."""
    IN_K: gl.constexpr = gl.SliceLayout(0, TILE)
    IN_V: gl.constexpr = gl.SliceLayout(1, TILE)
    # Before the loop, else the compiler puts a barrier into every iteration.
    barrier()
    v = row_of(values_at, count - 1, BLOCK_L, BLOCK_V).load(IN_V)
    beta = row_of(beta_at, count - 1, BLOCK_L, 1).load(IN_V)
    for j in range(count):
        n = count - 1 - j
        older = gl.maximum(n - 1, 0)
        v_next = row_of(values_at, older, BLOCK_L, BLOCK_V).load(IN_V)
        beta_next = row_of(beta_at, older, BLOCK_L, 1).load(IN_V)
        if KDA:
            decay = gl.expand_dims(row_of(gates_at, n, BLOCK_L, K).load(IN_K), 0)
        else:
            decay = gl.expand_dims(row_of(decay_at, n, BLOCK_L, 1).load(IN_V), 1)
        S = recur(S, decay, row_of(keys_at, n, BLOCK_L, K).load(IN_K), v.to(gl.float32), beta, TILE)
        v = v_next
        beta = beta_next
    return S
