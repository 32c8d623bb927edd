"""Wrong uses of the transformers integration: one clear error each, and everything still works afterwards."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from generation_runs import BATCH, cache_argument, prompts, run
from tiny_models import tiny_llama, tiny_model
from torch import nn
from transformers import DynamicCache, LlamaConfig

from replayssm.checks import ReplayError
from replayssm.integrations import hf_route
from replayssm.integrations.hf_cache import ReplayDynamicCache
from replayssm.integrations.transformers import ReplayHandle, disable, enable

MODELS = ("nemotron_h", "qwen3_5", "kimi_linear")


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: 17, {}, "model is 'int'; allowed: a transformers model"),
        (lambda: nn.Linear(2, 2), {}, "model is 'Linear'; allowed: a transformers model"),
        (tiny_llama, {}, "model_type is 'llama'; allowed: nemotron_h, mamba2"),
        (None, {"buffer_len": 0}, "buffer_len is 0; allowed"),
        (None, {"buffer_len": 2.5}, r"buffer_len is 2\.5; allowed"),
        (None, {"checkpoint": "int4"}, "checkpoint is 'int4'; allowed: fp32"),
        (None, {"read": "fp3"}, "read is 'fp3'; allowed: none"),
        (None, {"activation": torch.int8}, r"activation is torch\.int8; allowed"),
        (None, {"backend": "cuda"}, "backend is 'cuda'; allowed: auto"),
        (None, {"spread_flushes": 3}, "spread_flushes is 3; allowed"),
        (lambda: tiny_model("mamba2", dtype=torch.float64), {}, r"activation is torch\.float64; allowed"),
        (lambda: tiny_model("mamba2").to("meta"), {}, r"model.device is \['meta'\]; allowed: one device"),
    ],
)
def test_enable_refuses(make: Callable[[], Any] | None, options: dict[str, Any], message: str) -> None:
    model = tiny_model("mamba2") if make is None else make()
    with pytest.raises(ReplayError, match=message):
        enable(model, **options)
    assert not hf_route._patched
    assert "_prepare_cache_for_generation" not in getattr(model, "__dict__", {})


def test_enable_refuses_a_model_with_other_layer_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hf_route.DECODE_CALLS, "mamba2", ("another_update", "state"))
    with pytest.raises(ReplayError, match=r"model is 'Mamba2ForCausalLM'; allowed: .* calls another_update"):
        enable(tiny_model("mamba2"))


def test_enable_refuses_a_second_set_of_options() -> None:
    model = tiny_model("mamba2")
    with enable(model, buffer_len=4) as handle:
        with pytest.raises(ReplayError, match="enabled with other options"):
            enable(model, buffer_len=5)
        assert enable(model, buffer_len=4) is handle
        run(model)
    enable(model, buffer_len=5).disable()


def test_disable_of_another_model_does_nothing() -> None:
    disable(tiny_llama())
    with pytest.raises(ReplayError, match="model is 'str'; allowed: a transformers model"):
        disable("model")


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


@pytest.fixture
def handle(model: Any) -> Any:
    with enable(model, buffer_len=4) as handle:
        yield handle


@pytest.mark.parametrize(
    ("options", "rows", "message"),
    [
        ({"cache_implementation": "static"}, BATCH, "cache_implementation is 'static'; allowed: None or 'dynamic'"),
        (
            {"cache_implementation": "offloaded"},
            BATCH,
            "cache_implementation is 'offloaded'; allowed: None or 'dynamic'",
        ),
        (
            {"cache_implementation": "quantized"},
            BATCH,
            "cache_implementation is 'quantized'; allowed: None or 'dynamic'",
        ),
        (
            {"prompt_lookup_num_tokens": 3},
            1,
            "num_draft_tokens is 0, which verifies no drafts; allowed in assisted",
        ),
    ],
)
def test_generate_refuses(model: Any, handle: ReplayHandle, options: dict[str, Any], rows: int, message: str) -> None:
    inputs = {key: value[:rows] for key, value in prompts().items()}
    expected = run(model)
    with pytest.raises(ValueError, match=message):
        run(model, **inputs, **options)
    assert all(map(torch.equal, run(model).logits, expected.logits))


def test_cache_of_another_plan(model: Any, handle: ReplayHandle) -> None:
    other = ReplayDynamicCache(model.config, handle.plan.with_options(buffer_len=9))
    with pytest.raises(ReplayError, match="cache was made for another model or other options"):
        run(model, **cache_argument(model, other))


def test_cache_of_a_model_that_is_not_enabled(model: Any) -> None:
    with enable(model) as handle:
        plan = handle.plan
    with pytest.raises(ReplayError, match=r"the model is not enabled; allowed: replayssm\.enable"):
        run(model, **cache_argument(model, ReplayDynamicCache(model.config, plan)))


def test_copying_or_pickling_an_enabled_model(model: Any, handle: ReplayHandle) -> None:
    with pytest.raises(ReplayError, match=r"model is enabled; allowed: disable\(model\) before"):
        copy.deepcopy(model)
    with pytest.raises(ReplayError, match=r"model is enabled; allowed: disable\(model\) before"):
        pickle.dumps(model)
    run(model, max_new_tokens=2)


def test_a_model_that_was_moved(model: Any, handle: ReplayHandle) -> None:
    model.to("meta")
    with pytest.raises(ReplayError, match=r"model\.device is 'meta'; allowed: cpu; after a move disable and enable"):
        model(torch.ones(1, 3, dtype=torch.long, device="meta"), use_cache=True)


def test_pickling_a_cache(model: Any, handle: ReplayHandle) -> None:
    result = run(model, max_new_tokens=3)
    with pytest.raises(ReplayError, match=r"cache is replaying; allowed: disable\(model\), or to_plain\(\)"):
        pickle.dumps(result.past_key_values)
    handle.disable()
    loaded = pickle.loads(pickle.dumps(result.past_key_values))
    for spec in handle.plan.layers:
        ours, theirs = (cache.layers[spec.layer_idx] for cache in (loaded, result.past_key_values))
        assert torch.equal(ours.recurrent_states[0], theirs.recurrent_states[0])


def test_activations_wider_than_the_ring(model: Any) -> None:
    narrower = r"dtype is torch\.float32; allowed: torch\.bfloat16, or a narrower one"
    with enable(model, activation=torch.bfloat16), pytest.raises(ReplayError, match=narrower):
        run(model)


def test_activations_narrower_than_the_ring() -> None:
    model = tiny_model("qwen3_5", dtype=torch.bfloat16)
    with enable(model, activation=torch.float32):
        assert isinstance(run(model).past_key_values, ReplayDynamicCache)


def test_cache_for_another_shape_of_model(handle: ReplayHandle) -> None:
    with pytest.raises(ReplayError, match=r"layer 0 of the model's cache is .*; allowed: a LinearAttentionLayer"):
        ReplayDynamicCache(LlamaConfig(num_hidden_layers=1), handle.plan)


def test_plain_cache_is_not_touched_by_errors(model: Any, handle: ReplayHandle) -> None:
    cache = DynamicCache(config=model.config)
    run(model, **cache_argument(model, cache))
    with pytest.raises(ValueError, match="cache_implementation"):
        run(model, cache_implementation="static", **cache_argument(model, cache))
