"""layer_specs against the shapes that transformers really uses, and its defaults."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import available_architectures, tiny_config, tiny_model

from replayssm.hf_config import layer_specs

ARCHITECTURES = available_architectures()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_specs_match_the_states_of_the_model(name: str) -> None:
    model = tiny_model(name)
    specs = layer_specs(model.config)
    generated = model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, return_dict_in_generate=True)
    cache = generated.past_key_values
    states = [getattr(layer, "recurrent_states", {0: None})[0] for layer in cache.layers]
    with_state = [i for i, state in enumerate(states) if state is not None]
    assert [spec.layer_idx for spec in specs] == with_state
    for spec in specs:
        layer = cache.layers[spec.layer_idx]
        heads, V, K = spec.state_shape
        shape = (heads, V, K) if spec.family == "mamba2" else (heads, K, V)
        assert tuple(layer.recurrent_states[0].shape[1:]) == shape
        assert layer.conv_states[0].shape[-1] == spec.conv_kernel


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_object_dict_file_and_folder_agree(name: str, tmp_path: Path) -> None:
    config = tiny_config(name)
    expected = layer_specs(config)
    config.save_pretrained(tmp_path)
    assert layer_specs(tmp_path) == expected
    assert layer_specs(str(tmp_path / "config.json")) == expected
    assert layer_specs(config.to_dict()) == expected


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_missing_fields_take_the_defaults_of_the_model(name: str) -> None:
    from transformers import AutoConfig

    assert layer_specs({"model_type": name}) == layer_specs(AutoConfig.for_model(name))
