"""Gated DeltaNet and Kimi Delta Attention: the plain recurrence, token by token.

Yang et al. 2024, "Gated Delta Networks", eq. 10; Kimi Team 2025, "Kimi Linear", eq. 1 (a decay for every column of
the state). Computes in float32, or in float64 if `state` is float64. Shapes: HK k-heads, HV v-heads, K = head_k_dim,
V = head_v_dim, R = ring_len; v-head h uses k-head `h // (HV / HK)`. GDN's gates have no K dimension, KDA's have.
Every op writes its outputs in place and returns None.
"""

from __future__ import annotations

import torch

from replayssm.cursors import must_flush
from replayssm.ops.delta.gates import l2norm, log_decay_and_beta
from replayssm.ops.rows import compute_dtype, is_pad, iterate_rows
from replayssm.ops.stored import StoredState, read_copy


def delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    ring_k: torch.Tensor,
    ring_v: torch.Tensor,
    ring_u: torch.Tensor,
    ring_g: torch.Tensor,
    ring_beta: torch.Tensor,
    cursors: torch.Tensor,
    slot_indices: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    out: torch.Tensor,
    *,
    buffer_len: int,
    pad_slot_id: int,
    scale: float,
    use_qk_l2norm: bool,
    lower_bound: float | None,
    max_window_len: int,
    parents: torch.Tensor | None = None,
    read_codes: torch.Tensor | None = None,
    read_scales: torch.Tensor | None = None,
    read_global: torch.Tensor | None = None,
    state_scales: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    stream: int = 0,
) -> None:
    """Append a window of tokens to the ring and compute their outputs; a full row first flushes its ring.

    In: q, k [T, HK, K]; v [T, HV, V]; g [T, HV] or [T, HV, K]; beta [T, HV]; A_log, dt_bias as in
    `replayssm.ops.delta.gates`; cursors [S, 4] int32; slot_indices [batch] int32; query_start_loc [batch + 1] int32
    (None: one token a row); parents [T] int32: index of each token's parent in its row's window, -1 for the last
    committed token (None: windows are chains).
    In and out: state [S, HV, V, K]; ring_k [S, HK, R, K] (before the norm); ring_v, ring_u [S, HV, R, V];
    ring_g [S, HV, R] or [S, HV, R, K] and ring_beta [S, HV, R] (processed). Out: out [T, HV, V].
    read_codes, read_scales, read_global: a read copy (`replayssm.quant`, its format by the dtype of the codes), which
    outputs and u are computed from and a flush renews; state_scales [S, HV, V] fp32, where state holds e4m3 codes;
    seeds [S] int64 and stream: a flush rounds a 16- or 8-bit state stochastically (`replayssm.rounding`).
    """
    g, beta = log_decay_and_beta(g, beta, A_log, dt_bias, lower_bound, compute_dtype(state))
    stored = StoredState(state, state_scales, read_copy(read_codes, read_scales, read_global), seeds, cursors, stream)
    for slot, tokens in iterate_rows(slot_indices, query_start_loc):
        if is_pad(slot, len(state), pad_slot_id):
            out[tokens] = 0
            continue
        start, num_committed, limit, _ = cursors[slot].tolist()
        at = slot_indices.new_tensor([slot]).long()
        committed = (slot, start, num_committed, ring_k, ring_v, ring_g, ring_beta, use_qk_l2norm)
        if must_flush(num_committed, len(tokens), buffer_len, limit):
            stored.write(at, _replay(stored.checkpoint(at)[0], *committed)[None])
            S = stored.for_reads(at)[0]
        else:
            S = _replay(stored.for_reads(at)[0], *committed)
        after: dict[int, torch.Tensor] = {-1: S}
        for i, t in enumerate(tokens):
            S = after[i - 1 if parents is None else int(parents[t])]
            S, u = _update(S, k[t], v[t], g[t], beta[t], use_qk_l2norm)
            after[i] = S
            out[t] = _output(S, q[t], scale, use_qk_l2norm)
            position = (start + num_committed + i) % ring_k.shape[2]
            rows = {ring_k: k[t], ring_v: v[t], ring_u: u, ring_g: g[t], ring_beta: beta[t]}
            for ring, row in rows.items():
                ring[slot, :, position] = row.to(ring.dtype)


