"""Mamba-2 in vectorised torch: the CPU backend. Signatures and meaning as in `replayssm.ops.mamba2.reference`.

Updates round as transformers' torch path does, `state * exp(dt A) + (dt B) x`, so fp32 states agree bit for bit.
"""

from __future__ import annotations

import torch

from replayssm.cursors import NUM_COMMITTED, flush_mask, real_slots
from replayssm.ops import batch as rows
from replayssm.ops.elementwise import silu, softplus
from replayssm.ops.rows import compute_dtype
from replayssm.ops.stored import StoredState, read_copy


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
    read_codes: torch.Tensor | None = None,
    read_scales: torch.Tensor | None = None,
    read_global: torch.Tensor | None = None,
    state_scales: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    stream: int = 0,
) -> None:
    """See `replayssm.ops.mamba2.reference.mamba2_step`."""
    out.zero_()
    batch = rows.make_batch(slot_indices, query_start_loc, len(state), pad_slot_id, parents)
    read = read_copy(read_codes, read_scales, read_global)
    stored = StoredState(state, state_scales, read, seeds, cursors, stream)
    dtype, mine = compute_dtype(state), cursors[batch.slots]
    flush = flush_mask(mine, batch.window_lens, buffer_len)
    counts = mine[:, NUM_COMMITTED]
    if flush.any():
        full = rows.committed_rows(batch.slots[flush], mine[flush], counts[flush], ring_x.shape[2])
        stored.write(full.slots, _replay(stored.checkpoint(full.slots), A, ring_x, ring_B, ring_dt, full))
    dt = rows.mask_rows(_timestep(dt[batch.tokens], dt_bias, dt_softplus, dtype), batch.present)
    window = {"x": batch.take(x, dtype), "B": batch.take(B, dtype), "dt": dt}
    rings = {"x": ring_x, "B": ring_B, "dt": ring_dt}
    older = rows.committed_rows(batch.slots, mine, counts.masked_fill(flush, 0), ring_x.shape[2])
    ring_rows = {n: older.take(r, dtype) for n, r in rings.items()}
    y = _read(stored.for_reads(batch.slots), A, ring_rows, older, window, batch, C)
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
    cursors: torch.Tensor | None = None,
    state_scales: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    stream: int = 0,
) -> None:
    """See `replayssm.ops.mamba2.reference.mamba2_stepwise`."""
    out.zero_()
    batch = rows.make_batch(slot_indices, query_start_loc, len(state), pad_slot_id)
    stored = StoredState(state, state_scales, None, seeds, cursors, stream)
    dtype = compute_dtype(state)
    dt = rows.mask_rows(_timestep(dt[batch.tokens], dt_bias, dt_softplus, dtype), batch.present)
    x, B, C = (batch.take(t, dtype) for t in (x, B, C))
    y = torch.zeros_like(x)
    for i in range(batch.tokens.shape[1]):
        here = batch.present[:, i]
        slots = batch.slots[here]
        S = stored.checkpoint(slots)
        _update_(S, x[here, i], dt[here, i], A, B[here, i])
        stored.write(slots, S, offset=i)
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
    S = _replay(StoredState(state).checkpoint(slots), A, ring_x, ring_B, ring_dt, committed)
    dst[dst_indices[real].long()] = S.to(dst.dtype)


def _replay(
    S: torch.Tensor,
    A: torch.Tensor,
    ring_x: torch.Tensor,
    ring_B: torch.Tensor,
    ring_dt: torch.Tensor,
    committed: rows.Committed,
) -> torch.Tensor:
    """S [b, H, P, N], changed in place, after the committed rows; absent ones have dt = 0, which changes nothing."""
    x, dt, B = (committed.take(ring, S.dtype) for ring in (ring_x, ring_dt, ring_B))
    for j in range(x.shape[1]):
        _update_(S, x[:, j], dt[:, j], A, B[:, j])
    return S


def _update_(S: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> None:
    decay = torch.exp(dt * A.to(S.dtype))
    dB = dt[..., None] * _per_head(B, S.shape[1], 1)
    S.mul_(decay[:, :, None, None]).add_(dB[:, :, None, :] * x[..., None])


def _read(
    S: torch.Tensor,
    A: torch.Tensor,
    older: dict[str, torch.Tensor],
    committed: rows.Committed,
    window: dict[str, torch.Tensor],
    batch: rows.Batch,
    C: torch.Tensor,
) -> torch.Tensor:
    """Outputs [b, T, H, P] from the states S [b, H, P, N], the committed rows and the window itself."""
    num_heads, dtype = S.shape[1], S.dtype
    queries = batch.take(C, dtype)
    A = A.to(dtype)
    total, between = rows.decay_sums(older["dt"] * A, window["dt"] * A, batch.parents)
    seen = rows.seen_rows(committed.present, batch)
    decay = between.masked_fill(~seen[..., None], -torch.inf).exp()
    every = {name: torch.cat([older[name], window[name]], 1) for name in window}
    scores = _per_head(torch.einsum("btgn,bjgn->btjg", queries, every["B"]), num_heads, -1)
    y = torch.einsum("btjh,bjhp->bthp", decay * scores * every["dt"][:, None], every["x"])
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
