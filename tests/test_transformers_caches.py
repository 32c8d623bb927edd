"""What callers do with a cache of ReplaySSM: go on with it, call `forward`, read, copy and select, let it go."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from generation_runs import (
    BATCH,
    FAMILIES,
    MODELS,
    Enable,
    assert_logits_close,
    cache_argument,
    enabling,
    model_cache,
    prompts,
    run,
    step,
)
from tiny_models import tiny_model
from transformers import DynamicCache

from replayssm.integrations.hf_cache import ReplayDynamicCache


@pytest.fixture
def enabled() -> Iterator[Enable]:
    yield from enabling(buffer_len=4)


def conversation(model: Any, cache: Any) -> list[torch.Tensor]:
    """Three turns on one cache: logits of each. The second turn brings three tokens, the third none but the last."""
    first = prompts()
    ids, mask, logits = first["input_ids"], first["attention_mask"], []
    for turn, new_tokens in enumerate((3, 0, 0)):
        result = run(model, input_ids=ids, attention_mask=mask, max_new_tokens=9 + turn, **cache_argument(model, cache))
        logits.append(torch.stack(result.logits))
        new = torch.randint(3, 61, (BATCH, new_tokens), generator=torch.Generator().manual_seed(turn))
        ids = torch.cat([result.sequences, new], 1)
        mask = torch.cat([mask, torch.ones(BATCH, ids.shape[1] - mask.shape[1], dtype=mask.dtype)], 1)
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_conversation_continues_on_the_same_cache(name: str, enabled: Enable) -> None:
    model = tiny_model(name)
    plain = conversation(model, DynamicCache(config=model.config))
    replay = conversation(model, enabled(model).new_cache())
    for actual, expected in zip(replay, plain, strict=True):
        assert_logits_close(actual, expected)


@pytest.mark.parametrize("name", MODELS)
def test_forward_without_generate(name: str, enabled: Enable) -> None:
    model = tiny_model(name)
    tokens = torch.randint(3, 61, (2, 30), generator=torch.Generator().manual_seed(5))
    cuts = [0, 1, 2, 3, 9, 10, 11, 12, 13, 14, 15, 20, *range(21, 31)]

    @torch.no_grad()
    def logits(target: Any) -> tuple[list[torch.Tensor], Any]:
        out, cache = [], {}
        for start, end in itertools.pairwise(cuts):
            result = target(input_ids=tokens[:, start:end], use_cache=True, **cache)
            cache = cache_argument(target, model_cache(result))
            out.append(result[0])
        return out, model_cache(result)

    plain, plain_cache = logits(model)
    inner, _ = logits(model.get_decoder())
    handle = enabled(model)
    replay, cache = logits(model)
    replay_inner, _ = logits(model.get_decoder())
    parameters = list(inspect.signature(model.get_decoder().forward).parameters)
    until_cache = parameters.index(next(iter(cache_argument(model.get_decoder(), None))))
    by_position = model.get_decoder()(tokens[:, :3], *[None] * until_cache)
    assert isinstance(model_cache(by_position), ReplayDynamicCache)
    assert isinstance(cache, ReplayDynamicCache)
    assert_logits_close(torch.cat(replay, 1), torch.cat(plain, 1))
    assert_logits_close(torch.cat(replay_inner, 1), torch.cat(inner, 1))
    for spec in handle.plan.layers:
        layer, plain_layer = cache.layers[spec.layer_idx], plain_cache.layers[spec.layer_idx]
        assert_logits_close(layer.recurrent_states[0], plain_layer.recurrent_states[0])
        assert_logits_close(layer.conv_states[0], plain_layer.conv_states[0])


@pytest.mark.parametrize("name", MODELS)
def test_reading_a_state_changes_nothing(name: str, enabled: Enable) -> None:
    model = tiny_model(name)
    handle = enabled(model)
    cache = run(model, max_new_tokens=7).past_key_values
    before = cache.core.cursors.clone()
    layer_idx = handle.plan.layers[0].layer_idx
    state = cache.layers[layer_idx].recurrent_states[0]
    again = cache.layers[layer_idx].recurrent_states[0]
    assert torch.equal(state, again)
    state.zero_()
    assert torch.equal(cache.layers[layer_idx].recurrent_states[0], again)
    assert torch.equal(cache.core.cursors, before)


@pytest.mark.parametrize("name", MODELS)
def test_state_after_a_prefill(name: str, enabled: Enable) -> None:
    model = tiny_model(name)
    with torch.no_grad():
        plain = model_cache(model(**prompts(), use_cache=True))
        handle = enabled(model)
        cache = model_cache(model(**prompts(), use_cache=True))
    layer_idx = handle.plan.layers[-1].layer_idx
    assert torch.equal(cache.layers[layer_idx].recurrent_states[0], plain.layers[layer_idx].recurrent_states[0])
    copied = copy.deepcopy(cache)
    copied.batch_select_indices(torch.tensor([3, 1]))
    expected = step(model, copy.deepcopy(cache))
    assert_logits_close(step(model, copied, batch=2), expected[[3, 1]])
    handle.disable()
    assert torch.equal(step(model, cache), step(model, plain))


@pytest.mark.parametrize("name", MODELS)
def test_copied_cache_is_independent(name: str, enabled: Enable) -> None:
    model = tiny_model(name)
    handle = enabled(model)
    cache = run(model, max_new_tokens=6).past_key_values
    copied = copy.deepcopy(cache)
    expected = [step(model, cache, token) for token in (5, 6, 7, 8)]
    actual = [step(model, copied, token) for token in (5, 6, 7, 8)]
    assert all(map(torch.equal, actual, expected))
    handle.disable()
    assert not copied.is_replaying


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_a_cache_are_selected_and_repeated(name: str, enabled: Enable) -> None:
    model = tiny_model(name)
    enabled(model)
    cache = run(model, max_new_tokens=6).past_key_values
    expected = step(model, copy.deepcopy(cache))
    selected = copy.deepcopy(cache)
    selected.batch_select_indices(torch.tensor([2, 0, 2]))
    assert_logits_close(step(model, selected, batch=3), expected[[2, 0, 2]])
    cache.batch_repeat_interleave(2)
    assert_logits_close(step(model, cache, batch=2 * BATCH), expected.repeat_interleave(2, 0))


@pytest.mark.parametrize("name", FAMILIES)
def test_foreign_cache_decodes_as_before(name: str, enabled: Enable) -> None:
    model = tiny_model(name)
    plain = run(model, **cache_argument(model, DynamicCache(config=model.config)))
    enabled(model)
    cache = DynamicCache(config=model.config)
    result = run(model, **cache_argument(model, cache))
    assert result.past_key_values is cache
    assert all(map(torch.equal, result.logits, plain.logits))
    without = run(model, use_cache=False, max_new_tokens=3)
    assert_logits_close(torch.stack(without.logits), torch.stack(plain.logits[:3]))


def test_reset_takes_another_batch(enabled: Enable) -> None:
    # Without attention: some transformers versions keep the length of attention layers.
    model = tiny_model("mamba2")
    cache = enabled(model).new_cache()
    run(model, **cache_argument(model, cache))
    for batch in (BATCH, 2):
        cache.reset()
        rows = {key: value[:batch] for key, value in prompts().items()}
        again = run(model, **rows, **cache_argument(model, cache))
        assert all(map(torch.equal, again.logits, run(model, **rows).logits))


def test_finished_cache_is_freed_at_once(enabled: Enable) -> None:
    model = tiny_model("mamba2")
    enabled(model)
    gc.collect()
    gc.disable()
    try:
        cache = run(model).past_key_values
        core = ref(cache.core)
        del cache
        assert core() is None
    finally:
        gc.enable()
