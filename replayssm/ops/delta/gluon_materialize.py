"""Materialize for Hopper: the flush of the step kernel, written elsewhere; bit-equal to it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon_common import replay_rows, stage_rows
from .gluon_layouts import tile_layout


@gluon.jit(do_not_specialize=["num_slots", "num_dst_slots", "ring_len", "pad_slot_id"])
def delta_materialize_kernel(
        state, ring_k, ring_v, ring_g, ring_beta, cursors, slot_indices, num_tokens, dst, dst_indices,
        num_slots, num_dst_slots, ring_len, pad_slot_id, chunks_state_slot, chunks_state_head,
        stride_rk_slot, stride_rk_head, stride_rv_slot, stride_rv_head, stride_rg_slot, stride_rg_head,
        stride_rb_slot, stride_rb_head, stride_dst_slot, stride_dst_head,
        HV: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BLOCK_V: gl.constexpr,
        BLOCK_L: gl.constexpr, KDA: gl.constexpr, NORM: gl.constexpr, ALL_ROWS: gl.constexpr):
    BITS: gl.constexpr = state.dtype.element_ty.primitive_bitwidth
    TILE: gl.constexpr = tile_layout(BITS, BLOCK_V, gl.num_warps())
    TILES: gl.constexpr = V // BLOCK_V
    pid = gl.program_id(0)
    tile = pid % TILES
    head = ((pid // TILES) % HV).to(gl.int64)
    row = (pid // (TILES * HV)).to(gl.int64)
    slot = gl.load(slot_indices + row).to(gl.int64)
    target = gl.load(dst_indices + row).to(gl.int64)
    owned = (slot != pad_slot_id) & (slot >= 0) & (slot < num_slots)
    if owned & (target >= 0) & (target < num_dst_slots):
        offs_v = tile * BLOCK_V + gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, TILE))
        offs_k = gl.arange(0, K, layout=gl.SliceLayout(0, TILE))
        inner = gl.expand_dims(offs_v, 1) * K + gl.expand_dims(offs_k, 0)
        S = gl.load(state + (slot * chunks_state_slot + head * chunks_state_head) * (128 // BITS) + inner)
        S = S.to(gl.float32)
        start = gl.load(cursors + slot * 4)
        count = gl.load(cursors + slot * 4 + 1)
        if not ALL_ROWS:
            count = gl.minimum(count, gl.load(num_tokens + row))
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        keys_at = gl.allocate_shared_memory(gl.float32, [BLOCK_L * K], FLAT)
        gates_at = keys_at
        if KDA:
            gates_at = gl.allocate_shared_memory(gl.float32, [BLOCK_L * K], FLAT)
        values_at = gl.allocate_shared_memory(gl.float32, [BLOCK_L * BLOCK_V], FLAT)
        decay_at = gl.allocate_shared_memory(gl.float32, [BLOCK_L], FLAT)
        beta_at = gl.allocate_shared_memory(gl.float32, [BLOCK_L], FLAT)
        for base in range(0, count, BLOCK_L):
            some_rows = gl.minimum(BLOCK_L, count - base)
            stage_rows(keys_at, values_at, gates_at, decay_at, beta_at,
                       ring_k + slot * stride_rk_slot + (head // GROUP) * stride_rk_head,
                       ring_v + slot * stride_rv_slot + head * stride_rv_head + tile * BLOCK_V,
                       ring_g + slot * stride_rg_slot + head * stride_rg_head,
                       ring_beta + slot * stride_rb_slot + head * stride_rb_head,
                       start, base, some_rows, ring_len, K, V, BLOCK_V, BLOCK_L, KDA, NORM)
            S = replay_rows(S, keys_at, values_at, gates_at, decay_at, beta_at, some_rows, K, BLOCK_V, BLOCK_L, KDA,
                            TILE)
        gl.store(dst + target * stride_dst_slot + head * stride_dst_head + inner, S.to(dst.dtype.element_ty))
