"""Every architecture: logits and recurrent states of `generate` through ReplaySSM against plain transformers."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from generation_runs import BATCH, forced_logits
from in_float64 import InFloat64
from tiny_models import available_architectures, tiny_model

from replayssm.cursors import NUM_FLUSHES
from replayssm.integrations import hf_route
from replayssm.integrations.hf_cache import ROUTE
from replayssm.integrations.transformers import enable

STEPS = 208

# Errors are against float64, in units of stepwise fp32's own. Reading sums the checkpoint's product and up to 16 ring
# rows, each rounded on its own; flush replays the same recurrence, where only the order of a reduction may differ.
LOGIT_FACTOR = 3.0
STATE_FACTOR = 2.0


@dataclass
class Shadow:
    """What stepwise decoding holds after the same inputs: in fp32 by transformers' own function, and in float64."""

    fp32: torch.Tensor
    fp64: torch.Tensor


def shadowed(plain: Callable[..., Any], routed: Callable[..., Any], shadows: dict[int, Shadow]) -> Callable[..., Any]:
    """Give every decode call to transformers' function too, on a state of its own."""

    def mamba2(state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shadow = shadows[getattr(state, ROUTE)._layer_idx]
        plain(shadow.fp32, *args, **kwargs)
        return routed(state, *args, **kwargs)

    def delta(*args: Any, initial_state: torch.Tensor, **kwargs: Any) -> Any:
        shadow = shadows[getattr(initial_state, ROUTE)._layer_idx]
        shadow.fp32 = plain(*args, initial_state=shadow.fp32, **kwargs)[1]
        with InFloat64():
            shadow.fp64 = plain(*args, initial_state=shadow.fp64, **kwargs)[1]
        return routed(*args, initial_state=initial_state, **kwargs)

    return mamba2 if "mamba2" in plain.__name__ else delta


class ShadowedRun:
    """Replaces the decode globals so that the first decode call of a layer starts its shadow."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
        self.shadows: dict[int, Shadow] = {}
        module = sys.modules[type(model.get_decoder()).__module__]
        name, state_name = hf_route.DECODE_CALLS[family]
        original, _ = hf_route._patched[module, name]
        follow = shadowed(original, getattr(module, name), self.shadows)

        def call(*args: Any, **kwargs: Any) -> Any:
            state = kwargs.get(state_name, args[0])
            layer_idx = getattr(state, ROUTE)._layer_idx
            # The ring is empty at the first decode call, so the checkpoint is the state.
            self.shadows.setdefault(layer_idx, Shadow(state.detach().clone(), state.detach().double()))
            return follow(*args, **kwargs)

        monkeypatch.setattr(module, name, call)


@pytest.mark.parametrize("name", available_architectures())
def test_logits_and_states_follow_stepwise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(name)
    tokens = torch.randint(3, 61, (BATCH, STEPS), generator=torch.Generator().manual_seed(1))
    plain, _ = forced_logits(model, tokens)
    with InFloat64():
        exact, _ = forced_logits(copy.deepcopy(model).double(), tokens)
    handle = enable(model)
    family = handle.plan.layers[0].family
    with monkeypatch.context() as patch:
        watch = ShadowedRun(model, patch, family)
        replay, cache = forced_logits(model, tokens)

    stepwise_error = float((plain - exact).abs().max())
    assert 0 < stepwise_error < 1e-3
    assert float((replay - exact).abs().max()) <= LOGIT_FACTOR * stepwise_error
    assert int(cache.core.cursors[:, NUM_FLUSHES].min()) >= 12
    for layer_idx, shadow in watch.shadows.items():
        state = cache.layers[layer_idx].recurrent_states[0]
        if family == "mamba2":
            assert torch.equal(state, shadow.fp32)
        else:
            error = float((shadow.fp32 - shadow.fp64).abs().max())
            assert 0 < error < 1e-4
            assert float((state - shadow.fp64).abs().max()) <= STATE_FACTOR * error
    assert set(watch.shadows) == {spec.layer_idx for spec in handle.plan.layers}
    handle.disable()
