"""Gated DeltaNet and Kimi Delta Attention in vectorised torch: the CPU backend.

Signatures and meaning as in `replayssm.ops.delta.reference`. A window of T tokens is the lower-triangular system of
DESIGN §2 (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule"), solved by forward substitution.
"""

from __future__ import annotations

import torch

from replayssm.cursors import NUM_COMMITTED, flush_mask, real_slots
from replayssm.ops import batch as rows
from replayssm.ops.delta.gates import l2norm, log_decay_and_beta
from replayssm.ops.rows import compute_dtype
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
    """See `replayssm.ops.delta.reference.delta_step`."""
    out.zero_()
    batch = rows.make_batch(slot_indices, query_start_loc, len(state), pad_slot_id, parents)
    read = read_copy(read_codes, read_scales, read_global)
    stored = StoredState(state, state_scales, read, seeds, cursors, stream)
    dtype, mine, ring_len = compute_dtype(state), cursors[batch.slots], ring_k.shape[2]
    flush = flush_mask(mine, batch.window_lens, buffer_len)
    counts = mine[:, NUM_COMMITTED]
    if flush.any():
        full = rows.committed_rows(batch.slots[flush], mine[flush], counts[flush], ring_len)
        S = _replay(stored.checkpoint(full.slots), ring_k, ring_v, ring_g, ring_beta, full, use_qk_l2norm)
        stored.write(full.slots, S)
    g, beta = log_decay_and_beta(g, beta, A_log, dt_bias, lower_bound, dtype)
    window = {n: batch.take(t, dtype) for n, t in {"k": k, "v": v, "g": g, "beta": beta}.items()}
    older = rows.committed_rows(batch.slots, mine, counts.masked_fill(flush, 0), ring_len)
    ring_rows = {n: older.take(r, dtype) for n, r in {"k": ring_k, "u": ring_u, "g": ring_g}.items()}
    queries = batch.take(q, dtype)
    queries = (l2norm(queries) if use_qk_l2norm else queries) * scale
    S = stored.for_reads(batch.slots)
    o, window["u"] = _read(S, ring_rows, older, window, batch, queries, use_qk_l2norm)
    batch.put(out, o)
    positions = rows.append_positions(mine, batch.tokens.shape[1], ring_len)
    rings = {"k": ring_k, "v": ring_v, "u": ring_u, "g": ring_g, "beta": ring_beta}
    for name, ring in rings.items():
        rows.append(ring, batch, positions, window[name])


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
    """See `replayssm.ops.delta.reference.delta_stepwise`."""
    out.zero_()
    batch = rows.make_batch(slot_indices, query_start_loc, len(state), pad_slot_id)
    stored = StoredState(state, state_scales, None, seeds, cursors, stream)
    dtype = compute_dtype(state)
    g, beta = log_decay_and_beta(g, beta, A_log, dt_bias, lower_bound, dtype)
    q, k, v, g, beta = (batch.take(t, dtype) for t in (q, k, v, g, beta))
    q, k = _heads(l2norm(q) if use_qk_l2norm else q, v), _heads(l2norm(k) if use_qk_l2norm else k, v)
    o = torch.zeros_like(v)
    for i in range(batch.tokens.shape[1]):
        here = batch.present[:, i]
        slots = batch.slots[here]
        S = stored.checkpoint(slots)
        _update_(S, k[here, i], v[here, i], g[here, i], beta[here, i])
        stored.write(slots, S, offset=i)
        o[here, i] = torch.einsum("bhvk,bhk->bhv", S, q[here, i] * scale)
    batch.put(out, o)


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
    """See `replayssm.ops.delta.reference.delta_materialize`."""
    real = real_slots(slot_indices, len(state), pad_slot_id)
    slots = slot_indices[real].long()
    mine = cursors[slots]
    counts = mine[:, NUM_COMMITTED]
    if num_tokens is not None:
        counts = torch.minimum(counts, num_tokens[real])
    committed = rows.committed_rows(slots, mine, counts, ring_k.shape[2])
    S = _replay(StoredState(state).checkpoint(slots), ring_k, ring_v, ring_g, ring_beta, committed, use_qk_l2norm)
    dst[dst_indices[real].long()] = S.to(dst.dtype)


def _replay(
    S: torch.Tensor,
    ring_k: torch.Tensor,
    ring_v: torch.Tensor,
    ring_g: torch.Tensor,
    ring_beta: torch.Tensor,
    committed: rows.Committed,
    use_qk_l2norm: bool,
) -> torch.Tensor:
    """S [b, HV, V, K], changed in place, after the committed rows; absent ones (k, g, beta = 0) change nothing."""
    k, v, g, beta = (committed.take(ring, S.dtype) for ring in (ring_k, ring_v, ring_g, ring_beta))
    k = _heads(l2norm(k) if use_qk_l2norm else k, v)
    for j in range(k.shape[1]):
        _update_(S, k[:, j], v[:, j], g[:, j], beta[:, j])
    return S


def _update_(S: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> None:
    decay = g.exp()
    S.mul_(decay[..., None, None] if g.dim() == 2 else decay[:, :, None, :])
    u = beta[..., None] * (v - (S * k[:, :, None, :]).sum(-1))
    S.add_(u[..., None] * k[:, :, None, :])


def _read(
    S: torch.Tensor,
    ring_rows: dict[str, torch.Tensor],
    committed: rows.Committed,
    window: dict[str, torch.Tensor],
    batch: rows.Batch,
    queries: torch.Tensor,
    use_qk_l2norm: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and u [b, T, HV, V] of the window, from the states S [b, HV, V, K] and u of the committed rows."""
    v, J = window["v"], ring_rows["k"].shape[1]
    keys = torch.cat([ring_rows["k"], window["k"]], 1)
    keys = _heads(l2norm(keys) if use_qk_l2norm else keys, v)
    queries = _heads(queries, v)
    older_g, window_g = (g if g.dim() == 4 else g[..., None] for g in (ring_rows["g"], window["g"]))
    total, between = rows.decay_sums(older_g, window_g, batch.parents)
    seen = rows.seen_rows(committed.present, batch)
    weighted = between.masked_fill(~seen[..., None, None], -torch.inf).exp() * keys[:, None]
    read = torch.einsum("bhvk,nbthk->nbthv", S, torch.stack([keys[:, J:], queries]) * total.exp())
    scores = torch.einsum("btjhk,nbthk->nbhtj", weighted, torch.stack([keys[:, J:], queries]))
    read = read + torch.einsum("nbhtj,bjhv->nbthv", scores[..., :J], ring_rows["u"])
    beta = window["beta"]
    lower = scores[0][..., J:].tril(-1) * beta.transpose(1, 2)[..., None]
    rhs = (beta[..., None] * (v - read[0])).transpose(1, 2)
    u = torch.linalg.solve_triangular(lower, rhs, upper=False, unitriangular=True).transpose(1, 2)
    return read[1] + torch.einsum("bhtj,bjhv->bthv", scores[1][..., J:], u), u


def _heads(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Repeat k-heads [b, T, HK, K] to the v-heads of v [b, T, HV, V]."""
    return x.repeat_interleave(v.shape[2] // x.shape[2], dim=2)
