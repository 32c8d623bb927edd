"""Mamba-2 in vectorised torch: the CPU backend. Signatures and meaning as in `replayssm.ops.mamba2.reference`.

Updates round as transformers' torch path does, `state * exp(dt A) + (dt B) x`, so fp32 states agree bit for bit.
"""

from __future__ import annotations

import torch

from replayssm.cursors import NUM_COMMITTED, flush_mask, real_slots
from replayssm.ops import batch as rows
from replayssm.ops.elementwise import silu, softplus
from replayssm.ops.rows import compute_dtype


def mamba2_step(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    ring_x: torch.Tensor,
    ring_B: torch.Tensor,
    ring_dt: torch.Tensor,
    cursors: torch.Tensor,
    slot_indices: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    out: torch.Tensor,
    *,
    buffer_len: int,
    pad_slot_id: int,
    dt_softplus: bool,
    max_window_len: int,
    parents: torch.Tensor | None = None,
) -> None:
    """See `replayssm.ops.mamba2.reference.mamba2_step`."""
    out.zero_()
    batch = rows.make_batch(slot_indices, query_start_loc, len(state), pad_slot_id, parents)
    dtype, mine = compute_dtype(state), cursors[batch.slots]
    flush = flush_mask(mine, batch.window_lens, buffer_len)
    counts = mine[:, NUM_COMMITTED]
    if flush.any():
        full = rows.committed_rows(batch.slots[flush], mine[flush], counts[flush], ring_x.shape[2])
        state[full.slots] = _replay(state, A, ring_x, ring_B, ring_dt, full).to(state.dtype)
    dt = rows.mask_rows(_timestep(dt[batch.tokens], dt_bias, dt_softplus, dtype), batch.present)
    window = {"x": batch.take(x, dtype), "B": batch.take(B, dtype), "dt": dt}
    rings = {"x": ring_x, "B": ring_B, "dt": ring_dt}
    older = rows.committed_rows(batch.slots, mine, counts.masked_fill(flush, 0), ring_x.shape[2])
    y = _read(state, A, {n: older.take(r, dtype) for n, r in rings.items()}, older, window, batch, C)
    batch.put(out, _finish(y, window["x"], D, None if z is None else batch.take(z, dtype)))
    positions = rows.append_positions(mine, batch.tokens.shape[1], ring_x.shape[2])
    for name, ring in rings.items():
        rows.append(ring, batch, positions, window[name])


def mamba2_stepwise(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    slot_indices: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    out: torch.Tensor,
    *,
    pad_slot_id: int,
    dt_softplus: bool,
    max_window_len: int,
) -> None:
    """See `replayssm.ops.mamba2.reference.mamba2_stepwise`."""
    out.zero_()
    batch = rows.make_batch(slot_indices, query_start_loc, len(state), pad_slot_id)
    dtype = compute_dtype(state)
    dt = rows.mask_rows(_timestep(dt[batch.tokens], dt_bias, dt_softplus, dtype), batch.present)
    x, B, C = (batch.take(t, dtype) for t in (x, B, C))
    y = torch.zeros_like(x)
    for i in range(batch.tokens.shape[1]):
        here = batch.present[:, i]
        slots = batch.slots[here]
        S = state[slots].to(dtype)
        _update_(S, x[here, i], dt[here, i], A, B[here, i])
        state[slots] = S.to(state.dtype)
        y[here, i] = torch.einsum("bhpn,bhn->bhp", S, _per_head(C[here, i], S.shape[1], 1))
    batch.put(out, _finish(y, x, D, None if z is None else batch.take(z, dtype)))


def mamba2_materialize(
    A: torch.Tensor,
    state: torch.Tensor,
    ring_x: torch.Tensor,
    ring_B: torch.Tensor,
    ring_dt: torch.Tensor,
    cursors: torch.Tensor,
    slot_indices: torch.Tensor,
    num_tokens: torch.Tensor | None,
    dst: torch.Tensor,
    dst_indices: torch.Tensor,
    *,
    pad_slot_id: int,
) -> None:
    """See `replayssm.ops.mamba2.reference.mamba2_materialize`."""
    real = real_slots(slot_indices, len(state), pad_slot_id)
    slots = slot_indices[real].long()
    mine = cursors[slots]
    counts = mine[:, NUM_COMMITTED]
    if num_tokens is not None:
        counts = torch.minimum(counts, num_tokens[real])
    committed = rows.committed_rows(slots, mine, counts, ring_x.shape[2])
    dst[dst_indices[real].long()] = _replay(state, A, ring_x, ring_B, ring_dt, committed).to(dst.dtype)


def _replay(
    state: torch.Tensor,
    A: torch.Tensor,
    ring_x: torch.Tensor,
    ring_B: torch.Tensor,
    ring_dt: torch.Tensor,
    committed: rows.Committed,
) -> torch.Tensor:
    """State [b, H, P, N] after the committed rows; absent rows have dt = 0, which changes nothing."""
    dtype = compute_dtype(state)
    x, dt, B = (committed.take(ring, dtype) for ring in (ring_x, ring_dt, ring_B))
    S = state[committed.slots].to(dtype)
    for j in range(x.shape[1]):
        _update_(S, x[:, j], dt[:, j], A, B[:, j])
    return S


def _update_(S: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> None:
    decay = torch.exp(dt * A.to(S.dtype))
    dB = dt[..., None] * _per_head(B, S.shape[1], 1)
    S.mul_(decay[:, :, None, None]).add_(dB[:, :, None, :] * x[..., None])


def _read(
    state: torch.Tensor,
    A: torch.Tensor,
    older: dict[str, torch.Tensor],
    committed: rows.Committed,
    window: dict[str, torch.Tensor],
    batch: rows.Batch,
    C: torch.Tensor,
) -> torch.Tensor:
    """Outputs [b, T, H, P] from the checkpoint, the committed rows and the window itself."""
    num_heads, dtype = state.shape[1], window["x"].dtype
    queries = batch.take(C, dtype)
    A = A.to(dtype)
    total, between = rows.decay_sums(older["dt"] * A, window["dt"] * A, batch.parents)
    seen = rows.seen_rows(committed.present, batch)
    decay = between.masked_fill(~seen[..., None], -torch.inf).exp()
    every = {name: torch.cat([older[name], window[name]], 1) for name in window}
    scores = _per_head(torch.einsum("btgn,bjgn->btjg", queries, every["B"]), num_heads, -1)
    y = torch.einsum("btjh,bjhp->bthp", decay * scores * every["dt"][:, None], every["x"])
    S = state[batch.slots].to(dtype)
    return y + total.exp()[..., None] * torch.einsum("bhpn,bthn->bthp", S, _per_head(queries, num_heads, -2))


def _per_head(values: torch.Tensor, num_heads: int, dim: int) -> torch.Tensor:
    """Repeat the groups of dimension `dim` to heads."""
    return values.repeat_interleave(num_heads // values.shape[dim], dim=dim)


def _timestep(dt: torch.Tensor, bias: torch.Tensor | None, dt_softplus: bool, dtype: torch.dtype) -> torch.Tensor:
    dt = dt.to(dtype) if bias is None else dt.to(dtype) + bias.to(dtype)
    return softplus(dt) if dt_softplus else dt


def _finish(y: torch.Tensor, x: torch.Tensor, D: torch.Tensor | None, z: torch.Tensor | None) -> torch.Tensor:
    if D is not None:
        y = y + D.to(y.dtype)[:, None] * x
    return y if z is None else y * silu(z)
