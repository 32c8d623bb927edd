"""Run a layer's windows one after the other, rounding as a variant says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from replayssm.drift.launch import launch_scan
from replayssm.drift.variants import Variant
from replayssm.drift.windows import LayerInputs, Windows, make_windows
from replayssm.rounding import random_words
from replayssm.seeds import first_seeds

PIECE = 1024  # tokens between two looks at the state


@dataclass(frozen=True)
class Scan:
    """A layer's outputs [T, H, V] and its states [H, V, K] after some numbers of tokens, as memory holds them."""

    outputs: torch.Tensor
    states: dict[int, torch.Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A state [H, V, K], and what stochastic rounding needs: number of flushes [1] and seed [1], both int64."""

    state: torch.Tensor
    flushes: torch.Tensor
    seeds: torch.Tensor

    @classmethod
    def empty(cls, heads: int, V: int, K: int, like: torch.Tensor) -> Checkpoint:
        """A state of zeros on the device and of the dtype of `like`, with the seed of a Plan's first slot."""
        flushes = torch.zeros(1, dtype=torch.int64, device=like.device)
        return cls(like.new_zeros(heads, V, K), flushes, first_seeds(0, 1, like.device))


def scan(
    variant: Variant, inputs: LayerInputs, marks: Iterable[int], on_tokens: Callable[[int], object] = lambda _: None
) -> Scan:
    """Scan a text of T tokens, T divisible by PIECE or by buffer_len; states are kept at `marks`."""
    tokens, (heads, V) = len(inputs.q), inputs.v.shape[1:]
    order = torch.arange(inputs.k.shape[2], device=inputs.k.device)
    if variant.option == "reordered":
        order = torch.randperm(len(order), generator=torch.Generator().manual_seed(0)).to(order.device)
        inputs = inputs.reordered(order)
    run = launch_scan if inputs.v.device.type == "cuda" else scan_windows
    marks, states, outputs = set(marks), {}, torch.empty_like(inputs.v)
    checkpoint = Checkpoint.empty(heads, V, len(order), inputs.v)
    for start in range(0, tokens, PIECE):
        end = min(tokens, start + PIECE)
        outputs[start:end] = run(variant, inputs.part(start, end), checkpoint)
        if end in marks:
            states[end] = torch.empty_like(checkpoint.state).index_copy_(-1, order, checkpoint.state)
        on_tokens(end - start)
    if inputs.skip is not None:
        outputs += inputs.skip
    return Scan(outputs, states)


def scan_windows(variant: Variant, inputs: LayerInputs, checkpoint: Checkpoint) -> torch.Tensor:
    """Outputs [T, H, V] of T tokens, window by window; `checkpoint` is updated in place."""
    windows, current, outputs = make_windows(inputs, variant.buffer_len), checkpoint, []
    for window in zip(*(t.unbind() for t in windows.tensors()), strict=True):
        out, current = advance(variant, Windows.of(list(window)), current)
        outputs.append(out.transpose(0, 1))
    checkpoint.state.copy_(current.state)
    checkpoint.flushes.copy_(current.flushes)
    return torch.cat(outputs)


def advance(variant: Variant, window: Windows, before: Checkpoint) -> tuple[torch.Tensor, Checkpoint]:
    """Outputs [H, C, V] of one window (a row of Windows) and the checkpoint after it.

    Outputs come from what a read of the checkpoint sees; the checkpoint takes up the exact window, rounded once.
    """
    state = before.state
    read = variant.round_read(state)
    u = _updates(window, read)
    out = window.queries @ read.mT + window.attention @ u
    if read is not state:
        u = _updates(window, state)
    state = torch.baddbmm(state * window.keep, u.mT, window.outgoing)
    if variant.option != "stochastic":
        return out, replace(before, state=variant.round_checkpoint(state))
    words = random_words(before.seeds, before.flushes, tuple(state.shape))[0]
    return out, replace(before, state=variant.round_checkpoint(state, words), flushes=before.flushes + 1)


def _updates(window: Windows, state: torch.Tensor) -> torch.Tensor:
    if window.reads is None:
        return window.values
    return torch.baddbmm(window.values, window.reads, state.mT, alpha=-1)
