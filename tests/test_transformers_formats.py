"""Generation with read copies: what layers decode goes into their checkpoints exactly, whatever outputs read."""

from __future__ import annotations

import copy

import pytest
import torch
from formats_model import check_read_copies
from generation_runs import BATCH, PROMPT, run
from snapshot_oracle import Rounds, StepwiseShadow, forward_from
from tiny_models import tiny_model

from replayssm import ReplayError
from replayssm.integrations.transformers import enable

FAMILIES = ("nemotron_h", "qwen3_5", "kimi_linear")
NEW = 24
OPTIONS = (
    {"read": "fp8", "checkpoint": "fp8", "rounding": "stochastic", "seed": 3},
    {"read": "bf16", "checkpoint": "bf16"},
)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_recurrence_stays_exact(name: str, drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs that each layer accepted, decoded token by token without any copy: the same states, bit for bit."""
    model = tiny_model(name)
    shadow, rounds = StepwiseShadow(monkeypatch), Rounds(model)
    prompt = {"input_ids": torch.randint(3, 61, (1, 9)), "attention_mask": torch.ones(1, 9, dtype=torch.long)}
    lookup = {"prompt_lookup_num_tokens": drafts} if drafts else {}
    with enable(model, buffer_len=5, num_draft_tokens=drafts, read="nvfp4") as handle:
        core = run(model, **prompt, **lookup, max_new_tokens=NEW, streamer=rounds).past_key_values.core
        rejected = [0] * (NEW - 1)
        if drafts:
            verified = zip(rounds.drafts(9), rounds.accepted, strict=True)
            rejected = [len(drafted) + 1 - len(accepted) for drafted, accepted in verified]
            assert any(rejected)
        for spec in handle.plan.layers:
            state = core.materialize(spec.layer_idx, [0])
            assert torch.equal(state, shadow.state(spec.layer_idx, rejected))
            check_read_copies(core.layer(spec.layer_idx), [0])
        assert int(core.cursors[0, 3]) >= 4


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_batches_and_beams_keep_the_copies_true(name: str, options: dict) -> None:
    model = tiny_model(name)
    with enable(model, buffer_len=4, **options) as handle:
        for more in ({}, {"num_beams": 2, "max_new_tokens": 9}, {"prefill_chunk_size": 2}):
            first, again = (run(model, **more) for _ in range(2))
            assert torch.isfinite(torch.stack(first.logits)).all()
            assert torch.equal(torch.stack(first.logits), torch.stack(again.logits))
            core = first.past_key_values.core
            for spec in handle.plan.layers:
                check_read_copies(core.layer(spec.layer_idx), list(range(core.num_slots)))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_copied_cache_goes_its_own_way(name: str) -> None:
    model = tiny_model(name)
    with enable(model, buffer_len=4, read="nvfp4", checkpoint="bf16", rounding="stochastic") as handle:
        first = run(model, max_new_tokens=6).past_key_values
        second, third = copy.deepcopy(first), copy.deepcopy(first)
        for step in range(9):
            ids = torch.randint(3, 61, (BATCH, 1))
            one, two = (forward_from(model, cache, ids, PROMPT + 5 + step) for cache in (first, second))
            assert torch.equal(one, two)
        for spec in handle.plan.layers:
            layers = [cache.core.layer(spec.layer_idx) for cache in (first, second, third)]
            for layer in layers:
                check_read_copies(layer, list(range(BATCH)))
            assert torch.equal(layers[0].state, layers[1].state)
            assert not torch.equal(layers[0].state, layers[2].state)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_format_for_each_layer(name: str) -> None:
    model = tiny_model(name)
    with enable(model) as handle:
        indices = [spec.layer_idx for spec in handle.plan.layers]
    read = {idx: ("nvfp4", "bf16")[i % 2] for i, idx in enumerate(indices)}
    with enable(model, buffer_len=4, read=read) as handle:
        core = run(model).past_key_values.core
        assert {idx: core.layer(idx).read_copy.format for idx in indices} == read
        assert handle.plan.read_name == "bf16 in 1, nvfp4 in 1 layers"


def test_options_that_do_not_go_together() -> None:
    model = tiny_model("qwen3_5")
    with pytest.raises(ReplayError, match=r"read is 'int8' with K = 16; allowed: K divisible by 32"):
        enable(model, read="int8")
    with pytest.raises(ReplayError, match=r"read is \{0: 'nvfp4'\}; allowed: a format, or a mapping from every"):
        enable(model, read={0: "nvfp4"})
