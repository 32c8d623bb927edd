"""layer_specs of raw config.json fields, without transformers, and of wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replayssm import hf_config
from replayssm.checks import ReplayError
from replayssm.config import GDNSpec, KDASpec, Mamba2Spec
from replayssm.hf_config import layer_specs

# What the models' own config.json files hold, in their own spelling.
RAW: dict[str, tuple[dict[str, Any], int, Any]] = {
    "nemotron_h": (
        {
            "hybrid_override_pattern": "M-M*-ME",
            "mamba_num_heads": 96,
            "mamba_head_dim": 80,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
        },
        3,
        Mamba2Spec(96, 80, 128, 8, layer_idx=5),
    ),
    "mamba2": (
        {"num_hidden_layers": 3, "num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1, "conv_kernel": 4},
        3,
        Mamba2Spec(24, 64, 128, 1, layer_idx=2),
    ),
    "bamba": (
        {
            "hidden_size": 4096,
            "num_hidden_layers": 4,
            "attn_layer_indices": [1],
            "mamba_expand": 2,
            "mamba_n_heads": 128,
            "mamba_d_head": "auto",
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
        },
        3,
        Mamba2Spec(128, 64, 128, 1, layer_idx=3),
    ),
    "granitemoehybrid": (
        {
            "hidden_size": 4096,
            "layer_types": ["mamba", "attention", "mamba"],
            "mamba_expand": 2,
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
        },
        2,
        Mamba2Spec(128, 64, 128, 1, layer_idx=2),
    ),
    "falcon_h1": (
        {
            "hidden_size": 5120,
            "num_hidden_layers": 2,
            "mamba_d_ssm": 4096,
            "mamba_n_heads": 32,
            "mamba_d_head": 128,
            "mamba_d_state": 256,
            "mamba_n_groups": 2,
            "mamba_d_conv": 4,
        },
        2,
        Mamba2Spec(32, 128, 256, 2, layer_idx=1),
    ),
    "zamba2": (
        {
            "hidden_size": 2560,
            "layers_block_type": ["mamba", "hybrid"],
            "mamba_expand": 2,
            "n_mamba_heads": 80,
            "mamba_d_state": 64,
            "mamba_ngroups": 1,
            "mamba_d_conv": 4,
        },
        2,
        Mamba2Spec(80, 64, 64, 1, layer_idx=1),
    ),
    "qwen3_next": (
        {
            "num_hidden_layers": 8,
            "full_attention_interval": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
        6,
        GDNSpec(16, 32, 128, 128, layer_idx=6),
    ),
    "kimi_linear": (
        {
            "linear_attn_config": {
                "kda_layers": [1, 2, 3, 5],
                "full_attn_layers": [4],
                "num_heads": 32,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
            }
        },
        4,
        KDASpec(32, 32, 128, 128, layer_idx=4),
    ),
    "glm5_next": (
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_attn_config": {
                "num_heads": 64,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
                "gate_lower_bound": None,
            },
        },
        1,
        KDASpec(64, 64, 128, 128, lower_bound=-5.0),
    ),
    "bailing_hybrid": (
        {
            "num_hidden_layers": 7,
            "layer_group_size": 6,
            "num_attention_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "kda_safe_gate": False,
            "kda_lower_bound": -5.0,
        },
        6,
        KDASpec(32, 32, 128, 128, layer_idx=6, lower_bound=None),
    ),
}


@pytest.mark.parametrize("name", RAW)
def test_raw_fields_without_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields, count, last = RAW[name]
    monkeypatch.setattr(hf_config, "find_spec", lambda _: None)
    specs = layer_specs({"model_type": name, **fields})
    assert len(specs) == count
    assert specs[-1] == last


def test_both_gate_forms() -> None:
    fields = RAW["bailing_hybrid"][0]
    assert layer_specs({"model_type": "bailing_hybrid", **fields, "kda_safe_gate": True})[0].lower_bound == -5.0
    flat = {"linear_num_heads": 4, "linear_head_dim": 16, "linear_conv_kernel_dim": 4, "linear_lower_bound": None}
    assert layer_specs({"model_type": "glm5_next", "layer_types": ["linear_attention"], **flat})[0].lower_bound is None


def test_nested_text_config() -> None:
    fields = RAW["qwen3_next"][0]
    outer = {"model_type": "qwen3_5", "vision_config": {}, "text_config": {"model_type": "qwen3_5_text", **fields}}
    assert layer_specs(outer) == layer_specs({"model_type": "qwen3_next", **fields})


def test_missing_field_without_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_config, "find_spec", lambda _: None)
    with pytest.raises(ReplayError, match=r"'mamba_num_heads'.*installed transformers"):
        layer_specs({"model_type": "nemotron_h", "hybrid_override_pattern": "M"})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'; allowed: nemotron_h, .*bailing_hybrid"),
        ({}, "model_type is 'None'; allowed: nemotron_h"),
        (17, "config is 'int'; allowed: a transformers configuration"),
        ("no/such/file.json", "no/such/file.json.*allowed: a config.json"),
        ({"model_type": "mamba2", **RAW["mamba2"][0], "num_heads": "24"}, "num_heads is '24'; allowed: an integer"),
        ({"model_type": "mamba2", **RAW["mamba2"][0], "n_groups": 7}, "n_groups is 7; allowed: a divisor"),
        ({"model_type": "bamba", **RAW["bamba"][0], "mamba_d_head": 60}, "mamba_d_head is 60; allowed: the inner size"),
        ({"model_type": "bamba", **RAW["bamba"][0], "mamba_n_heads": 0}, "model_type 'bamba' has a wrong value"),
        ({"model_type": "bamba", **RAW["bamba"][0], "mamba_expand": "x"}, "model_type 'bamba' has a wrong value"),
        ({"model_type": "qwen3_next", **RAW["qwen3_next"][0], "layer_types": 5}, "'qwen3_next' has a wrong value"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": 5}, "'nemotron_h' has a wrong value"),
        ({"model_type": "kimi_linear", "linear_attn_config": 5}, "'kimi_linear' has a wrong value"),
        (
            {"model_type": "qwen3_next", "full_attention_interval": 0, "num_hidden_layers": 4},
            "'qwen3_next' has a wrong value",
        ),
        (
            {"model_type": "qwen3_next", **RAW["qwen3_next"][0], "layer_types": ["full_attention"]},
            "no SSM layers; allowed: at least one",
        ),
    ],
)
def test_wrong_input_gets_one_clear_error(config: object, message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        layer_specs(config)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_wrong_file_gets_one_clear_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ReplayError, match=r"allowed: a (config\.json|JSON object)"):
        layer_specs(tmp_path)


def test_raw_file_is_read_without_importing_transformers(tmp_path: Path) -> None:
    import subprocess
    import sys

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba2", **RAW["mamba2"][0]}))
    code = (
        "import sys; from replayssm.hf_config import layer_specs; "
        f"assert len(layer_specs({str(tmp_path)!r})) == 3; assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
