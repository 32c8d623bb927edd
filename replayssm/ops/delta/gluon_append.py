"""Programs that write the new tokens to the rings, at the end of a launch: one burst instead of writes among reads."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_common import log_decay, sigmoid, wrap


@gluon.jit
def append_token(
    row, share, k, v, g, beta, A_log, dt_bias, ring_k, ring_v, ring_g, ring_beta, cursors, slot_indices,
    num_slots, ring_len, pad_slot_id, lower_bound,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head, stride_g_token, stride_g_head, stride_beta_token,
    stride_beta_head, stride_rk_slot, stride_rk_head, stride_rv_slot, stride_rv_head, stride_rg_slot, stride_rg_head,
    stride_rb_slot, stride_rb_head,
    HK: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SHARES: gl.constexpr, KDA: gl.constexpr,
    RAW: gl.constexpr, HAS_BIAS: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """Append one row's token: v, gates and beta of one of SHARES parts of the v-heads, k of as many of the k-heads."""
    PART_V: gl.constexpr = (HV + SHARES - 1) // SHARES
    PART_K: gl.constexpr = (HK + SHARES - 1) // SHARES
    BLOCK_HV: gl.constexpr = 1 << (PART_V - 1).bit_length()
    BLOCK_HK: gl.constexpr = 1 << (PART_K - 1).bit_length()
    LANES: gl.constexpr = 16 if K >= 128 else 8
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    slot = gl.load(slot_indices + row).to(gl.int64)
    if (slot != pad_slot_id) & (slot >= 0) & (slot < num_slots):
        new = wrap(gl.load(cursors + slot * 4) + gl.load(cursors + slot * 4 + 1), ring_len)
        i = gl.arange(0, BLOCK_HV, layout=gl.SliceLayout(1, L))
        head = share * PART_V + i
        mine = (i < PART_V) & (head < HV)
        j = gl.arange(0, BLOCK_HK, layout=gl.SliceLayout(1, L))
        k_head = share * PART_K + j
        mine_k = gl.expand_dims((j < PART_K) & (k_head < HK), 1)
        mine_v = gl.expand_dims(mine, 1)
        in_v = gl.expand_dims(gl.arange(0, V, layout=gl.SliceLayout(0, L)), 0)
        in_k = gl.expand_dims(gl.arange(0, K, layout=gl.SliceLayout(0, L)), 0)
        v_new = gl.load(v + row * stride_v_token + (gl.expand_dims(head * stride_v_head, 1) + in_v), mask=mine_v)
        k_new = gl.load(k + row * stride_k_token + (gl.expand_dims(k_head * stride_k_head, 1) + in_k), mask=mine_k)
        b = gl.load(beta + row * stride_beta_token + head * stride_beta_head, mask=mine, other=0.0).to(gl.float32)
        a_log = 0.0
        bias = 0.0
        if KDA:
            decay = gl.load(g + row * stride_g_token + (gl.expand_dims(head * stride_g_head, 1) + in_k), mask=mine_v,
                            other=0.0).to(gl.float32)
            if RAW:
                a_log = gl.expand_dims(gl.load(A_log + head, mask=mine, other=0.0).to(gl.float32), 1)
            if HAS_BIAS:
                bias = gl.load(dt_bias + (gl.expand_dims(head * K, 1) + in_k), mask=mine_v, other=0.0).to(gl.float32)
        else:
            decay = gl.load(g + row * stride_g_token + head * stride_g_head, mask=mine, other=0.0).to(gl.float32)
            if RAW:
                a_log = gl.load(A_log + head, mask=mine, other=0.0).to(gl.float32)
            if HAS_BIAS:
                bias = gl.load(dt_bias + head, mask=mine, other=0.0).to(gl.float32)
        if RAW:
            b = sigmoid(b)
            decay = log_decay(decay, a_log, bias, lower_bound, BOUNDED)
        at_head = head.to(gl.int64)
        at_k = gl.expand_dims(k_head.to(gl.int64) * stride_rk_head + new * K, 1) + in_k
        ring_v += slot * stride_rv_slot
        ring_k += slot * stride_rk_slot
        ring_g += slot * stride_rg_slot
        gl.store(ring_v + (gl.expand_dims(at_head * stride_rv_head + new * V, 1) + in_v), v_new, mask=mine_v)
        gl.store(ring_k + at_k, k_new, mask=mine_k)
        gl.store(ring_beta + slot * stride_rb_slot + at_head * stride_rb_head + new, b, mask=mine)
        if KDA:
            gl.store(ring_g + (gl.expand_dims(at_head * stride_rg_head + new * K, 1) + in_k), decay, mask=mine_v)
        else:
            gl.store(ring_g + at_head * stride_rg_head + new, decay, mask=mine)
