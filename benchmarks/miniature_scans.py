"""Chunked scans with gradients, for training: the same functions as the models' own, faster and with carried states.

Each takes and returns the state in transformers' layout. Products may be in tf32; nothing here is used for decoding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK, BLOCK = 64, 16
STRONGEST = -4.0  # log decay a token and channel below which KDA's factors could overflow; e^-4 forgets as well


def delta_scan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k [B, T, H, K], v [B, T, H, V], g [B, T, H] or [B, T, H, K], beta [B, T, H], state [B, H, K, V]."""
    batch, _, heads, K = k.shape
    q, k = (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    per_channel = g.dim() == 4
    g = g.float().clamp(min=STRONGEST) if per_channel else g.float()[..., None]

    def chunks(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4)  # [B, H, N, C, D]

    q, k, v, g, beta = (chunks(x) for x in (q * K**-0.5, k, v.float(), g, beta.float()[..., None]))
    G = g.cumsum(-2)
    if per_channel:
        scores, attention = _channel_products(k, k, G), _channel_products(q, k, G)
    else:
        decay = _pair_decays(G[..., 0])
        scores, attention = (k @ k.mT) * decay, (q @ k.mT) * decay
    system = (scores * beta).tril(-1)
    solved = torch.linalg.solve_triangular(
        system, torch.cat((beta * v, beta * k * G.exp()), -1), upper=False, unitriangular=True
    )
    values, reads = solved.split((v.shape[-1], K), -1)
    last = G[..., -1:, :]
    outgoing = (k * (last - G).exp()).mT
    keep = last.exp().mT
    if state is None:
        state = k.new_zeros(batch, heads, K, v.shape[-1])
    states, updates = [], []
    for value, read, out, factor in zip(*(t.unbind(2) for t in (values, reads, outgoing, keep)), strict=True):
        states.append(state)
        updates.append(value - read @ state)
        state = state * factor + out @ updates[-1]
    result = (q * G.exp()) @ torch.stack(states, 2) + attention.tril() @ torch.stack(updates, 2)
    return result.permute(0, 2, 3, 1, 4).flatten(1, 2), state


def _pair_decays(G: torch.Tensor) -> torch.Tensor:
    """exp(G_i - G_j) for j <= i, else 0: [..., C] -> [..., C, C]."""
    C = G.shape[-1]
    below = torch.ones(C, C, dtype=torch.bool, device=G.device).tril()
    return (G[..., :, None] - G[..., None, :]).masked_fill(~below, -torch.inf).exp()


def _channel_products(a: torch.Tensor, b: torch.Tensor, G: torch.Tensor) -> torch.Tensor:
    """sum_c a_ic b_jc exp(G_ic - G_jc) for j <= i, in blocks: every factor is at most e^(-8 STRONGEST)."""
    rows = []
    for start in range(0, CHUNK, BLOCK):
        own = slice(start, start + BLOCK)
        middle = G[..., start + BLOCK // 2 - 1 : start + BLOCK // 2, :]
        row = (a[..., own, :] * (G[..., own, :] - middle).exp()) @ (b[..., own, :] * (middle - G[..., own, :]).exp()).mT
        row = row.tril()
        if start:
            edge = G[..., start - 1 : start, :]
            left = a[..., own, :] * (G[..., own, :] - edge).exp()
            row = torch.cat((left @ (b[..., :start, :] * (edge - G[..., :start, :]).exp()).mT, row), -1)
        rows.append(F.pad(row, (0, CHUNK - start - BLOCK)))
    return torch.cat(rows, -2)


def mamba2_scan(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [b, T, H, P], dt [b, T, H] after softplus, A [H], B and C [b, T, groups, N], state [b, H, P, N]; without D."""
    batch, _, heads, P = x.shape
    groups, N = B.shape[2:]
    per_group = heads // groups

    def chunks(t: torch.Tensor) -> torch.Tensor:
        return t.float().unflatten(1, (-1, CHUNK)).movedim(3, 1)  # [b, H, chunks, C, ...]

    B, C = chunks(B), chunks(C)
    G = chunks((A.float() * dt.float())[..., None])[..., 0].cumsum(-1)
    inputs = chunks(x.float() * dt.float()[..., None])
    scores = (C @ B.mT).repeat_interleave(per_group, 1) * _pair_decays(G)
    B, C = (t.repeat_interleave(per_group, 1) for t in (B, C))
    added = inputs.mT @ (B * (G[..., -1:] - G).exp()[..., None])  # [b, H, chunks, P, N]
    if state is None:
        state = x.new_zeros(batch, heads, P, N, dtype=torch.float32)
    ends = F.pad(G[..., -1].cumsum(-1), (1, 0))
    terms = torch.cat((state[:, :, None], added), 2)
    states = (_pair_decays(ends) @ terms.flatten(3)).unflatten(-1, (P, N))
    out = scores @ inputs + (C * G.exp()[..., None]) @ states[:, :, :-1].mT
    return out.movedim(1, 3).flatten(1, 2), states[:, :, -1]
