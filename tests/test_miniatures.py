"""The trained miniatures: what they are, that they have learnt, and that they generate; and the training's scans."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from replayssm import enable
from replayssm.drift.models import MINIATURES, load, model_folder, text_tokens
from replayssm.hf_config import layer_specs
from replayssm.quant import dequantize, quantize

ROOT = Path(__file__).parents[1]
STATES = {"mamba2": (8, 64, 128), "gdn": (4, 128, 128), "kda": (3, 128, 128)}


@pytest.fixture(scope="module")
def training() -> Any:
    """The training code, which lies beside the package."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import miniature_models

    yield miniature_models
    sys.path.remove(str(ROOT / "benchmarks"))


def record_of(name: str) -> dict[str, Any]:
    return json.loads((model_folder(name) / "training.json").read_text())


def test_they_are_small() -> None:
    assert sum(file.stat().st_size for file in (ROOT / "miniatures").rglob("*")) < 20e6


@pytest.mark.parametrize("name", MINIATURES)
def test_their_layers(name: str) -> None:
    model = load(name)
    specs = layer_specs(model.config)
    assert {spec.state_shape for spec in specs} == {STATES[name]} and {spec.family for spec in specs} == {name}
    assert 2e6 < sum(p.numel() for p in model.parameters()) < 3e6
    assert model.dtype == torch.float32 and model.config.attention_window == 128


@pytest.mark.parametrize("name", MINIATURES)
def test_they_predict_text_that_they_have_not_seen(name: str) -> None:
    model, tokens = load(name), text_tokens(name, 8193)[-2049:]
    with torch.no_grad():
        logits = model(tokens[None, :-1], use_cache=False).logits[0]
    bits = float(torch.nn.functional.cross_entropy(logits, tokens[1:])) / math.log(2)
    # Modules differ, and interpreters differ a little in them.
    assert bits < record_of(name)["held_out_bits_per_byte"] + 0.3


@pytest.mark.parametrize("name", MINIATURES)
def test_the_record_shows_long_memory(name: str) -> None:
    found = record_of(name)["evidence"]
    bits = {int(context): value for context, value in found["bits_per_byte_by_context"].items()}
    assert bits[4096] < bits[512] < bits[128] and bits[16384] < bits[128]
    assert found["half_life_quantiles"]["75%"] > 500 and found["half_life_quantiles"]["max"] > 3000


@pytest.mark.parametrize("name", MINIATURES)
def test_they_generate_the_same_text_with_replay(name: str) -> None:
    model, prompt = load(name), text_tokens(name, 300)[None]
    options = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    plain = model.generate(prompt, **options)
    with enable(model):
        replayed = model.generate(prompt, **options)
    assert torch.equal(plain, replayed)
    text = bytes(plain[0, 300:].tolist())
    assert sum(byte in b"\n" or 32 <= byte < 127 for byte in text) == len(text)


@pytest.mark.parametrize("name", MINIATURES)
def test_the_training_scan_is_the_models_own_function(training: Any, name: str) -> None:
    model, tokens = training.build(name, 0), text_tokens(name, 256)[None]
    carry = training.Carry(model)
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        with carry.routed():
            carry.begin(None)
            whole = model(tokens, use_cache=False).logits
            ends = carry.states
            carry.begin(None)
            model(tokens[:, :128], use_cache=False)
            carry.begin(torch.ones(1))
            model(tokens[:, 128:], use_cache=False)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    # The first layer's state, but for the convolution's few tokens, goes on where the first half ended.
    assert float((carry.states[0] - ends[0]).norm() / ends[0].norm()) < 0.5


@pytest.mark.parametrize("name", MINIATURES)
def test_formats_on_captured_states(name: str) -> None:
    state = load_file(ROOT / "miniatures" / "captured.safetensors")[f"{name}.state"]
    assert state.shape == STATES[name]
    # The largest rounding error of each format's code, relative to the value, with its blocks' spread on top.
    for format, allowed in (("bf16", 2.0**-9), ("int8", 0.012), ("fp8", 0.03), ("nvfp4", 0.11)):
        rounded = dequantize(quantize(state, format))
        error = (rounded - state).square().sum((-2, -1)) / state.square().sum((-2, -1))
        assert float(error.sqrt().max()) < allowed, format
        if format != "int8":  # whose scales may be subnormal here, where writing again is not exact
            assert torch.equal(dequantize(quantize(rounded, format)), rounded)
