"""Mamba-2: the plain recurrence, token by token (Dao and Gu 2024, "Transformers are SSMs", eq. 16 with scalar decay).

Computes in float32, or in float64 if `state` is float64. Shapes: H heads, P = head_dim, N = d_state, G groups,
R = ring_len; head h uses group `h // (H / G)`. Every op writes its outputs in place and returns None.
"""

from __future__ import annotations

import torch

from replayssm.cursors import must_flush
from replayssm.ops.elementwise import silu, softplus
from replayssm.ops.rows import compute_dtype, is_pad, iterate_rows
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
    """Append a window of tokens to the ring and compute their outputs; a full row first flushes its ring.

    In: x, z [T, H, P]; dt [T, H]; B, C [T, G, N]; A (negative), D, dt_bias [H]; cursors [S, 4] int32;
    slot_indices [batch] int32; query_start_loc [batch + 1] int32 (None: one token a row); parents [T] int32: index of
    each token's parent in its row's window, -1 for the last committed token (None: windows are chains).
    In and out: state [S, H, P, N]; ring_x [S, H, R, P]; ring_B [S, G, R, N]; ring_dt [S, H, R] (after softplus).
    Out: out [T, H, P].
    read_codes, read_scales, read_global: a read copy (`replayssm.quant`, its format by the dtype of the codes), which
    outputs are computed from and a flush renews; state_scales [S, H, P] fp32, where state holds e4m3 codes; seeds [S]
    int64 and stream: a flush rounds a 16- or 8-bit state stochastically (`replayssm.rounding`).
    """
    stored = StoredState(state, state_scales, read_copy(read_codes, read_scales, read_global), seeds, cursors, stream)
    for slot, tokens in iterate_rows(slot_indices, query_start_loc):
        if is_pad(slot, len(state), pad_slot_id):
            out[tokens] = 0
            continue
        start, num_committed, limit, _ = cursors[slot].tolist()
        at = slot_indices.new_tensor([slot]).long()
        if must_flush(num_committed, len(tokens), buffer_len, limit):
            S = stored.checkpoint(at)[0]
            stored.write(at, _replay(S, slot, start, num_committed, A, ring_x, ring_B, ring_dt)[None])
            S = stored.for_reads(at)[0]
        else:
            S = _replay(stored.for_reads(at)[0], slot, start, num_committed, A, ring_x, ring_B, ring_dt)
        after: dict[int, torch.Tensor] = {-1: S}
        for i, t in enumerate(tokens):
            position = (start + num_committed + i) % ring_x.shape[2]
            ring_x[slot, :, position] = x[t]
            ring_B[slot, :, position] = B[t]
            ring_dt[slot, :, position] = _timestep(dt[t], dt_bias, dt_softplus, S.dtype)
            S = after[i - 1 if parents is None else int(parents[t])]
            S = after[i] = _update(S, x[t], _timestep(dt[t], dt_bias, dt_softplus, S.dtype), A, B[t])
            out[t] = _output(S, x[t], C[t], D, None if z is None else z[t])


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
    """Ordinary decoding: read, update and write the state for every token (rounded to its format each time).

    In: as `mamba2_step`. With seeds, token i of a row rounds as if i flushes more had been made than cursors count.
    """
    stored = StoredState(state, state_scales, None, seeds, cursors, stream)
    for slot, tokens in iterate_rows(slot_indices, query_start_loc):
        if is_pad(slot, len(state), pad_slot_id):
            out[tokens] = 0
            continue
        at = slot_indices.new_tensor([slot]).long()
        for i, t in enumerate(tokens):
            S = stored.checkpoint(at)[0]
            S = _update(S, x[t], _timestep(dt[t], dt_bias, dt_softplus, S.dtype), A, B[t])
            stored.write(at, S[None], offset=i)
            out[t] = _output(S, x[t], C[t], D, None if z is None else z[t])


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
    """Write the state after the first `num_tokens` (None: all) committed rows to `dst[dst_indices]`.

    In: as `mamba2_step`; num_tokens [batch] int32, at most num_committed. Out: dst [S', H, P, N], which may be `state`
    itself with `dst_indices == slot_indices` (a flush in place; the caller moves the cursors).
    """
    for row, slot in enumerate(slot_indices.tolist()):
        if is_pad(slot, len(state), pad_slot_id):
            continue
        start, count, _, _ = cursors[slot].tolist()
        count = count if num_tokens is None else min(count, int(num_tokens[row]))
        S = state[slot].to(compute_dtype(state))
        dst[int(dst_indices[row])] = _replay(S, slot, start, count, A, ring_x, ring_B, ring_dt).to(dst.dtype)


def _replay(
    S: torch.Tensor,
    slot: int,
    start: int,
    count: int,
    A: torch.Tensor,
    ring_x: torch.Tensor,
    ring_B: torch.Tensor,
    ring_dt: torch.Tensor,
) -> torch.Tensor:
    for j in range(count):
        position = (start + j) % ring_x.shape[2]
        S = _update(S, ring_x[slot, :, position], ring_dt[slot, :, position], A, ring_B[slot, :, position])
    return S


def _timestep(dt: torch.Tensor, bias: torch.Tensor | None, dt_softplus: bool, dtype: torch.dtype) -> torch.Tensor:
    dt = dt.to(dtype) if bias is None else dt.to(dtype) + bias.to(dtype)
    return softplus(dt) if dt_softplus else dt


def _update(S: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    dt = dt.to(S.dtype)
    B = B.to(S.dtype).repeat_interleave(len(S) // len(B), dim=0)
    decay = torch.exp(dt * A.to(S.dtype))
    return S * decay[:, None, None] + (dt[:, None] * B)[:, None, :] * x.to(S.dtype)[:, :, None]


def _output(
    S: torch.Tensor, x: torch.Tensor, C: torch.Tensor, D: torch.Tensor | None, z: torch.Tensor | None
) -> torch.Tensor:
    C = C.to(S.dtype).repeat_interleave(len(S) // len(C), dim=0)
    y = torch.einsum("hpn,hn->hp", S, C)
    if D is not None:
        y = y + D.to(S.dtype)[:, None] * x.to(S.dtype)
    return y if z is None else y * silu(z.to(S.dtype))
