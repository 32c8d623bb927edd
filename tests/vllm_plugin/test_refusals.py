"""What the plugin does not serve is refused when vLLM is configured, with the reason."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from models import save
from vllm.engine.arg_utils import EngineArgs

import replayssm.integrations.vllm as plugin
from replayssm.integrations.vllm.options import ENVIRONMENT, Options
from replayssm.integrations.vllm.support import check_supported

DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plugin.register()
    plugin.register()  # vLLM may load a plugin more than once
    return save("nemotron_h", tmp_path_factory.mktemp("model") / "nemotron_h")


def configure(model: Path, on: bool = True, **changes: Any) -> Any:
    arguments = {"enable_prefix_caching": False, "max_model_len": 256, "enforce_eager": True, **changes}
    additional = arguments.pop("additional_config", {"replayssm": True} if on else {})
    return EngineArgs(
        str(model), skip_tokenizer_init=True, additional_config=additional, **arguments
    ).create_engine_config()


def test_accepted(model: Path) -> None:
    assert configure(model).additional_config == {"replayssm": asdict(Options())}
    assert configure(model, enable_prefix_caching=True).cache_config.mamba_cache_mode == "align"


def test_a_compiled_model_is_not_taken_for_another(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps compiled models by this hash: without the plugin, and with it, however it was asked for."""
    stock, ours = configure(model, on=False), configure(model)
    monkeypatch.setenv(ENVIRONMENT, '{"buffer_len": 16}')
    asked = configure(model, on=False)
    assert asked.additional_config == ours.additional_config
    assert asked.compute_hash() == ours.compute_hash() != stock.compute_hash()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"enable_prefix_caching": True, "speculative_config": DRAFTS}, "prefix caching"),
        ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, "kv_transfer_config"),
        ({"speculative_config": DRAFTS}, "drafts are served"),
        ({"additional_config": {"replayssm": {"buffer_len": 0}}}, "buffer_len"),
        ({"additional_config": {"replayssm": {"checkpoint": "int4"}}}, "checkpoint"),
        ({"additional_config": {"replayssm": {"window": 3}}}, "window"),
        ({"additional_config": {"replayssm": True, "decode_backend": "latency_specialized"}}, "decode_backend"),
        ({"additional_config": {"replayssm": True, "kda_prefill_backend": "flashinfer"}}, "kda_prefill_backend"),
    ],
)
def test_refused(model: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        configure(model, **changes)


def test_drafts_need_model_runner_v2(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(model, on=False, speculative_config=DRAFTS)
    config.device_config.device_type = "cuda"
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    check_supported(config)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match="leave VLLM_USE_V2_MODEL_RUNNER unset"):
        check_supported(config)
    config.speculative_config = None
    check_supported(config)


def test_nothing_is_refused_without_the_option(model: Path) -> None:
    configure(model, on=False, enable_prefix_caching=True)


def test_refused_for_a_model_without_layers_of_ours(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(
        num_hidden_layers=1, hidden_size=64, num_attention_heads=2, vocab_size=128, architectures=["LlamaForCausalLM"]
    ).save_pretrained(tmp_path)
    plugin.register()
    with pytest.raises(ValueError, match="architecture with replayssm is 'LlamaForCausalLM'"):
        configure(tmp_path)
