"""Device functions of the Mamba-2 Gluon kernels: writing the new token to the ring."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.mamba2.gluon_parts import softplus


@gluon.jit
def append_B(B, ring_B_ptr, live, end, ROWS: gl.constexpr, N: gl.constexpr, LB: gl.constexpr):
    """Write the tile's new row at ring position `end`."""
    k = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, LB)), 0)
    r = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, LB)), 1)
    gl.store(ring_B_ptr + end * N + k + r * 0, B, mask=r == live)


@gluon.jit
def append_x(x, ring_x_ptrs, live, end, first_v, P: gl.constexpr, LX: gl.constexpr):
    """Write the tile's new row at ring position `end`."""
    LH: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LX))
    r = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, gl.SliceLayout(2, LX)))
    r = gl.expand_dims(gl.expand_dims(r, 1), 2)
    v = first_v + gl.arange(0, x.shape[2], layout=gl.SliceLayout(0, gl.SliceLayout(0, LX)))
    heads = gl.expand_dims(gl.convert_layout(ring_x_ptrs, LH, assert_trivial=True), 0)
    ptrs = gl.expand_dims(heads, 2) + (end * P + gl.expand_dims(gl.expand_dims(v, 0), 0)) + r * 0
    gl.store(ptrs, x, mask=r == live)


@gluon.jit
def append_token(
    row, share, x_ptr, dt_ptr, B_ptr, dt_bias_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr, cursors_ptr, slot_indices_ptr,
    num_slots, pad_slot_id, x_head, B_group, ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot,
    ring_dt_head,
    H: gl.constexpr, G: gl.constexpr, P: gl.constexpr, N: gl.constexpr, R: gl.constexpr, HEADS: gl.constexpr,
    HAS_BIAS: gl.constexpr, SOFTPLUS: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Append one row's token to its ring: x and dt of HEADS heads, and B of their groups."""
    LT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NUM_WARPS, 1], [1, 0])
    slot = gl.load(slot_indices_ptr + row)
    if (slot == pad_slot_id) | (slot < 0) | (slot >= num_slots):
        return
    base = slot.to(gl.int64)
    start = gl.load(cursors_ptr + base * 4)
    committed = gl.load(cursors_ptr + base * 4 + 1)
    end = gl.where(start + committed >= R, start + committed - R, start + committed)
    BLOCK_H: gl.constexpr = 1 << (HEADS - 1).bit_length()
    BLOCK_P: gl.constexpr = 1 << (P - 1).bit_length()
    BLOCK_G: gl.constexpr = 1 << (G - 1).bit_length()
    i = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, LT))
    h = (share * HEADS + i).to(gl.int64)
    p = gl.expand_dims(gl.arange(0, BLOCK_P, layout=gl.SliceLayout(0, LT)), 0)
    ok = gl.expand_dims(i < HEADS, 1) & (p < P)
    x = gl.load(x_ptr + gl.expand_dims(h * x_head, 1) + p, mask=ok)
    raw = gl.load(dt_ptr + h, mask=i < HEADS, other=0.0).to(gl.float32)
    if HAS_BIAS:
        raw += gl.load(dt_bias_ptr + h, mask=i < HEADS, other=0.0).to(gl.float32)
    if SOFTPLUS:
        raw = softplus(raw)
    ring_x = ring_x_ptr + base * ring_x_slot + end * P
    gl.store(ring_x + gl.expand_dims(h * ring_x_head, 1) + p, x, mask=ok)
    gl.store(ring_dt_ptr + base * ring_dt_slot + end + h * ring_dt_head, raw, mask=i < HEADS)
    if share == 0:
        g = gl.arange(0, BLOCK_G, layout=gl.SliceLayout(1, LT))
        k = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, LT)), 0)
        B_ok = gl.expand_dims(g < G, 1)
        g = g.to(gl.int64)
        B = gl.load(B_ptr + gl.expand_dims(g * B_group, 1) + k, mask=B_ok)
        ring_B = ring_B_ptr + base * ring_B_slot + end * N
        gl.store(ring_B + gl.expand_dims(g * ring_B_group, 1) + k + gl.expand_dims(g * 0, 1), B, mask=B_ok)


@gluon.jit
def append_window(
    row, share, x_ptr, dt_ptr, B_ptr, dt_bias_ptr, ring_x_ptr, ring_B_ptr, ring_dt_ptr, cursors_ptr, slot_indices_ptr,
    query_start_loc_ptr, num_slots, pad_slot_id, x_token, x_head, dt_token, dt_head, B_token, B_group,
    ring_x_slot, ring_x_head, ring_B_slot, ring_B_group, ring_dt_slot, ring_dt_head,
    H: gl.constexpr, G: gl.constexpr, P: gl.constexpr, N: gl.constexpr, R: gl.constexpr, HEADS: gl.constexpr,
    TOKENS: gl.constexpr, HAS_BIAS: gl.constexpr, SOFTPLUS: gl.constexpr,
):  # fmt: skip
    """Append a row's window to its ring: x and dt of HEADS heads, and a share of B; tokens run fastest."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    slot = gl.load(slot_indices_ptr + row)
    if (slot == pad_slot_id) | (slot < 0) | (slot >= num_slots):
        return
    base = slot.to(gl.int64)
    first = gl.load(query_start_loc_ptr + row)
    length = gl.load(query_start_loc_ptr + row + 1) - first
    first = first.to(gl.int64)
    end = gl.load(cursors_ptr + base * 4) + gl.load(cursors_ptr + base * 4 + 1)
    BLOCK_H: gl.constexpr = 1 << (HEADS - 1).bit_length()
    BLOCK_P: gl.constexpr = 1 << (P - 1).bit_length()
    BLOCK_G: gl.constexpr = 1 << (G - 1).bit_length()
    i = gl.arange(0, BLOCK_H * TOKENS, layout=gl.SliceLayout(1, L))
    token, h = i % TOKENS, share * HEADS + i // TOKENS
    at = (end + token) % R
    inside = (token < length) & (i < HEADS * TOKENS)
    p = gl.expand_dims(gl.arange(0, BLOCK_P, layout=gl.SliceLayout(0, L)), 0)
    ok = gl.expand_dims(inside, 1) & (p < P)
    x = gl.load(x_ptr + first * x_token + (gl.expand_dims(token * x_token + h * x_head, 1) + p), mask=ok)
    dt = gl.load(dt_ptr + first * dt_token + (token * dt_token + h * dt_head), mask=inside, other=0.0).to(gl.float32)
    if HAS_BIAS:
        dt += gl.load(dt_bias_ptr + h, mask=inside, other=0.0).to(gl.float32)
    if SOFTPLUS:
        dt = softplus(dt)
    gl.store(ring_x_ptr + base * ring_x_slot + (gl.expand_dims(h * ring_x_head + at * P, 1) + p), x, mask=ok)
    gl.store(ring_dt_ptr + base * ring_dt_slot + (h * ring_dt_head + at), dt, mask=inside)
    if share == 0:
        j = gl.arange(0, BLOCK_G * TOKENS, layout=gl.SliceLayout(1, L))
        token_B, g = j % TOKENS, j // TOKENS
        at_B = (end + token_B) % R
        k = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, L)), 0)
        ok_B = gl.expand_dims((token_B < length) & (g < G), 1)
        B = gl.load(B_ptr + first * B_token + (gl.expand_dims(token_B * B_token + g * B_group, 1) + k), mask=ok_B)
        gl.store(ring_B_ptr + base * ring_B_slot + (gl.expand_dims(g * ring_B_group + at_B * N, 1) + k), B, mask=ok_B)