def delta_stepwise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    slot_indices: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    out: torch.Tensor,
    *,
    pad_slot_id: int,
    scale: float,
    use_qk_l2norm: bool,
    lower_bound: float | None,
    max_window_len: int,
    cursors: torch.Tensor | None = None,
    state_scales: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    stream: int = 0,
) -> None:
    """Ordinary decoding: read, update and write the state for every token (rounded to its format each time).

    In: as `delta_step`. With seeds, token i of a row rounds as if i flushes more had been made than cursors count.
    """
    g, beta = log_decay_and_beta(g, beta, A_log, dt_bias, lower_bound, compute_dtype(state))
    stored = StoredState(state, state_scales, None, seeds, cursors, stream)
    for slot, tokens in iterate_rows(slot_indices, query_start_loc):
        if is_pad(slot, len(state), pad_slot_id):
            out[tokens] = 0
            continue
        at = slot_indices.new_tensor([slot]).long()
        for i, t in enumerate(tokens):
            S, _ = _update(stored.checkpoint(at)[0], k[t], v[t], g[t], beta[t], use_qk_l2norm)
            stored.write(at, S[None], offset=i)
            out[t] = _output(S, q[t], scale, use_qk_l2norm)


def delta_materialize(
    state: torch.Tensor,
    ring_k: torch.Tensor,
    ring_v: torch.Tensor,
    ring_g: torch.Tensor,
    ring_beta: torch.Tensor,
    cursors: torch.Tensor,
    slot_indices: torch.Tensor,
    num_tokens: torch.Tensor | None,
    dst: torch.Tensor,
    dst_indices: torch.Tensor,
    *,
    pad_slot_id: int,
    use_qk_l2norm: bool,
) -> None:
    """Write the state after the first `num_tokens` (None: all) committed rows to `dst[dst_indices]`.

    In: as `delta_step`; num_tokens [batch] int32, at most num_committed. Out: dst [S', HV, V, K], which may be `state`
    itself with `dst_indices == slot_indices` (a flush in place; the caller moves the cursors).
    """
    for row, slot in enumerate(slot_indices.tolist()):
        if is_pad(slot, len(state), pad_slot_id):
            continue
        start, count, _, _ = cursors[slot].tolist()
        count = count if num_tokens is None else min(count, int(num_tokens[row]))
        S = state[slot].to(compute_dtype(state))
        S = _replay(S, slot, start, count, ring_k, ring_v, ring_g, ring_beta, use_qk_l2norm)
        dst[int(dst_indices[row])] = S.to(dst.dtype)


def _replay(
    S: torch.Tensor,
    slot: int,
    start: int,
    count: int,
    ring_k: torch.Tensor,
    ring_v: torch.Tensor,
    ring_g: torch.Tensor,
    ring_beta: torch.Tensor,
    use_qk_l2norm: bool,
) -> torch.Tensor:
    for j in range(count):
        row = (slot, slice(None), (start + j) % ring_k.shape[2])
        S, _ = _update(S, ring_k[row], ring_v[row], ring_g[row], ring_beta[row], use_qk_l2norm)
    return S


def _update(
    S: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, use_qk_l2norm: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v, g, beta = (t.to(S.dtype) for t in (k, v, g, beta))
    k = (l2norm(k) if use_qk_l2norm else k).repeat_interleave(len(S) // len(k), dim=0)
    decay = g.exp()[:, None, None] if g.dim() == 1 else g.exp()[:, None, :]
    S = S * decay
    u = beta[:, None] * (v - torch.einsum("hvk,hk->hv", S, k))
    return S + u[:, :, None] * k[:, None, :], u


def _output(S: torch.Tensor, q: torch.Tensor, scale: float, use_qk_l2norm: bool) -> torch.Tensor:
    q = q.to(S.dtype)
    q = (l2norm(q) if use_qk_l2norm else q).repeat_interleave(len(S) // len(q), dim=0)
    return torch.einsum("hvk,hk->hv", S, q * scale)
