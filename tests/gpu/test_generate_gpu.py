"""`generate` on a GPU goes through the kernels and agrees with plain transformers."""

from __future__ import annotations

import pytest
import torch
from generation_runs import BATCH, forced_logits, prompts
from tiny_models import tiny_model

from replayssm.integrations.transformers import enable

pytestmark = pytest.mark.gpu
STEPS = 70


@pytest.mark.parametrize("name", ["nemotron_h", "falcon_h1", "qwen3_5", "olmo_hybrid", "kimi_linear", "glm5_next"])
def test_logits_of_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # fp32 products of cuBLAS in tf32 would differ by more than what is compared here.
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    model = tiny_model(name).cuda()
    tokens = torch.randint(3, 61, (BATCH, STEPS), generator=torch.Generator().manual_seed(5)).cuda()
    on_gpu = {key: value.cuda() for key, value in prompts().items()}
    monkeypatch.setattr("generation_runs.prompts", lambda seed=0: on_gpu)
    plain, _ = forced_logits(model, tokens)
    with enable(model) as handle:
        replay, cache = forced_logits(model, tokens)
        assert handle.plan.backend == "triton"
        assert int(cache.core.cursors[:, 3].min()) >= 3
    bound = 512 * torch.finfo(torch.float32).eps * float(plain.abs().max())
    assert float((plain - replay).abs().max()) <= bound


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_5", "kimi_linear"])
def test_assisted_generation_takes_fewer_steps_and_gives_the_same_tokens(name: str) -> None:
    model, assistant = tiny_model(name).cuda(), tiny_model(name).cuda()
    prompt = torch.randint(3, 61, (1, 12), generator=torch.Generator().manual_seed(5)).cuda()
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 40, "do_sample": False}
    calls = []
    with enable(model, num_draft_tokens=3), enable(assistant):
        plain = model.generate(prompt, **options)
        hook = model.get_decoder().register_forward_hook(lambda *_: calls.append(1))
        assisted = model.generate(prompt, assistant_model=assistant, **options)
        hook.remove()
    assert torch.equal(plain, assisted)
    assert len(calls) <= 25


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_5", "kimi_linear"])
def test_prompt_lookup_gives_the_same_tokens(name: str) -> None:
    model = tiny_model(name).cuda()
    prompt = torch.randint(3, 61, (1, 6), generator=torch.Generator().manual_seed(6)).repeat(1, 3).cuda()
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 40, "do_sample": False}
    calls = []
    with enable(model, num_draft_tokens=4):
        plain = model.generate(prompt, **options)
        hook = model.get_decoder().register_forward_hook(lambda *_: calls.append(1))
        drafted = model.generate(prompt, prompt_lookup_num_tokens=4, **options)
        hook.remove()
    assert torch.equal(plain, drafted)
    assert len(calls) <= 41
