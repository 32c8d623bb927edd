"""Assisted generation watched from outside, and verified again by ordinary decoding with a snapshot of the cache."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from generation_runs import assert_logits_close, cache_argument
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from replayssm.integrations import hf_route
from replayssm.integrations.hf_cache import ReplayDynamicCache
from replayssm.workload import op_options


@torch.no_grad()
def forward_from(model: Any, cache: Any, ids: torch.Tensor, seen: int) -> torch.Tensor:
    """Logits of a call on a cache that holds `seen` tokens; some models do not look how many."""
    positions = {"position_ids": torch.arange(seen, seen + ids.shape[1])[None].expand(len(ids), -1)}
    if "position_ids" not in inspect.signature(model.forward).parameters:
        positions = {}
    return model(ids, use_cache=True, **positions, **cache_argument(model, cache)).logits


class Rounds(BaseStreamer):
    """A streamer that keeps what each round verified, and what it accepted."""

    def __init__(self, model: Any) -> None:
        self.inputs: list[torch.Tensor] = []
        self.accepted: list[list[int]] = []
        self._is_prompt = True
        self._hook = model.register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inputs.append(kwargs["input_ids"].clone())

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            self.accepted.append(value.flatten().tolist())
        self._is_prompt = False

    def end(self) -> None:
        self._hook.remove()

    def drafts(self, prompt_len: int) -> list[list[int]]:
        """The drafts of every round: what follows the prompt, then what follows the last accepted token."""
        first, *others = self.inputs
        return [first[0, prompt_len:].tolist(), *(window[0, 1:].tolist() for window in others)]


class SnapshotOracle:
    """Verifies drafts token by token; a copy of the whole cache takes the rejected ones back."""

    def __init__(self, model: Any, prompt: torch.Tensor) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        self._seen = 0
        self._logits = self._forward(prompt)
        self._current: int | None = None

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        self._seen += ids.shape[1]
        return forward_from(self.model, self.cache, ids, self._seen - ids.shape[1])[0, -1]

    def _step(self, token: int) -> torch.Tensor:
        return self._forward(torch.tensor([[token]]))

    def verify(self, drafts: list[int], budget: int) -> tuple[list[int], torch.Tensor]:
        """Accepted tokens of a greedy round, the bonus token included, and the logits of each."""
        if self._current is not None:
            self._logits = self._step(self._current)
        snapshot, seen = copy.deepcopy(self.cache), self._seen
        logits = [self._logits, *(self._step(draft) for draft in drafts)]
        chosen = [int(row.argmax()) for row in logits]
        matches = next((i for i, draft in enumerate(drafts) if draft != chosen[i]), len(drafts))
        accepted = chosen[: min(matches + 1, budget)]
        self.cache, self._seen = snapshot, seen
        for token in accepted[:-1]:
            self._step(token)
        self._current = accepted[-1]
        return accepted, torch.stack(logits[: len(accepted)])


class StepwiseShadow:
    """Records what every layer was given to decode, to decode the accepted part of it again token by token."""

    def __init__(self, monkeypatch: Any) -> None:
        self.calls: dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
        self.states: dict[int, torch.Tensor] = {}
        self.layers: dict[int, Any] = {}
        for name in ("mamba2_decode", "delta_decode"):
            monkeypatch.setattr(hf_route, name, self._recording(getattr(hf_route, name)))

    def _recording(self, decode: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def record(layer: Any, step: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            idx = layer.spec.layer_idx
            # The ring is empty at a layer's first step, so the checkpoint is the state.
            self.states.setdefault(idx, layer.state.clone())
            self.layers[idx] = layer
            self.calls.setdefault(idx, []).append((args, kwargs))
            return decode(layer, step, *args, **kwargs)

        return record

    def state(self, layer_idx: int, rejected: list[int]) -> torch.Tensor:
        """The state after all but the last `rejected` tokens of every call."""
        layer, state = self.layers[layer_idx], self.states[layer_idx].clone()
        slot, options = torch.zeros(1, dtype=torch.int32), op_options(layer.spec)
        for (args, kwargs), back in zip(self.calls[layer_idx], rejected, strict=True):
            if mamba2 := layer.spec.family == "mamba2":
                x, dt, A, B, C = args
                options = {"dt_softplus": kwargs["dt_softplus"]}
            for t in range(len(args[0]) - back):
                now = slice(t, t + 1)
                if mamba2:
                    z = None if kwargs["z"] is None else kwargs["z"][now]
                    inputs = (x[now], dt[now], A, B[now], C[now], kwargs["D"], z, kwargs["dt_bias"])
                else:
                    inputs = (*(a[now] for a in args), None, None)
                out = torch.empty(1, *layer.spec.state_shape[:2])
                layer.ops.stepwise(*inputs, state, slot, None, out, pad_slot_id=-1, max_window_len=1, **options)
        return state


def check_against_oracle(model: Any, result: Any, rounds: Rounds, prompt: torch.Tensor) -> list[int]:
    """Every round's accepted tokens, their logits, and the state at the end; returns the acceptance lengths."""
    oracle = SnapshotOracle(model, prompt)
    logits, left = [], result.sequences.shape[1] - prompt.shape[1]
    for drafts, accepted in zip(rounds.drafts(prompt.shape[1]), rounds.accepted, strict=True):
        expected, rows = oracle.verify(drafts, left)
        assert accepted == expected
        logits.append(rows)
        left -= len(expected)
    assert_logits_close(torch.cat(list(result.logits)), torch.cat(logits))
    cache = result.past_key_values
    assert isinstance(cache, ReplayDynamicCache)
    for spec in cache.plan.layers:
        layer, plain = cache.layers[spec.layer_idx], oracle.cache.layers[spec.layer_idx]
        assert_logits_close(layer.recurrent_states[0], plain.recurrent_states[0])
        assert_logits_close(layer.conv_states[0], plain.conv_states[0])
    for layer, plain in zip(cache.layers, oracle.cache.layers, strict=True):
        if getattr(layer, "keys", None) is not None:
            assert layer.get_seq_length() == result.sequences.shape[1] - 1
            assert_logits_close(layer.keys, plain.keys)
    return [len(accepted) for accepted in rounds.accepted]
