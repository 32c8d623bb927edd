"""Stepwise decoding for Hopper: the step kernels' tile and recurrence, the state read and written every token."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .gluon_common import inverse_norm, log_decay, recur, sigmoid, sum_k
from .gluon_layouts import scores_layout, tile_layout


@gluon.jit(do_not_specialize=["num_slots", "pad_slot_id"])
def delta_stepwise_kernel(
        q, k, v, g, beta, A_log, dt_bias, state, slot_indices, out, num_slots, pad_slot_id, scale, lower_bound,
        stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
        stride_g_token, stride_g_head, stride_beta_token, stride_beta_head, stride_out_token, stride_out_head,
        chunks_state_slot, chunks_state_head,
        HV: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr,
        KDA: gl.constexpr, RAW: gl.constexpr, HAS_BIAS: gl.constexpr,
        BOUNDED: gl.constexpr, NORM: gl.constexpr):
    WARPS: gl.constexpr = gl.num_warps()
    BITS: gl.constexpr = state.dtype.element_ty.primitive_bitwidth
    TILE: gl.constexpr = tile_layout(BITS, BLOCK_V, WARPS)
    IN_K: gl.constexpr = gl.SliceLayout(0, TILE)
    # The keys' norm is summed as a flush sums it.
    IN_NORM: gl.constexpr = gl.SliceLayout(0, scores_layout(4, K, WARPS, KDA))
    TILES: gl.constexpr = V // BLOCK_V

    gdc_wait()
    gdc_launch_dependents()
    pid = gl.program_id(0)
    tile = pid % TILES
    head = ((pid // TILES) % HV).to(gl.int64)
    token = (pid // (TILES * HV)).to(gl.int64)
    slot = gl.load(slot_indices + token).to(gl.int64)
    rows = gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, TILE))
    out_at = out + token * stride_out_token + head * stride_out_head + tile * BLOCK_V + rows
    if (slot == pad_slot_id) | (slot < 0) | (slot >= num_slots):
        gl.store(out_at, gl.full([BLOCK_V], 0.0, out.dtype.element_ty, layout=rows.type.layout))
    else:
        k_head = head // GROUP
        state += (slot * chunks_state_slot + head * chunks_state_head) * (128 // BITS) + tile * BLOCK_V * K
        inner = gl.expand_dims(rows, 1) * K + gl.expand_dims(gl.arange(0, K, layout=IN_K), 0)
        S = gl.load(state + inner)
        cols = gl.arange(0, K, layout=IN_NORM)
        offs_k = gl.arange(0, K, layout=IN_K)
        k += token * stride_k_token + k_head * stride_k_head
        k_norm = gl.load(k + cols).to(gl.float32)
        k_now = gl.load(k + offs_k).to(gl.float32)
        q_now = gl.load(q + token * stride_q_token + k_head * stride_q_head + offs_k).to(gl.float32)
        v_now = gl.load(v + token * stride_v_token + head * stride_v_head + tile * BLOCK_V + rows).to(gl.float32)
        b = gl.load(beta + token * stride_beta_token + head * stride_beta_head).to(gl.float32)
        a_log = 0.0
        bias = 0.0
        if KDA:
            decay = gl.load(g + token * stride_g_token + head * stride_g_head + cols).to(gl.float32)
            if HAS_BIAS:
                bias = gl.load(dt_bias + head * K + cols).to(gl.float32)
        else:
            decay = gl.load(g + token * stride_g_token + head * stride_g_head).to(gl.float32)
            if HAS_BIAS:
                bias = gl.load(dt_bias + head).to(gl.float32)
        if RAW:
            a_log = gl.load(A_log + head).to(gl.float32)
            decay = log_decay(decay, a_log, bias, lower_bound, BOUNDED)
            b = sigmoid(b)
        decay = gl.exp(decay)
        if KDA:
            decay = gl.expand_dims(gl.convert_layout(decay, IN_K), 0)
        k_now = k_now * inverse_norm(k_norm, 0, NORM)
        q_now = q_now * (inverse_norm(q_now, 0, NORM) * scale)
        S = recur(S.to(gl.float32), decay, k_now, v_now, b, TILE)
        gl.store(state + inner, S.to(state.dtype.element_ty))
        o = sum_k(S * gl.expand_dims(q_now, 0), TILE)
        gl.store(out_at, o.to(out.dtype.element_ty))
