"""Wrong uses of drafts with the transformers integration: one clear error each, and everything still works."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from generation_runs import cache_argument
from tiny_models import tiny_model
from transformers import DynamicCache

from replayssm.checks import ReplayError
from replayssm.integrations.transformers import ReplayHandle, disable, enable

PROMPT = torch.tensor([[5, 9, 6, 5, 9, 6, 5, 9]])


def run(model: Any, **options: Any) -> Any:
    options = {"input_ids": PROMPT, "do_sample": False, "max_new_tokens": 9, **options}
    mask = torch.ones_like(options["input_ids"])
    return model.generate(attention_mask=mask, return_dict_in_generate=True, output_logits=True, **options)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen3_5")


@pytest.fixture
def handle(model: Any) -> Iterator[ReplayHandle]:
    with enable(model, buffer_len=5, num_draft_tokens=2) as handle:
        yield handle


def eager_assistant() -> Any:
    assistant = tiny_model("qwen3_5")
    assistant.generation_config.num_assistant_tokens = 3
    return assistant


def pure_mamba() -> Any:
    assistant = tiny_model("mamba2")
    enable(assistant)
    return assistant


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prompt_lookup_num_tokens": 3},
            "prompt_lookup_num_tokens is 3; allowed: at most 2, num_draft_tokens of enable",
        ),
        ({"assistant_model": eager_assistant}, "num_assistant_tokens is 3; allowed: None, or at most 2"),
        ({"assistant_model": pure_mamba}, "assistant_model is 'a model without attention layers'"),
        ({"assistant_early_exit": 1}, "assistant_early_exit is 1; allowed: None while ReplaySSM is enabled"),
        ({"prompt_lookup_num_tokens": 2, "output_attentions": True}, "output_attentions is True; allowed: False"),
        ({"prompt_lookup_num_tokens": 2, "plain_cache": True}, "cache is 'DynamicCache'; allowed: none, or new_cache"),
        (
            {"prompt_lookup_num_tokens": 2, "cache_implementation": "static"},
            "cache_implementation is 'static'; allowed",
        ),
        ({"prompt_lookup_num_tokens": 2, "input_ids": PROMPT.repeat(2, 1)}, "only supported for batch_size = 1"),
    ],
)
def test_generate_refuses(model: Any, handle: ReplayHandle, options: dict[str, Any], message: str) -> None:
    expected = run(model)
    options = {name: value() if callable(value) else value for name, value in options.items()}
    if options.pop("plain_cache", False):
        options |= cache_argument(model, DynamicCache(config=model.config))
    with pytest.raises(ValueError, match=message):
        run(model, **options)
    if "assistant_model" in options:
        disable(options["assistant_model"])
    assert all(map(torch.equal, run(model).logits, expected.logits))
    drafted = run(model, prompt_lookup_num_tokens=2)
    assert torch.equal(drafted.sequences, expected.sequences)


def test_a_disabled_model_refuses_again(model: Any) -> None:
    with enable(model, num_draft_tokens=2):
        run(model, prompt_lookup_num_tokens=2)
    assert not {"_is_stateful", "_get_candidate_generator", "_prepare_cache_for_generation"} & set(model.__dict__)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        run(model, prompt_lookup_num_tokens=2)


@torch.no_grad()
def step(model: Any, cache: Any, tokens: int = 1) -> torch.Tensor:
    ids = torch.full((1, tokens), 7)
    return model(ids, use_cache=True, **cache_argument(model, cache)).logits


@pytest.fixture
def cache(model: Any, handle: ReplayHandle) -> Any:
    """A cache that records, three tokens after a prefill."""
    cache = handle.new_cache()
    run(model, **cache_argument(model, cache))
    cache.activate_past_recording()
    step(model, cache, 3)
    return cache


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.crop(-4), "tokens_to_remove is -4; allowed: -3 to 0: tokens since the last flush"),
        (lambda cache: cache.crop(1), "tokens_to_remove is 1; allowed: -3 to 0"),
    ],
)
def test_crop_refuses(model: Any, cache: Any, call: Callable[[Any], None], message: str) -> None:
    before = copy.deepcopy(cache)
    with pytest.raises(ReplayError, match=message):
        call(cache)
    assert torch.equal(cache.core.cursors, before.core.cursors)
    assert torch.equal(step(model, cache), step(model, before))
    cache.crop(-2)
    assert cache.length == before.length - 2


def test_crop_needs_a_recording(model: Any, handle: ReplayHandle) -> None:
    cache = run(model).past_key_values
    with pytest.raises(ReplayError, match=r"tokens_to_remove is -1; allowed: a crop after activate_past_recording"):
        cache.crop(-1)
    cache.activate_past_recording()
    with pytest.raises(ReplayError, match="tokens_to_remove is -1; allowed: 0 to 0"):
        cache.crop(-1)
    cache.crop(0)
    step(model, cache)


def test_everything_can_be_taken_back(model: Any, handle: ReplayHandle) -> None:
    cache = handle.new_cache()
    cache.activate_past_recording()
    expected = step(model, cache, 3)
    cache.crop(-3)
    assert cache.length == 0 and cache.get_seq_length() == 0
    assert torch.equal(step(model, cache, 3), expected)


def test_an_assistant_that_goes_back_too_far_starts_anew(model: Any, handle: ReplayHandle) -> None:
    expected = run(model, max_new_tokens=2)
    cache = handle.new_cache()
    drafting = {"is_assistant": True, "output_scores": True, "assistant_confidence_threshold": 0.0}
    for _ in range(2):
        again = run(model, max_new_tokens=2, **drafting, **cache_argument(model, cache))
        assert torch.equal(again.sequences, expected.sequences)
        cache.crop(-cache.length + 2)
        assert cache.length == 0 and cache.get_seq_length() == 0


def test_gradients_are_refused_before_anything_runs(model: Any, handle: ReplayHandle) -> None:
    cache = handle.new_cache()
    cache.activate_past_recording()
    for _ in range(2):
        before = cache.length
        with pytest.raises(ReplayError, match=r"torch\.is_grad_enabled\(\) is True while decoding"):
            model(torch.full((1, 8), 7), use_cache=True, **cache_argument(model, cache))
        assert cache.length == before
        step(model, cache, 8)


class Broken(Exception):
    """Raised inside a forward call."""


def test_forward_that_raises_between_its_parts(model: Any, handle: ReplayHandle) -> None:
    """The first part cannot be taken back once it is in the cache."""
    cache, calls = handle.new_cache(), []
    cache.activate_past_recording()

    def fail(*_: Any) -> None:
        calls.append(0)
        if len(calls) == 2:
            raise Broken

    hook = model.get_decoder().layers[0].register_forward_pre_hook(fail)
    with pytest.raises(Broken):
        step(model, cache, 8)
    hook.remove()
    with pytest.raises(ReplayError, match="left half written by a call that raised"):
        step(model, cache)
    cache.reset()
    assert step(model, cache, 8).shape[1] == 8
