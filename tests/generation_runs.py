"""Generation runs that the tests of the transformers integration compare."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from replayssm.integrations import hf_route
from replayssm.integrations.transformers import ReplayHandle, enable

BATCH, PROMPT = 4, 9
MODELS = ("nemotron_h", "mamba2", "falcon_h1", "qwen3_5", "kimi_linear")
FAMILIES = ("nemotron_h", "qwen3_5", "kimi_linear")
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
Enable = Callable[..., ReplayHandle]


def enabling(**defaults: Any) -> Iterator[Enable]:
    """For a fixture: `enable` with these options, undone at the end of the test."""
    handles: list[ReplayHandle] = []

    def make(model: Any, **options: Any) -> ReplayHandle:
        handles.append(enable(model, **{**defaults, **options}))
        return handles[-1]

    yield make
    for handle in handles:
        handle.disable()
    assert not hf_route._patched


class Forced(LogitsProcessor):
    """Chooses given tokens, so that two runs stay comparable where logits nearly tie."""

    def __init__(self, tokens: torch.Tensor, prompt_len: int) -> None:
        self.tokens, self.prompt_len = tokens, prompt_len

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = self.tokens[:, input_ids.shape[1] - self.prompt_len]
        return torch.full_like(scores, -torch.inf).scatter(1, chosen[:, None], 0.0)


def prompts(seed: int = 0) -> dict[str, torch.Tensor]:
    """Unequal prompts, padded on the left."""
    ids = torch.randint(3, 61, (BATCH, PROMPT), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row, pads in enumerate((0, 3, 8, 1)):
        mask[row, :pads] = 0
        ids[row, :pads] = 0
    return {"input_ids": ids, "attention_mask": mask}


def run(model: Any, **options: Any) -> Any:
    """Generate from `prompts` with everything returned."""
    options = {"do_sample": False, "max_new_tokens": 24, **prompts(), **options}
    return model.generate(return_dict_in_generate=True, output_logits=True, output_scores=True, **options)


def forced_logits(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Per-step logits [steps, batch, vocabulary] of `generate` over given tokens, and the cache at the end."""
    processors = LogitsProcessorList([Forced(tokens, PROMPT)])
    result = run(model, max_new_tokens=tokens.shape[1], logits_processor=processors)
    assert torch.equal(result.sequences[:, PROMPT:], tokens)
    return torch.stack(result.logits).double(), result.past_key_values


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """The argument of `forward` and `generate` for a cache, by transformers version and model."""
    parameters = inspect.signature(model.forward).parameters
    return {next(name for name in CACHE_NAMES if name in parameters): cache}


def model_cache(output: Any) -> Any:
    """The cache that a forward call returned, by transformers version and model."""
    found = (getattr(output, name, None) for name in CACHE_NAMES)
    return next(cache for cache in found if cache is not None)


@torch.no_grad()
def step(model: Any, cache: Any, token: int = 7, batch: int = BATCH, tokens: int = 1) -> torch.Tensor:
    """Logits of one call that gives every row the same token, so often."""
    return model(torch.full((batch, tokens), token), use_cache=True, **cache_argument(model, cache)).logits


def assert_logits_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Two fp32 runs of one model: stepwise decoding itself is up to 40 eps of the largest logit from float64 here."""
    bound = 128 * torch.finfo(torch.float32).eps * float(expected.abs().max())
    assert float((actual - expected).abs().max()) <= bound
