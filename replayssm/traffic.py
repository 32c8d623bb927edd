"""Bytes a decode step must move at least: every input read once, every output written once, flush included."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm.config import LayerSpec, Mamba2Spec, RingField
from replayssm.formats import Format

CURSOR_BYTES = 4 * 4 + 4  # one slot's cursors and its entry of slot_indices


@dataclass(frozen=True)
class StepBytes:
    """Mean bytes of a decode step over all SSM layers: ordinary decoding, and through the ring (flush included)."""

    stepwise: int
    replay: int


@dataclass(frozen=True)
class LayerTraffic:
    """Byte counts of one layer and one request."""

    state: int
    read_copy: int
    row_append: int  # every field of a ring row
    row_read: int  # what outputs need of a committed row
    row_replay: int  # what flush needs of a committed row
    token_io: int  # inputs read and output written for one token
    params: int  # per-head parameters, read once a step whatever the batch


def layer_traffic(spec: LayerSpec, checkpoint: Format, read: Format, activation: torch.dtype) -> LayerTraffic:
    """Count one layer. Outputs read x, B, dt (Mamba-2) or k, u, g; flush reads all that is not for reads only."""
    heads, V, K = spec.state_shape
    fields = spec.ring_fields
    for_reads = ("x", "B", "dt") if isinstance(spec, Mamba2Spec) else ("k", "u", "g")
    size = activation.itemsize
    rows = {name: field_nbytes(field, activation) for name, field in fields.items()}
    if isinstance(spec, Mamba2Spec):
        token = (2 * heads * V + 2 * spec.n_groups * K + heads) * size  # x, y; B, C; dt
        params = 3 * heads * 4  # A, D, dt_bias
    else:
        gates = heads * (fields["g"].dim or 1)
        token = (2 * spec.num_k_heads * K + 2 * heads * V + gates + heads) * size  # q, k; v, o; g; beta
        params = (heads + gates) * 4  # A_log, dt_bias
    return LayerTraffic(
        state=heads * checkpoint.head_nbytes(V, K),
        read_copy=0 if read.name == "none" else heads * read.head_nbytes(V, K),
        row_append=sum(rows.values()),
        row_read=sum(rows[name] for name in for_reads),
        row_replay=sum(rows[name] for name, field in fields.items() if field.recurrence),
        token_io=token,
        params=params,
    )


def field_nbytes(field: RingField, activation: torch.dtype) -> int:
    """Bytes of one ring row of `field`."""
    return field.heads * (field.dim or 1) * (field.dtype or activation).itemsize


def cycle(buffer_len: int, window_len: int, accepted: int) -> list[tuple[int, bool]]:
    """(committed rows P, flush?) of every step of one steady cycle that accepts `accepted` tokens a step."""
    steps, committed = [], accepted
    while committed + window_len <= buffer_len:
        steps.append((committed, False))
        committed += accepted
    return [*steps, (committed, True)]


def stepwise_bytes(t: LayerTraffic, batch: int, window_len: int) -> int:
    """Ordinary decoding reads the state and writes it after every token (with drafts: a snapshot for each)."""
    return t.params + batch * (t.state * (1 + window_len) + window_len * t.token_io + 4)


def replay_bytes(t: LayerTraffic, batch: int, buffer_len: int, window_len: int, accepted: int) -> float:
    """Mean over a cycle; a flush reads and writes the checkpoint and writes the read copy, others read one of them."""
    steps = cycle(buffer_len, window_len, accepted)
    total = 0
    for committed, flush in steps:
        if flush:
            total += 2 * t.state + t.read_copy + committed * t.row_replay
        else:
            total += (t.read_copy or t.state) + committed * t.row_read
    per_request = total / len(steps) + window_len * (t.row_append + t.token_io) + CURSOR_BYTES
    return t.params + batch * per_request
