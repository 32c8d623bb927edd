"""A model over a whole text at once, its SSM layers run as a variant says.

Layer by layer: a layer's outputs for all tokens are there before the next layer starts, so everything else of the model
runs in parallel over the text and is the same computation in every run. That is exact, since the tokens are given.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from replayssm.checks import fail
from replayssm.drift.scan import PIECE, Scan, scan
from replayssm.drift.variants import Variant
from replayssm.drift.windows import LayerInputs
from replayssm.ops.delta.gates import l2norm


@dataclass
class Run:
    """What a run leaves: the decoder's last hidden states [T, hidden_size], and every SSM layer's scan, in order."""

    hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    layers: list[Scan] = field(default_factory=list)


class _Active(threading.local):
    """The run of this thread; several models may run at once."""

    variant: Variant | None = None
    marks: tuple[int, ...] = ()
    on_tokens: Callable[[int], object]
    layers: list[Scan]


_active = _Active()


@torch.no_grad()
def run(
    model: Any,
    tokens: torch.Tensor,
    variant: Variant,
    marks: Iterable[int],
    on_tokens: Callable[[int], object] = lambda _: None,
) -> Run:
    """Run `model` (a transformers causal language model) over `tokens` [T]; states are kept at `marks`.

    on_tokens(n): called whenever n more tokens of a layer are done.
    """
    marks = tuple(marks)
    if bad := [mark for mark in (*marks, len(tokens)) if mark % PIECE]:
        raise fail("length", bad[0], f"multiples of {PIECE}")
    _active.variant, _active.marks, _active.on_tokens, _active.layers = variant, marks, on_tokens, []
    try:
        hidden = model.get_decoder()(tokens[None].to(model.device), use_cache=False)[0][0]
        return Run(hidden, _active.layers)
    finally:
        _active.variant, _active.layers = None, []


@contextmanager
def routed(model: Any) -> Iterator[None]:
    """While this is open, runs of `model` are scanned; other calls of its modules are refused."""
    calls = {
        "torch_chunk_gated_delta_rule": _delta,
        "chunk_kimi_delta_attention": _delta,
        "mamba2_chunk_scan": _mamba2,
    }
    modules = {sys.modules[type(m).__module__] for m in model.modules() if hasattr(m, "conv1d")}
    taken = [(module, name, getattr(module, name)) for module in modules for name in calls if hasattr(module, name)]
    if not taken:
        raise fail("model", type(model).__name__, f"a model whose module calls one of {', '.join(calls)}")
    for module, name, _ in taken:
        setattr(module, name, calls[name])
    try:
        yield
    finally:
        for module, name, original in taken:
            setattr(module, name, original)


def _scan(inputs: LayerInputs) -> torch.Tensor:
    if _active.variant is None:
        raise fail("model", "called outside of a drift run", "calls after the measurement")
    variant = _active.variant.of_layer(len(_active.layers))
    _active.layers.append(scan(variant, inputs, _active.marks, _active.on_tokens))
    return _active.layers[-1].outputs[None]


def _delta(query: Any, key: Any, value: Any, g: Any, beta: Any, **_: Any) -> tuple[torch.Tensor, None]:
    """In place of GDN's and KDA's chunk functions, without a cache: [1, T, heads, dim]."""
    return _scan(delta_inputs(query[0], key[0], value[0], g[0], beta[0])).to(value.dtype), None


def _mamba2(x: Any, dt: Any, A: Any, B: Any, C: Any, *, D: Any = None, dt_bias: Any = None, **options: Any) -> Any:
    """In place of Mamba-2's chunk function, without a cache: x [1, T, heads, dim]."""
    dt = dt[0].float() if dt_bias is None else dt[0].float() + dt_bias.float()
    if options.get("dt_softplus"):
        dt = F.softplus(dt)
    low, high = options.get("dt_limit", (0.0, float("inf")))
    return _scan(mamba2_inputs(x[0], dt.clamp(low, high), A, B[0], C[0], D)).to(x.dtype)


def delta_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> LayerInputs:
    """q, k [T, k-heads, K] as they come; v [T, H, V]; log decays g [T, H] or [T, H, K]; beta [T, H]."""
    repeats = v.shape[1] // k.shape[1]
    q, k = (l2norm(x.float()) for x in (q, k))
    q, k = (x.repeat_interleave(repeats, dim=1) for x in (q * q.shape[-1] ** -0.5, k))
    g = g.float() if g.dim() == 3 else g.float()[..., None]
    return LayerInputs(q, k, v.float(), g, beta.float())


def mamba2_inputs(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor | None
) -> LayerInputs:
    """x [T, H, V]; dt [T, H] after softplus; A, D [H]; B, C [T, groups, K]."""
    repeats = x.shape[1] // B.shape[1]
    B, C = (t.float().repeat_interleave(repeats, dim=1) for t in (B, C))
    skip = None if D is None else D.float()[:, None] * x.float()
    return LayerInputs(C, B, x.float() * dt[..., None], (A.float() * dt)[..., None], skip=skip)
