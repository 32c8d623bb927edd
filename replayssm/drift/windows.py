"""A layer's whole text as windows, with everything computed that does not depend on the state.

All three families become one form: a state [heads, V, K] that decays, is read by q and takes up u kᵀ; Mamba-2 has
k = B, q = C, u = dt x and no delta rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerInputs:
    """One layer's inputs in fp32: q, k [T, H, K] (delta: normalised, q scaled), v [T, H, V], g [T, H, 1 or K].

    beta [T, H] of the delta rule, None for Mamba-2, whose outputs get `skip` [T, H, V] added (D x).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor | None = None
    skip: torch.Tensor | None = None

    def part(self, start: int, end: int) -> LayerInputs:
        """The tokens from `start` to `end`."""
        beta = None if self.beta is None else self.beta[start:end]
        skip = None if self.skip is None else self.skip[start:end]
        q, k, v, g = (t[start:end] for t in (self.q, self.k, self.v, self.g))
        return LayerInputs(q, k, v, g, beta, skip)

    def reordered(self, order: torch.Tensor) -> LayerInputs:
        """The same layer with the columns of K in another order [K]: equal in exact arithmetic."""
        g = self.g[..., order] if self.g.shape[-1] > 1 else self.g
        return LayerInputs(self.q[..., order], self.k[..., order], self.v, g, self.beta, self.skip)


@dataclass(frozen=True)
class Windows:
    """N windows of C tokens of H heads; row n of every tensor belongs to window n.

    values [N, H, C, V] and reads [N, H, C, K] give u = values - reads Sᵀ (Mamba-2: reads is None); the output is
    queries Sᵀ + attention u with queries [N, H, C, K], attention [N, H, C, C]; the state becomes S keep + uᵀ outgoing
    with keep [N, H, 1, 1 or K] and outgoing [N, H, C, K].
    """

    values: torch.Tensor
    reads: torch.Tensor | None
    queries: torch.Tensor
    attention: torch.Tensor
    keep: torch.Tensor
    outgoing: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that there are, in order."""
        found = (self.values, self.queries, self.attention, self.keep, self.outgoing, self.reads)
        return [t for t in found if t is not None]

    @classmethod
    def of(cls, tensors: list[torch.Tensor]) -> Windows:
        """The inverse of `tensors`."""
        values, queries, attention, keep, outgoing, *reads = tensors
        return cls(values, reads[0] if reads else None, queries, attention, keep, outgoing)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """(heads, V, K)."""
        return self.values.shape[1], self.values.shape[3], self.queries.shape[3]


def make_windows(inputs: LayerInputs, size: int) -> Windows:
    """Cut `inputs` into windows of `size` tokens."""

    def cut(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (-1, size)).transpose(1, 2)  # [N, H, C, D]

    q, k, v, g = (cut(x) for x in (inputs.q, inputs.k, inputs.v, inputs.g))
    G = g.cumsum(-2)
    last = G[..., -1:, :]
    queries, outgoing, keep = q * G.exp(), k * (last - G).exp(), last.exp()
    attention = decayed_products(q, k, G)
    if inputs.beta is None:
        return Windows(v.contiguous(), None, queries, attention, keep, outgoing)
    beta = cut(inputs.beta[..., None])
    system = (beta * decayed_products(k, k, G)).tril(-1)
    right = torch.cat((beta * v, beta * k * G.exp()), -1)
    if size > 1:
        right = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, reads = right.split((v.shape[-1], k.shape[-1]), -1)
    return Windows(values.contiguous(), reads.contiguous(), queries, attention, keep, outgoing)


def decayed_products(a: torch.Tensor, b: torch.Tensor, G: torch.Tensor) -> torch.Tensor:
    """[..., C, C]: sum over K of a_i b_j exp(G_i - G_j) for j <= i, else 0; every exponent is formed before its exp."""
    size = a.shape[-2]
    if G.shape[-1] == 1:
        later = torch.ones(size, size, dtype=torch.bool, device=a.device).triu(1)
        return (a @ b.mT) * (G - G.mT).masked_fill(later, -torch.inf).exp()
    products = a.new_zeros(*a.shape[:-1], size)
    for i in range(size):
        row = slice(i, i + 1)
        decay = (G[..., row, :] - G[..., : i + 1, :]).exp()
        products[..., i, : i + 1] = (a[..., row, :] * b[..., : i + 1, :] * decay).sum(-1)
    return products
