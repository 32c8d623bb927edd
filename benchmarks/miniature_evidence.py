"""What a miniature has learnt: bits per byte, how far back its context helps, and how long its decays remember."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from miniature_models import Carry
from torch import nn

SEGMENT, ROWS = 4096, 32
CONTEXTS = (64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 16384)
TARGET = 128


def _tokens(text: bytes, model: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(model.device)


@torch.no_grad()
def _losses(model: Any, carry: Carry, tokens: torch.Tensor) -> torch.Tensor:
    """Nats of every token but the first, in segments whose last one is whole: tokens [B, T + 1], T divisible by 64.

    Attention and convolutions start anew with a segment, states go on.
    """
    model.eval()
    losses, keep = [], None
    length = tokens.shape[1] - 1
    starts = [0, *range(length % SEGMENT or SEGMENT, length, SEGMENT)]
    for start, end in zip(starts, [*starts[1:], length], strict=True):
        part = tokens[:, start : end + 1]
        carry.begin(keep)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.device.type == "cuda"):
            logits = model(part[:, :-1], use_cache=False).logits
        losses.append(F.cross_entropy(logits.float().mT, part[:, 1:], reduction="none"))
        keep = torch.ones(len(tokens), device=tokens.device)
    model.train()
    return torch.cat(losses, 1)


def bits_per_byte(model: Any, carry: Carry, text: bytes, rows: int = 8) -> float:
    """Mean over `text` as `rows` streams, each from empty states; states go on from segment to segment."""
    states = carry.states
    length = len(text) // rows // 64 * 64
    tokens = _tokens(text[: rows * length], model).view(rows, length)
    cut = (length - 1) // 64 * 64
    bits = float(_losses(model, carry, tokens[:, : cut + 1]).mean()) / math.log(2)
    carry.states = states
    return bits


def context_curve(model: Any, carry: Carry, text: bytes, places: int) -> dict[int, float]:
    """Bits per byte of the same target bytes after contexts of different lengths."""
    tokens = _tokens(text, model)
    contexts = [c for c in CONTEXTS if c + TARGET <= len(text) // 2]
    ends = torch.linspace(max(contexts) + TARGET, len(tokens) - 1, places).long().tolist()
    curve = {}
    for context in contexts:
        length = context + TARGET
        rows = torch.stack([tokens[end - length : end + 1] for end in ends])
        losses = torch.cat([_losses(model, carry, part)[:, context:] for part in rows.split(ROWS)])
        curve[context] = float(losses.mean()) / math.log(2)
    return curve


@torch.no_grad()
def half_lives(model: Any, carry: Carry, text: bytes) -> dict[int, list[float]]:
    """ln 2 over the mean log decay of every head (KDA: channel), in tokens, by layer, over `text`."""
    found: dict[int, list[float]] = {}

    def hook(index: int, module: nn.Module) -> Any:
        def before(_: Any, args: Any, kwargs: Any) -> None:
            found[index] = (math.log(2) / decay_rates(module, args[0] if args else kwargs["hidden_states"])).tolist()

        return module.register_forward_pre_hook(before, with_kwargs=True)

    layers = [m for m in model.modules() if hasattr(m, "conv1d")]
    handles = [hook(layer.layer_idx, layer) for layer in layers]
    carry.begin(None)
    model(_tokens(text, model)[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def decay_rates(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Mean -log decay a token of every head (KDA: every channel) for the layer's inputs [1, T, hidden_size]."""
    if hasattr(layer, "forget_gate"):
        return -layer.forget_gate(hidden).float().mean(1).flatten()
    if hasattr(layer, "in_proj_a"):
        gate = F.softplus(layer.in_proj_a(hidden).float() + layer.dt_bias)
    else:
        gate = F.softplus(layer.in_proj(hidden)[..., -layer.num_heads :].float() + layer.dt_bias)
    return (layer.A_log.float().exp() * gate).mean(1).flatten()


def evidence(model: Any, carry: Carry, text: bytes) -> dict[str, Any]:
    """Everything that shows long memory, as plain numbers."""
    lives = half_lives(model, carry, text[: min(len(text), 16384)])
    flat = torch.tensor([life for of_layer in lives.values() for life in of_layer])
    quantiles = torch.quantile(flat, torch.tensor([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0])).tolist()
    return {
        "bits_per_byte_by_context": context_curve(model, carry, text, places=128 if model.device.type == "cuda" else 4),
        "half_life_quantiles": dict(zip(("min", "10%", "25%", "50%", "75%", "90%", "max"), quantiles, strict=True)),
        "half_lives": {layer: [float(f"{x:.4g}") for x in values] for layer, values in lives.items()},
    }
