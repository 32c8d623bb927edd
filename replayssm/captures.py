"""Captured states: a safetensors file of them, or those of a transformers model that goes through a text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from replayssm.checks import ReplayError, check_int, fail
from replayssm.config import Mamba2Spec
from replayssm.layer import LayerCache
from replayssm.ops.delta.gates import l2norm
from replayssm.read_errors import ReadErrors

if TYPE_CHECKING:
    from replayssm.cache import ReplayCache

_NAME = re.compile(r"(\d+)\.(state|queries)")
WINDOW = 16  # tokens between states


def add_file(path: str | Path, errors: ReadErrors) -> None:
    """Count the states of a safetensors file.

    Its tensors are "IDX.state" [n, heads, V, K], such as `ReplayCache.materialize` gives, and optionally "IDX.queries"
    [n, groups, m, K]: q or C of the tokens that read them, q after its norm.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise fail("states", str(path), f"a safetensors file ({error})") from error
    wrong = sorted(n for n in tensors if not _NAME.fullmatch(n) or n.partition(".")[0] + ".state" not in tensors)
    if wrong or not tensors:
        raise fail("states", wrong[0] if wrong else "an empty file", "tensors IDX.state, and IDX.queries beside them")
    states = {int(name.partition(".")[0]): t for name, t in tensors.items() if name.endswith(".state")}
    for idx in sorted(states):
        errors.add(idx, states[idx], tensors.get(f"{idx}.queries"))


@torch.no_grad()
def add_model(
    model: Any,
    tokens: torch.Tensor,
    errors: ReadErrors,
    *,
    prompt_len: int = WINDOW,
    on_token: Callable[[int], object] = lambda done: None,
) -> None:
    """Let `model` go through `tokens` [T], and count every layer's state and its own queries once in 16 tokens.

    The first `prompt_len` tokens are its prompt, the others are decoded one by one.
    """
    from replayssm.integrations.transformers import enable

    total = len(tokens)
    check_int("prompt_len", prompt_len, 1)
    if total < prompt_len + WINDOW:
        raise fail("tokens", f"{total} tokens", f"at least {WINDOW} after the prompt of {prompt_len}")
    with enable(model, buffer_len=WINDOW) as handle:
        forward = _Forward(model, handle.new_cache())
        forward(tokens[:prompt_len])
        recorded = {spec.layer_idx: _Recorder(forward.core.layer(spec.layer_idx)) for spec in handle.plan.layers}
        for t in range(prompt_len, total):
            forward(tokens[t : t + 1])
            on_token(t + 1)
            if (t + 1 - prompt_len) % WINDOW == 0:
                for idx, recorder in recorded.items():
                    errors.add(idx, forward.core.materialize(idx, [0]), recorder.take())


class _Forward:
    """Calls a model on the tokens that follow, with positions where it takes them."""

    def __init__(self, model: Any, cache: Any) -> None:
        from replayssm.integrations.hf_call import CallSignature

        self._model, self._cache, self._seen = model, cache, 0
        self._name, names = CallSignature(model).cache_name, CallSignature(model).names
        self._positions = "position_ids" in names

    def __call__(self, tokens: torch.Tensor) -> None:
        ids = tokens[None].to(self._model.device)
        at = torch.arange(self._seen, self._seen + ids.shape[1], device=ids.device)[None]
        named = {self._name: self._cache, **({"position_ids": at} if self._positions else {})}
        self._model(input_ids=ids, use_cache=True, **named)
        self._seen += ids.shape[1]

    @property
    def core(self) -> ReplayCache:
        """The cache of the SSM layers."""
        core: ReplayCache | None = self._cache.core
        if core is None:
            raise ReplayError("model did not use the cache; allowed: models whose SSM layers decode through it")
        return core


class _Recorder:
    """Keeps the queries of a layer's steps; its ops run as before."""

    def __init__(self, layer: LayerCache) -> None:
        self._layer, self._step = layer, layer.ops.step
        self._queries: list[torch.Tensor] = []
        layer.ops = replace(layer.ops, step=self._record)

    def _record(self, *inputs: torch.Tensor, **options: Any) -> None:
        # The order of the ops' arguments: C is Mamba-2's fifth, q the delta rule's first.
        q = inputs[4] if isinstance(self._layer.spec, Mamba2Spec) else inputs[0]
        if not isinstance(self._layer.spec, Mamba2Spec) and self._layer.spec.use_qk_l2norm:
            q = l2norm(q.float())
        self._queries.append(q.float())
        self._step(*inputs, **options)

    def take(self) -> torch.Tensor:
        """The queries [1, groups, m, K] since the last call."""
        taken, self._queries = torch.cat(self._queries).movedim(0, 1)[None], []
        return taken
