"""What callers do with `generate` while ReplaySSM is enabled, one or two models of each family."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from generation_runs import (
    BATCH,
    FAMILIES,
    MODELS,
    PROMPT,
    Enable,
    assert_logits_close,
    cache_argument,
    enabling,
    forced_logits,
    prompts,
    run,
    step,
)
from tiny_models import tiny_model
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from replayssm.cursors import NUM_FLUSHES
from replayssm.integrations import hf_route
from replayssm.integrations.hf_cache import ReplayDynamicCache
from replayssm.integrations.transformers import disable, enable


@pytest.fixture
def enabled() -> Iterator[Enable]:
    yield from enabling(buffer_len=4)


def compare(model: Any, enable_it: Enable, *, flushes: int = 2, **options: Any) -> tuple[Any, Any]:
    """The same generation without and with ReplaySSM; equal sequences, close logits, at least so many flushes."""
    torch.manual_seed(3)
    plain = run(model, **options)
    enable_it(model)
    torch.manual_seed(3)
    replay = run(model, **options)
    assert torch.equal(replay.sequences, plain.sequences)
    assert_logits_close(torch.stack(replay.logits), torch.stack(plain.logits))
    assert isinstance(replay.past_key_values, ReplayDynamicCache)
    assert int(replay.past_key_values.core.cursors[:, NUM_FLUSHES].min()) >= flushes
    return plain, replay


@pytest.mark.parametrize("name", MODELS)
def test_greedy_and_scores(name: str, enabled: Enable) -> None:
    plain, replay = compare(tiny_model(name), enabled)
    assert_logits_close(torch.stack(replay.scores), torch.stack(plain.scores))


@pytest.mark.parametrize("name", FAMILIES)
def test_sampling_with_a_seed(name: str, enabled: Enable) -> None:
    compare(tiny_model(name), enabled, do_sample=True, num_return_sequences=2)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("do_sample", [False, True])
def test_beam_search(name: str, do_sample: bool, enabled: Enable) -> None:
    plain, replay = compare(tiny_model(name), enabled, num_beams=3, do_sample=do_sample, num_return_sequences=2)
    assert_logits_close(replay.sequences_scores, plain.sequences_scores)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_that_stop_early(name: str, enabled: Enable) -> None:
    model = tiny_model(name)
    continued = run(model).sequences[:, PROMPT:]
    stops = [int(continued[0, 5]), int(continued[1, 11])]
    plain, _ = compare(model, enabled, flushes=1, eos_token_id=stops)
    ended = (plain.sequences[:, PROMPT:-1] == 0).any(1)
    assert ended.any()


class StopAfter(StoppingCriteria):
    """Stops when a row is long enough."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("name", FAMILIES)
def test_stopping_criteria(name: str, enabled: Enable) -> None:
    criteria = StoppingCriteriaList([StopAfter(PROMPT + 13)])
    _, replay = compare(tiny_model(name), enabled, stopping_criteria=criteria)
    assert replay.sequences.shape[1] == PROMPT + 13


class Collect(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("name", FAMILIES)
def test_streaming(name: str, enabled: Enable) -> None:
    model, streamer = tiny_model(name), Collect()
    enabled(model)
    ids = prompts()["input_ids"][:1]
    result = run(model, input_ids=ids, attention_mask=torch.ones_like(ids), streamer=streamer)
    assert streamer.ended
    assert streamer.tokens == result.sequences[0].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_one_token_prompts_and_chunked_prefill(name: str, enabled: Enable) -> None:
    model = tiny_model(name)
    one = {"input_ids": torch.tensor([[7], [9]]), "attention_mask": torch.ones(2, 1, dtype=torch.long)}
    plain, chunked = run(model, **one), run(model, prefill_chunk_size=2)
    enabled(model)
    assert_logits_close(torch.stack(run(model, **one).logits), torch.stack(plain.logits))
    assert_logits_close(torch.stack(run(model, prefill_chunk_size=2).logits), torch.stack(chunked.logits))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("checkpoint", ["fp32", "bf16"])
def test_bf16_model(name: str, checkpoint: str, enabled: Enable) -> None:
    model = tiny_model(name, dtype=torch.bfloat16)
    tokens = torch.randint(3, 61, (BATCH, 40), generator=torch.Generator().manual_seed(1))
    exact, _ = forced_logits(copy.deepcopy(model).float(), tokens)
    plain, _ = forced_logits(model, tokens)
    handle = enabled(model, checkpoint=checkpoint)
    assert handle.plan.activation == torch.bfloat16
    replay, cache = forced_logits(model, tokens)
    stepwise_error = float((plain - exact).abs().max())
    # The model's own bf16 products dominate: reading through the ring may add as much again.
    assert float((replay - exact).abs().max()) <= 2.0 * stepwise_error
    assert cache.core.layer(handle.plan.layers[0].layer_idx).state.dtype == handle.plan.checkpoint_dtype


def test_two_models_at_once(enabled: Enable) -> None:
    first, second, other = tiny_model("qwen3_5"), tiny_model("qwen3_5", seed=1), tiny_model("mamba2")
    plain = [run(model) for model in (first, second, other)]
    handles = [enabled(first, buffer_len=3), enabled(second, buffer_len=5), enabled(other)]
    for model, expected in zip((second, first, other), (plain[1], plain[0], plain[2]), strict=True):
        assert torch.equal(run(model).sequences, expected.sequences)
    handles[0].disable()
    assert all(map(torch.equal, run(first).logits, plain[0].logits))
    replay = run(second)
    assert torch.equal(replay.sequences, plain[1].sequences)
    assert isinstance(replay.past_key_values, ReplayDynamicCache)


@pytest.mark.parametrize("name", FAMILIES)
def test_inference_mode(name: str, enabled: Enable) -> None:
    model = tiny_model(name)
    enabled(model)
    expected = run(model)
    with torch.inference_mode():
        assert all(map(torch.equal, run(model).logits, expected.logits))


@pytest.mark.parametrize("name", MODELS)
def test_disable_restores_the_model_and_frees_the_caches(name: str) -> None:
    model = tiny_model(name)
    module = sys.modules[type(model.get_decoder()).__module__]
    names = [n for n, _ in hf_route.DECODE_CALLS.values() if hasattr(module, n)]
    originals = [getattr(module, n) for n in names]
    plain = run(model)
    with enable(model) as handle:
        assert enable(model) is handle
        cache = handle.new_cache()
        halfway = run(model, max_new_tokens=12, **cache_argument(model, cache))
        expected = step(model, copy.deepcopy(cache))
    assert [getattr(module, n) for n in names] == originals
    assert "_prepare_cache_for_generation" not in model.__dict__
    assert not model.get_decoder()._forward_hooks and not model.get_decoder()._forward_pre_hooks
    assert all(map(torch.equal, run(model).logits, plain.logits))
    assert type(run(model).past_key_values) is DynamicCache
    # The cache goes on as an ordinary one.
    assert torch.equal(halfway.sequences, plain.sequences[:, : PROMPT + 12])
    assert cache.core is None
    assert_logits_close(step(model, cache), expected)
    disable(model)


def test_dropped_model_gives_the_globals_back() -> None:
    model = tiny_model("mamba2")
    enable(model)
    assert hf_route._patched
    del model
    gc.collect()
    assert not hf_route._patched
