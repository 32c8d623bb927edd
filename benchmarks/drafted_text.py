"""Text generated with drafts through the ring, against a snapshot oracle that verifies the same drafts token by token.

python benchmarks/drafted_text.py gdn --tokens 7000 [--drafts 4] [--json FILE]

Both sample with the same random numbers, one a position. Drafts continue the last earlier place that ends with the same
bytes. Every position of every window is compared, rejected ones too; so are the numbers of accepted tokens.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from replayssm.drift.models import load, text_tokens
from replayssm.integrations.hf_call import CACHE_NAMES
from replayssm.integrations.transformers import enable

NGRAM, PROMPT = 4, 512


def lookup(text: list[int], drafts: int) -> list[int]:
    """What followed the last earlier occurrence of the last NGRAM tokens, in the last 2,048."""
    tail, recent = text[-NGRAM:], text[-2048:]
    for start in range(len(recent) - NGRAM - 1, -1, -1):
        if recent[start : start + NGRAM] == tail:
            return recent[start + NGRAM : start + NGRAM + drafts]
    return []


class Ring:
    """Windows through ReplaySSM; rejected tokens are cropped."""

    def __init__(self, model: Any, drafts: int) -> None:
        self.model, self.handle = model, enable(model, num_draft_tokens=drafts)
        self.cache = self.handle.new_cache()
        self.cache.activate_past_recording()

    def window(self, tokens: list[int]) -> torch.Tensor:
        """log p [tokens, vocabulary] after each of `tokens`."""
        return _log_probs(self.model, tokens, self.cache)

    def keep(self, tokens: list[int], accepted: int) -> None:
        """Keep the first `accepted` tokens of the last window."""
        if accepted < len(tokens):
            self.cache.crop(accepted - len(tokens))


class Snapshots:
    """The plain cache, token by token, with a copy of it before every token."""

    def __init__(self, model: Any) -> None:
        self.model, self.cache = model, DynamicCache(config=model.config)
        self._copies: list[Any] = []

    def window(self, tokens: list[int]) -> torch.Tensor:
        """The same as Ring.window."""
        self._copies, rows = [], []
        for token in tokens:
            rows.append(_log_probs(self.model, [token], self.cache))
            self._copies.append(copy.deepcopy(self.cache))
        return torch.cat(rows)

    def keep(self, tokens: list[int], accepted: int) -> None:
        """The same as Ring.keep."""
        self.cache = self._copies[accepted - 1]


def _log_probs(model: Any, tokens: list[int], cache: Any) -> torch.Tensor:
    parameters = inspect.signature(model.forward).parameters
    name = next(name for name in CACHE_NAMES if name in parameters)
    logits = model(torch.tensor([tokens]), **{name: cache}, use_cache=True).logits[0]
    return logits.double().log_softmax(-1)


def accept(log_p: torch.Tensor, drafts: list[int], uniforms: torch.Tensor) -> list[int]:
    """Sample after each token of a window until a sample is not the draft; the samples so far."""
    samples: list[int] = []
    for row, uniform in zip(log_p, uniforms, strict=True):
        samples.append(int(torch.searchsorted(row.exp().cumsum(0), uniform).clamp(max=len(row) - 1)))
        if len(samples) > len(drafts) or samples[-1] != drafts[len(samples) - 1]:
            break
    return samples


@torch.no_grad()
def compare(name: str, tokens: int, drafts: int, seed: int) -> dict[str, Any]:
    """Generate `tokens` tokens both ways in lockstep."""
    torch.set_num_threads(1)
    ring, oracle = Ring(load(name), drafts), Snapshots(load(name))
    text = text_tokens(name, PROMPT).tolist()
    for way in (ring, oracle):
        _log_probs(way.model, text[:-1], way.cache)
    random, lengths, differences = torch.Generator().manual_seed(seed), Counter[int](), []
    disagreements, started = 0, time.perf_counter()
    while len(text) < PROMPT + tokens:
        guess = lookup(text, drafts)
        window = [text[-1], *guess]
        found, expected = ring.window(window), oracle.window(window)
        uniforms = torch.rand(len(window), dtype=torch.float64, generator=random)
        samples = accept(found, guess, uniforms)
        disagreements += samples != accept(expected, guess, uniforms)
        rows = torch.arange(len(window))
        chosen = torch.tensor([*guess, samples[-1]])
        differences.append((found[rows, chosen] - expected[rows, chosen]).abs())
        for way in (ring, oracle):
            way.keep(window, len(samples))
        lengths[len(samples)] += 1
        text += samples
    difference = torch.cat(differences)
    return {
        "model": name,
        "generated": len(text) - PROMPT,
        "rounds": sum(lengths.values()),
        "mean_accepted": (len(text) - PROMPT) / sum(lengths.values()),
        "rounds_by_accepted": dict(sorted(lengths.items())),
        "rounds_that_differ": disagreements,
        "compared_positions": len(difference),
        "log_prob_difference_max": float(difference.max()),
        "log_prob_difference_mean": float(difference.mean()),
        "seconds": round(time.perf_counter() - started, 1),
        "text": bytes(text[PROMPT : PROMPT + 400]).decode("utf-8", "replace"),
    }


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = compare(arguments.model, arguments.tokens, arguments.drafts, arguments.seed)
    print(json.dumps(result, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
