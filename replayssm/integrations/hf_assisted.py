"""Which generations are refused; in assisted ones, how many tokens may be drafted and by whom."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from replayssm.checks import ReplayError, fail
from replayssm.integrations.hf_cache import ReplayDynamicCache
from replayssm.plan import Plan

ASSISTED = "assisted_generation"
_MODES = ("greedy_search", "sample", "beam_search", "beam_sample", ASSISTED)


def check_generation(config: Any, mode: str, cache_name: str) -> None:
    """Raise unless ReplaySSM can serve this kind of generation."""
    if mode not in _MODES:
        raise fail("generation mode", mode, f"{', '.join(_MODES)} while ReplaySSM is enabled")
    if mode == ASSISTED and cache_name == "cache_params":
        raise fail(f"generation mode of a model with {cache_name}", mode, "newer versions of transformers")
    if config.cache_implementation not in (None, "dynamic"):
        raise fail("cache_implementation", config.cache_implementation, "None or 'dynamic' while ReplaySSM is enabled")


def prepare_drafts(config: Any, is_assisted: bool, plan: Plan, cache: Any) -> None:
    """Before a generation: make its cache ready to take drafts back, or done with that."""
    if is_assisted:
        _check_assisted(config, plan, cache)
    elif isinstance(cache, ReplayDynamicCache) and cache.is_replaying:
        if config.is_assistant:
            _begin_drafting(config, cache)
        else:
            cache.stop_recording()


def _check_assisted(config: Any, plan: Plan, cache: Any) -> None:
    """Raise unless drafts of this generation can be verified in the ring of `cache`."""
    most = plan.num_draft_tokens
    if most == 0:
        raise ReplayError(
            "num_draft_tokens is 0, which verifies no drafts; allowed in assisted generation: enable(model, "
            "num_draft_tokens=N) with N of at least 1"
        )
    if (asked := config.prompt_lookup_num_tokens) is not None and asked > most:
        raise fail("prompt_lookup_num_tokens", asked, f"at most {most}, num_draft_tokens of enable(model, ...)")
    if config.assistant_early_exit is not None:
        raise fail("assistant_early_exit", config.assistant_early_exit, "None while ReplaySSM is enabled")
    if not isinstance(cache, ReplayDynamicCache) or not cache.is_replaying:
        raise fail("cache", type(cache).__name__, "none, or new_cache() of the model's handle, in assisted generation")
    if cache.length:
        # transformers passes the whole prompt, whatever the cache holds.
        raise ReplayError(f"cache holds {cache.length} tokens; allowed in assisted generation: an empty cache")
    cache.tail_len, cache.is_drafting = plan.max_window_len, False


def limit_drafts(generator: Any, plan: Plan) -> Any:
    """Let a candidate generator draft at most `plan.num_draft_tokens` tokens a round."""
    if getattr(generator, "requires_model_outputs", False):
        raise fail("candidate generator", type(generator).__name__, "assistant_model or prompt_lookup_num_tokens")
    most = plan.num_draft_tokens
    assistant = getattr(generator, "assistant_model", None)
    asked = None if assistant is None else assistant.generation_config.num_assistant_tokens
    if asked is not None and asked > most:
        raise fail("num_assistant_tokens", asked, f"None, or at most {most}, num_draft_tokens of enable(model, ...)")
    get_candidates, update_strategy = generator.get_candidates, generator.update_candidate_strategy

    def bound() -> None:
        if hasattr(generator, "num_assistant_tokens"):
            generator.num_assistant_tokens = min(generator.num_assistant_tokens, most)

    def get_limited(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens, logits = get_candidates(input_ids, *args, **kwargs)
        return tokens[:, : input_ids.shape[1] + most], None if logits is None else logits[:, :most]

    def update_limited(*args: Any, **kwargs: Any) -> None:
        update_strategy(*args, **kwargs)
        bound()

    bound()
    generator.get_candidates, generator.update_candidate_strategy = get_limited, update_limited
    return generator


def _begin_drafting(config: Any, cache: ReplayDynamicCache) -> None:
    """Before an assistant drafts: a round must fit in the ring, since the next one takes most of it back."""
    if not any(isinstance(layer, DynamicLayer) for layer in cache.layers):
        # transformers asks the assistant's attention layers how long its cache is.
        raise fail("assistant_model", "a model without attention layers", "a model that has attention layers")
    drafts = min(config.max_new_tokens, max(1, cache.plan.buffer_len - 1))
    prompt_len = config.max_length - config.max_new_tokens
    config.max_length, config.max_new_tokens = prompt_len + drafts, drafts
    cache.tail_len, cache.is_drafting = 1, True
    if not cache.is_recording:
        cache.activate_past_recording()
    cache.reserve(prompt_len - cache.length + drafts - 1)
