"""Calls of `forward` that fail on a cache in the middle of a window: what it says, and what still works afterwards."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from generation_runs import BATCH, cache_argument, run, step
from tiny_models import tiny_model

from replayssm.checks import ReplayError
from replayssm.integrations import hf_route
from replayssm.integrations.transformers import enable


@pytest.fixture(params=("nemotron_h", "qwen3_5", "kimi_linear"))
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    model = tiny_model(request.param)
    with enable(model, buffer_len=4):
        yield model


@pytest.fixture
def cache(model: Any) -> Any:
    """A cache in the middle of a window."""
    cache = enable(model, buffer_len=4).new_cache()
    run(model, max_new_tokens=7, **cache_argument(model, cache))
    return cache


def assert_unchanged(model: Any, cache: Any, before: Any) -> None:
    assert torch.equal(cache.core.cursors, before.core.cursors)
    assert torch.equal(step(model, cache), step(model, before))


@pytest.mark.parametrize(("batch", "tokens"), [(2, 1), (BATCH + 1, 1), (2, 3)])
def test_another_batch_size(model: Any, cache: Any, batch: int, tokens: int) -> None:
    before = copy.deepcopy(cache)
    with pytest.raises(ReplayError, match=f"batch size is {batch}; allowed: {BATCH}, the batch size of the cache"):
        step(model, cache, batch=batch, tokens=tokens)
    assert_unchanged(model, cache, before)


def test_decoding_with_gradients(model: Any, cache: Any) -> None:
    before = copy.deepcopy(cache)
    with pytest.raises(ReplayError, match=r"torch.is_grad_enabled\(\) is True while decoding; allowed: torch.no_grad"):
        model(torch.full((BATCH, 1), 7), use_cache=True, **cache_argument(model, cache))
    assert_unchanged(model, cache, before)


class Broken(Exception):
    """Raised inside a forward call."""


@pytest.mark.parametrize("tokens", [1, 3])
def test_forward_that_raises_half_way(model: Any, cache: Any, tokens: int) -> None:
    """Convolution states have moved on by then, as in plain transformers: going on would give wrong tokens."""
    before = cache.core.cursors[:, :2].clone()
    last = model.get_decoder().layers[-1]

    def fail(*_: Any) -> None:
        raise Broken

    hook = last.register_forward_hook(fail)
    with pytest.raises(Broken):
        step(model, cache, tokens=tokens)
    hook.remove()
    if tokens == 1:
        assert torch.equal(cache.core.cursors[:, :2], before)
    for _ in range(2):
        with pytest.raises(ReplayError, match=r"left half written by a call that raised; allowed: reset\(\)"):
            step(model, cache)
    cache.reset()
    assert torch.equal(run(model).sequences, run(model).sequences)


def test_forward_that_raises_before_the_layers(model: Any, cache: Any) -> None:
    before = copy.deepcopy(cache)
    with torch.no_grad(), pytest.raises(IndexError):
        model(torch.full((BATCH, 1), 10**6), use_cache=True, **cache_argument(model, cache))
    assert_unchanged(model, cache, before)


def test_layers_that_bypass_the_cache(model: Any, cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _ = hf_route.DECODE_CALLS[cache.plan.layers[0].family]
    module = sys.modules[type(model.get_decoder()).__module__]
    routed = getattr(module, name)
    calls = []

    def bypass(*args: Any, **kwargs: Any) -> Any:
        calls.append(0)
        if len(calls) > 1:
            return routed(*args, **kwargs)
        state = kwargs.get("initial_state", args[0])
        plain, _ = hf_route._patched[module, name]
        detached = state.clone()
        return (
            plain(detached, *args[1:], **kwargs)
            if state is args[0]
            else plain(*args, **{**kwargs, "initial_state": detached})
        )

    monkeypatch.setattr(module, name, bypass)
    with pytest.raises(ReplayError, match=r"layers \[0\] did not pass their state through the cache"):
        step(model, cache)


def test_layer_that_decodes_twice_in_a_step(model: Any, cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _ = hf_route.DECODE_CALLS[cache.plan.layers[0].family]
    module = sys.modules[type(model.get_decoder()).__module__]
    routed = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *a, **k: (routed(*a, **k), routed(*a, **k))[1])
    with pytest.raises(ReplayError, match="layer 0 decodes outside a step, or twice in one"):
        step(model, cache)
