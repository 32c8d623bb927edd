"""The layers of a transformers cache whose recurrent state lives in a ReplayCache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from replayssm.checks import ReplayError, fail


class ReplayLayerMixin:
    """A linear-attention cache layer that keeps its convolution state and hands its recurrent state to the cache."""

    _layer_type = None
    is_compileable = False
    is_croppable = False
    owner: Callable[[], Any]  # a weak reference: a cycle would keep a finished cache's memory until garbage collection
    layer_idx: int

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor | None]:
        """What transformers reads: the state, seen as it lays it out."""
        return {0: self.owner().recurrent_state(self.layer_idx)}

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Take the final state of a prefill; a decode step's state is in the cache already."""
        self.owner().store(self.layer_idx, recurrent_states)
        return recurrent_states

    @contextmanager
    def _without_recurrent_state(self) -> Iterator[None]:
        initialized: dict[int, bool] = self.is_recurrent_states_initialized  # type: ignore[has-type]
        self.is_recurrent_states_initialized = dict.fromkeys(initialized, False)
        try:
            yield
        finally:
            self.is_recurrent_states_initialized = initialized

    def reset(self) -> None:
        """Forget everything, the batch size included; the cache empties the rings."""
        self.is_recurrent_states_initialized = {0: False}
        self.is_conv_states_initialized = {0: False}
        super().reset()  # type: ignore[misc]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder what this layer holds itself."""
        with self._without_recurrent_state():
            super().reorder_cache(beam_idx)  # type: ignore[misc]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the given rows of what this layer holds itself."""
        states: dict[int, torch.Tensor | None] = self.conv_states  # type: ignore[attr-defined]
        for i, state in states.items():
            states[i] = None if state is None else state[indices]
        if (keys_and_values := getattr(super(), "batch_select_indices", None)) is not None:
            keys_and_values(indices)

    def activate_past_recording(self) -> None:
        """transformers asks for this before it rolls a cache back."""
        raise ReplayError("generation mode rolls the cache back; allowed with ReplaySSM: greedy, sampling, beam search")

    def crop(self, tokens_to_remove: int) -> None:
        """Only the last window could be taken back."""
        raise fail("tokens_to_remove", tokens_to_remove, "no crop: the recurrent state cannot be taken back")


_replay_classes: dict[type, type] = {}


def replay_class(base: type) -> type:
    """The class of a layer of ours that otherwise is a `base`."""
    if base not in _replay_classes:
        _replay_classes[base] = type(f"Replay{base.__name__}", (ReplayLayerMixin, base), {})
    return _replay_classes[base]


def recast(layer: Any, to: Any) -> Any:
    """The same layer as another class; its recurrent state is left behind."""
    other = to.__new__(to)
    other.__dict__.update({name: value for name, value in layer.__dict__.items() if name != "recurrent_states"})
    return other
