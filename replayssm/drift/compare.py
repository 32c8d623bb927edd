"""How far a run's predictions, layer outputs and states are from those of the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from replayssm.drift.forward import Run

CHUNK = 4096
MARKS = (1024, 4096, 16384, 65536, 131072)


@dataclass(frozen=True)
class Drift:
    """Over the second half of the first `tokens` tokens: tokens / 2 ... tokens.

    kl: mean of KL(reference || run) in nats; kl_99: its 99 % quantile; agreement: share of tokens whose most likely
    next token is the same; log_prob: quantiles (50, 90, 99, 100 %) of |Δ log p| of the text's own next token; bits: the
    run's bits a token; output_errors: relative root-mean-square error of every SSM layer's outputs; state_errors: the
    same of its state after `tokens` tokens.
    """

    tokens: int
    kl: float
    kl_99: float
    agreement: float
    log_prob: tuple[float, float, float, float]
    bits: float
    output_errors: tuple[float, ...]
    state_errors: tuple[float, ...]


def marks_up_to(length: int) -> tuple[int, ...]:
    """Where a text of `length` tokens is looked at; its end is one of the places."""
    return (*(mark for mark in MARKS if mark < length), length)


@torch.no_grad()
def compare(model: Any, tokens: torch.Tensor, reference: Run, run: Run) -> list[Drift]:
    """The drift of `run` at every mark; `tokens` [T] is the text of both."""
    layer = model.get_output_embeddings()
    weight, bias = layer.weight.float(), None if layer.bias is None else layer.bias.float()

    def head(hidden: torch.Tensor) -> torch.Tensor:
        """Logits in fp32, so that a 16-bit model's are not rounded once more."""
        return F.linear(hidden.float(), weight, bias)

    tokens = tokens.to(reference.hidden.device)
    parts = [
        _token_drift(
            head(reference.hidden[i : i + CHUNK]), head(run.hidden[i : i + CHUNK]), tokens[i + 1 : i + 1 + CHUNK]
        )
        for i in range(0, len(tokens), CHUNK)
    ]
    kl, same, log_p, difference = (torch.cat(columns) for columns in zip(*parts, strict=True))
    found = []
    for mark in marks_up_to(len(tokens)):
        half = slice(mark // 2, mark)
        quantiles = torch.quantile(difference[half], difference.new_tensor([0.5, 0.9, 0.99, 1.0]))
        found.append(
            Drift(
                tokens=mark,
                kl=float(kl[half].mean()),
                kl_99=float(torch.quantile(kl[half], 0.99)),
                agreement=float(same[half].double().mean()),
                log_prob=tuple(quantiles.tolist()),
                bits=float(-log_p[half].mean()) / math.log(2),
                output_errors=_errors(reference, run, half),
                state_errors=_state_errors(reference, run, mark),
            )
        )
    return found


def _token_drift(reference: torch.Tensor, logits: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """KL, agreement, the run's log p of the next tokens `text` [t] and |Δ log p|, from logits [t, vocab]."""
    log_p, log_q = (x.double().log_softmax(-1) for x in (reference, logits))
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    same = log_p.argmax(-1) == log_q.argmax(-1)
    rows = torch.arange(len(text), device=text.device)
    of_text = log_q[rows, text]
    return kl, same, of_text, (of_text - log_p[rows, text]).abs()


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    norm = torch.linalg.vector_norm
    return float(norm(found - expected) / norm(expected))


def _errors(reference: Run, run: Run, half: slice) -> tuple[float, ...]:
    pairs = zip(reference.layers, run.layers, strict=True)
    return tuple(_relative(other.outputs[half], layer.outputs[half]) for layer, other in pairs)


def _state_errors(reference: Run, run: Run, mark: int) -> tuple[float, ...]:
    pairs = zip(reference.layers, run.layers, strict=True)
    return tuple(_relative(other.states[mark], layer.states[mark]) for layer, other in pairs)
