"""Assisted generation through ReplaySSM: log-probs, acceptance lengths and states against a snapshot oracle's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from generation_runs import Enable, assert_logits_close, cache_argument, enabling
from snapshot_oracle import Rounds, StepwiseShadow, check_against_oracle, forward_from
from tiny_models import available_architectures, tiny_llama, tiny_model
from transformers import DynamicCache
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from replayssm.checks import ReplayError
from replayssm.cursors import NUM_FLUSHES
from replayssm.integrations.transformers import ReplayHandle

FAMILIES = ("nemotron_h", "qwen3_5", "kimi_linear")
NEW, DRAFTS = 40, 4
PROMPT = torch.randint(3, 61, (1, 11), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def enabled() -> Iterator[Enable]:
    yield from enabling(buffer_len=7, num_draft_tokens=DRAFTS)


def never_doubting(assistant: Any) -> Any:
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return assistant


def assistant_for(name: str, noise: float = 0.06) -> Any:
    """The same model with weights a little off, so that it guesses some tokens right; it never doubts."""
    assistant, generator = tiny_model(name), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in assistant.parameters():
            values = torch.empty(parameter.shape).normal_(generator=generator)
            parameter.add_(noise * parameter.float().std().nan_to_num(0.1) * values)
    return never_doubting(assistant)


def run(model: Any, **options: Any) -> Any:
    options = {"input_ids": PROMPT, "do_sample": False, "max_new_tokens": NEW, **options}
    if options["do_sample"]:
        # transformers takes the assistant's mask from the tokens: sampled padding would be masked there.
        options["suppress_tokens"] = [0]
    mask = torch.ones_like(options["input_ids"])
    return model.generate(attention_mask=mask, return_dict_in_generate=True, output_logits=True, **options)


class Scripted:
    """Drafts the right tokens, wrong from a random one on: rounds accept nothing, everything and all between."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sequence: torch.Tensor) -> None:
        self.sequence, self.pick = sequence, random.Random(0)
        monkeypatch.setattr(PromptLookupCandidateGenerator, "get_candidates", lambda _, ids: self.draft(ids))

    def draft(self, ids: torch.Tensor) -> tuple[torch.Tensor, None]:
        start = ids.shape[1]
        drafts = self.sequence[:, start : min(start + self.pick.randint(0, DRAFTS), self.sequence.shape[1] - 1)].clone()
        drafts[:, self.pick.randint(0, 2 * DRAFTS) :] = 60
        return torch.cat([ids, drafts], 1), None


def speculates(name: str) -> bool:
    """Whether this transformers' assisted generation can find the model's cache."""
    return "cache_params" not in cache_argument(tiny_model(name), None)


@pytest.mark.parametrize("name", available_architectures())
def test_rounds_equal_a_snapshot_oracles(name: str, enabled: Enable, monkeypatch: pytest.MonkeyPatch) -> None:
    if not speculates(name):
        pytest.skip("transformers cannot find this model's cache in assisted generation")
    model = tiny_model(name)
    plain = run(model)
    Scripted(monkeypatch, plain.sequences)
    shadow = StepwiseShadow(monkeypatch)
    handle = enabled(model)
    rounds = Rounds(model)
    result = run(model, prompt_lookup_num_tokens=DRAFTS, streamer=rounds)
    assert torch.equal(result.sequences, plain.sequences)
    assert_logits_close(torch.stack(result.logits), torch.stack(plain.logits))
    drafts = rounds.drafts(PROMPT.shape[1])
    rejected = [len(d) + 1 - len(a) for d, a in zip(drafts, rounds.accepted, strict=True)]
    for spec in handle.plan.layers:
        # The same inputs decoded token by token: equal to the last bit.
        state = result.past_key_values.core.materialize(spec.layer_idx, [0])
        assert torch.equal(state, shadow.state(spec.layer_idx, rejected))
    assert int(result.past_key_values.core.cursors[:, NUM_FLUSHES].min()) >= 4
    handle.disable()
    lengths = check_against_oracle(model, result, rounds, PROMPT)
    assert {1, 5} <= set(lengths) and len(set(lengths)) >= 4
    assert len(rounds.inputs) < NEW


@pytest.mark.parametrize("name", FAMILIES)
def test_an_enabled_assistant_rolls_back_too(name: str, enabled: Enable) -> None:
    model, assistant = tiny_model(name), assistant_for(name)
    twin = assistant_for(name)
    enabled(model)
    enabled(assistant, num_draft_tokens=0)
    rounds = Rounds(model)
    result = run(model, assistant_model=assistant, streamer=rounds)
    for handle in (model, assistant):
        hf_handle(handle).disable()
    lengths = check_against_oracle(model, result, rounds, PROMPT)
    assert len(set(lengths)) >= 3 and len(rounds.inputs) < NEW
    known = PROMPT
    for drafts, accepted in zip(rounds.drafts(PROMPT.shape[1]), rounds.accepted, strict=True):
        # What was rejected before leaves no trace in the assistant either.
        if drafts:
            expected = run(twin, input_ids=known, max_new_tokens=len(drafts)).sequences[0, known.shape[1] :]
            assert drafts == expected.tolist()
        known = torch.cat([known, torch.tensor([accepted])], 1)


