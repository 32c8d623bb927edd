"""What the ring's rows add to the outputs of a Mamba-2 step with a read copy, in fp32; rows are named by age."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_window_parts import add, wrap


@gluon.constexpr_function
def threads_layout(width, warps):
    """[threads, width]: `width` neighbouring state rows of one head in every thread."""
    return gl.BlockedLayout([1, width], [32, 1], [warps, 1], [1, 0])


@gluon.constexpr_function
def weights_layout(rows, warps):
    """[ring rows, heads]: rows on neighbouring lanes."""
    lanes = min(rows, 32)
    return gl.BlockedLayout([rows // lanes, 1], [lanes, 32 // lanes], [1, warps], [0, 1])


@gluon.constexpr_function
def ring_B_layout(d_state, warps):
    """[ring rows, K]: whole rows read by neighbouring lanes, 8 elements each."""
    lanes = min(d_state // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def load_rows_B(B_ptr, ring_B_ptr, start, live, ROWS: gl.constexpr, N: gl.constexpr, R: gl.constexpr):
    """B by age: the new token's first, then the committed rows' from the youngest on; zeros past `live`."""
    LB: gl.constexpr = ring_B_layout(N, gl.num_warps())
    age = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LB))
    k = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, LB)), 0)
    row_ptrs = gl.where(age == 0, B_ptr, ring_B_ptr + wrap(start + live - age, R) * N)
    return gl.load(gl.expand_dims(row_ptrs, 1) + k, mask=gl.expand_dims(age <= live, 1), other=0.0, volatile=True)


@gluon.jit
def load_rows_dt(ring_dt_ptrs, start, live, ROWS: gl.constexpr, R: gl.constexpr):
    """dt of the committed rows by age, [ROWS, heads], and of the rows younger by one; zeros where there is none."""
    L: gl.constexpr = weights_layout(ROWS, gl.num_warps())
    age = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, L)), 1)
    heads = gl.expand_dims(ring_dt_ptrs, 0)
    own = gl.load(heads + wrap(start + live - age, R), mask=(age > 0) & (age <= live), other=0.0, volatile=True)
    younger = gl.load(heads + wrap(start + live + 1 - age, R), mask=(age > 1) & (age <= live), other=0.0, volatile=True)
    return own, younger


@gluon.jit
def load_rows_x(
    x_ptrs, ring_x_ptrs, start, live,
    FIRST: gl.constexpr, COUNT: gl.constexpr, P: gl.constexpr, R: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """x of COUNT rows by age from FIRST on, [COUNT, threads, WIDTH]; the new token has age 0.

    In place of rows past `live`, which weigh nothing but may hold NaN, the oldest (or the new token) is read, unmasked.
    """
    L3: gl.constexpr = rows_x_layout(COUNT, WIDTH, gl.num_warps())
    LT: gl.constexpr = gl.SliceLayout(2, L3)
    age = FIRST + gl.expand_dims(gl.arange(0, COUNT, layout=gl.SliceLayout(1, LT)), 1)
    new = gl.convert_layout(x_ptrs, gl.SliceLayout(0, LT), assert_trivial=True)
    old = gl.where(live > 0, gl.convert_layout(ring_x_ptrs, gl.SliceLayout(0, LT), assert_trivial=True), new)
    position = wrap(gl.where(live > 0, start, 0) + live - gl.minimum(age, live), R)
    ptrs = gl.where(age == 0, gl.expand_dims(new, 0), gl.expand_dims(old, 0) + position * P)
    e = gl.expand_dims(gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, L3))), 0), 1)
    return gl.load(gl.expand_dims(ptrs, 2) + e, volatile=True)


@gluon.constexpr_function
def rows_x_layout(rows, width, warps):
    """[ring rows, threads, width]: a thread has all rows."""
    return gl.BlockedLayout([rows, 1, width], [1, 32, 1], [1, warps, 1], [2, 0, 1])


@gluon.jit
def weigh_rows(B, C, dt, own, younger, A, D, live):
    """What each row weighs in the outputs by age [ROWS, heads], the new token first; the checkpoint's decay [heads].

    Decays come from sums over the younger rows, never from differences, so their error is relative to the exponent.
    """
    L: gl.constexpr = own.type.layout
    score = gl.sum(B.to(gl.float32) * gl.expand_dims(C.to(gl.float32), 0), 1)
    score = gl.expand_dims(gl.convert_layout(score, gl.SliceLayout(1, L)), 1)
    age = gl.expand_dims(gl.arange(0, own.shape[0], layout=gl.SliceLayout(1, L)), 1)
    new = gl.expand_dims(dt, 0)
    later = gl.associative_scan(gl.where((age == 1) & (age <= live), new, younger), 0, add)
    own = gl.where(age == 0, new, own)
    weight = gl.exp(gl.expand_dims(A, 0) * later) * own * score
    return weight + gl.where(age == 0, gl.expand_dims(D, 0), 0.0), gl.exp(A * gl.sum(own, 0))


@gluon.jit
def own_weights(weight, own_head, L2: gl.constexpr):
    """Each thread's weights, of its head in the table [ROWS, heads], in parts of 8 rows: a tuple of [8, threads]."""
    ROWS: gl.constexpr = weight.shape[0]
    THREADS: gl.constexpr = own_head.shape[0]
    LT: gl.constexpr = gl.SliceLayout(2, rows_x_layout(ROWS, 1, gl.num_warps()))
    head = gl.expand_dims(gl.convert_layout(own_head, gl.SliceLayout(0, LT), assert_trivial=True), 0)
    own = gl.gather(weight, head + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, LT)), 1) * 0, 1)
    parts = (own,)
    for level in gl.static_range((ROWS // 8).bit_length() - 1):
        halves = ()
        for i in gl.static_range(len(parts)):
            pair = gl.reshape(parts[i], [2, ROWS >> (level + 1), THREADS])
            first, second = gl.split(gl.permute(pair, [1, 2, 0]))
            halves = halves + (first, second)
        parts = halves
    return parts


@gluon.jit
def widened(x):
    """fp32 of 16-bit x [.., WIDTH], neighbours in a thread."""
    if (x.dtype == gl.bfloat16) & (x.shape[2] > 1):
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=&r,=&r,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(gl.float32)


@gluon.jit
def ring_sums(x, weight):
    """A part of the ring's rows times their weights: [threads, WIDTH]."""
    LT: gl.constexpr = gl.SliceLayout(2, x.type.layout)
    weight = gl.expand_dims(gl.convert_layout(weight, LT, assert_trivial=True), 2)
    return gl.sum(widened(x) * weight, 0)


@gluon.jit
def add_rows(
    x, weights, live, x_ptrs, ring_x_ptrs, start,
    ROWS: gl.constexpr, P: gl.constexpr, R: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """All rows times their weights, [threads, WIDTH]: eights `x` that are on their way, the others where there are any.

    If that is one eight, the next is asked for before it is waited for.
    """
    AHEAD: gl.constexpr = len(x)
    if AHEAD == 0:
        x = (load_rows_x(x_ptrs, ring_x_ptrs, start, live, 0, 8, P, R, WIDTH),)
    if (AHEAD == 1) & (ROWS > 8):
        if live >= 8:
            later = load_rows_x(x_ptrs, ring_x_ptrs, start, live, 8, 8, P, R, WIDTH)
            y = ring_sums(x[0], weights[0]) + ring_sums(later, weights[1])
        else:
            y = ring_sums(x[0], weights[0])
    else:
        y = ring_sums(x[0], weights[0])
        for i in gl.static_range(1, AHEAD):
            y += ring_sums(x[i], weights[i])
    for i in gl.static_range(AHEAD + (AHEAD < 2), ROWS // 8):
        if live >= i * 8:
            y += ring_sums(load_rows_x(x_ptrs, ring_x_ptrs, start, live, i * 8, 8, P, R, WIDTH), weights[i])
    return y


@gluon.jit
def gated(y, z):
    """y silu(z), by the approximations of e^x and 1 / x that are good for fp32's last bits."""
    z = z.to(gl.float32)
    sigmoid = gl.inline_asm_elementwise(
        """{
        .reg .f32 t;
        mul.f32 t, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 t, t;
        add.f32 t, t, 0f3F800000;
        rcp.approx.ftz.f32 $0, t;
        }""",
        "=f,f", [z], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    return y * (z * sigmoid)