def hf_handle(model: Any) -> ReplayHandle:
    return model.get_decoder()._replayssm_handle


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("do_sample", [False, True])
def test_an_assistant_of_another_architecture(name: str, do_sample: bool, enabled: Enable) -> None:
    model = tiny_model(name)
    enabled(model)
    rounds = Rounds(model)
    result = run(model, assistant_model=never_doubting(tiny_llama()), do_sample=do_sample, streamer=rounds)
    assert max(len(window[0]) for window in rounds.inputs[1:]) == DRAFTS + 1
    hf_handle(model).disable()
    if not do_sample:
        check_against_oracle(model, result, rounds, PROMPT)
    assert_logits_close(torch.cat(list(result.logits)), forced(model, result.sequences))


def forced(model: Any, sequence: torch.Tensor, prompt_len: int = PROMPT.shape[1]) -> torch.Tensor:
    """Logits of the tokens after the prompt, each decoded alone."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    pieces = [sequence[:, :prompt_len], *sequence[:, prompt_len:-1].split(1, 1)]
    seen = [0, *range(prompt_len, sequence.shape[1])]
    return torch.cat([forward_from(model, cache, ids, n)[:, -1] for ids, n in zip(pieces, seen, strict=False)])


@pytest.mark.parametrize("name", FAMILIES)
def test_sampling_accepts_all_that_the_same_model_drafts(name: str, enabled: Enable) -> None:
    model, assistant = tiny_model(name), assistant_for(name, noise=0.0)
    enabled(model)
    enabled(assistant)
    rounds = Rounds(model)
    result = run(model, assistant_model=assistant, do_sample=True, streamer=rounds)
    assert [len(accepted) for accepted in rounds.accepted] == [DRAFTS + 1] * (NEW // (DRAFTS + 1))
    hf_handle(model).disable()
    hf_handle(assistant).disable()
    assert_logits_close(torch.cat(list(result.logits)), forced(model, result.sequences))


@pytest.mark.parametrize("name", FAMILIES)
def test_prompt_lookup_on_a_prompt_that_repeats(name: str, enabled: Enable) -> None:
    model, prompt = tiny_model(name), PROMPT.repeat(1, 3)
    plain = run(model, input_ids=prompt)
    enabled(model)
    rounds = Rounds(model)
    result = run(model, input_ids=prompt, prompt_lookup_num_tokens=3, streamer=rounds)
    assert torch.equal(result.sequences, plain.sequences)
    hf_handle(model).disable()
    check_against_oracle(model, result, rounds, prompt)


@pytest.mark.parametrize("name", FAMILIES)
def test_turns_with_and_without_drafts_share_a_cache(name: str, enabled: Enable) -> None:
    """A cache goes on after drafts. transformers passes a prompt again that is cached already: not with drafts."""
    model, assistant = tiny_model(name), assistant_for(name)
    logits: list[torch.Tensor] = []

    def talk(cache: Any, drafting: dict[str, Any]) -> torch.Tensor:
        ids = PROMPT
        for turn in range(3):
            options = drafting if turn == 0 else {}
            result = run(model, input_ids=ids, max_new_tokens=9, **cache_argument(model, cache), **options)
            logits.append(torch.cat(list(result.logits)))
            ids = torch.cat([result.sequences, PROMPT[:, : 3 * turn]], 1)
        return ids

    expected = talk(DynamicCache(config=model.config.get_text_config(decoder=True)), {})
    cache = enabled(model).new_cache()
    enabled(assistant)
    ids = talk(cache, {"assistant_model": assistant})
    assert torch.equal(ids, expected)
    assert not cache.is_recording
    for plain, replay in zip(logits[:3], logits[3:], strict=True):
        assert_logits_close(replay, plain)
    with pytest.raises(ReplayError, match="cache holds 40 tokens; allowed in assisted generation: an empty cache"):
        run(model, input_ids=ids, assistant_model=assistant, **cache_argument(model, cache))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("batch", [1, 3])
def test_crop_in_a_loop_of_ones_own(name: str, batch: int, enabled: Enable) -> None:
    """Calls of any length, of which the last tokens are taken back again and again, on several rows."""
    model, pick = tiny_model(name), random.Random(batch)
    tokens = torch.randint(3, 61, (batch, 60), generator=torch.Generator().manual_seed(1))
    cache = enabled(model).new_cache()
    cache.activate_past_recording()
    kept = 0
    with torch.inference_mode():
        while kept < 44:
            count = pick.choice([1, 2, 5, 5, 9])
            out = forward_from(model, cache, tokens[:, kept : kept + count], kept)
            expected = model(tokens[:, : kept + count], use_cache=False).logits[:, kept:]
            assert_logits_close(out, expected)
            back = pick.randint(0, min(count, DRAFTS))
            cache.crop(-back)
            kept += count - back
            assert cache.length == kept
