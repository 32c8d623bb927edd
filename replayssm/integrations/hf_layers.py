"""The layers of a transformers cache whose recurrent state lives in a ReplayCache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


class ReplayLayerMixin:
    """A linear-attention cache layer that keeps its convolution state and hands its recurrent state to the cache."""

    _layer_type = None
    is_compileable = False
    owner: Callable[[], Any]  # a weak reference: a cycle would keep a finished cache's memory until garbage collection
    layer_idx: int
    # Convolution inputs that a crop may go back to, by state: those of the state itself and all since `mark`.
    past: dict[int, torch.Tensor] | None = None
    _inputs: dict[int, torch.Tensor] | None = None

    @property
    def is_croppable(self) -> bool:
        """Whether the last tokens can be taken back."""
        return bool(self.owner().is_recording)

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
        """The cache records; what transformers' layers do instead would let convolution states grow."""

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Take several tokens' inputs of the convolution; returns those before them too."""
        if self.past is not None:
            self._inputs = {**(self._inputs or {}), state_idx: conv_states}
        return super().update_conv_state(conv_states, state_idx, **kwargs)  # type: ignore[misc]

    def mark(self) -> None:
        """What was taken so far stays: a later crop goes back to here at most."""
        states: dict[int, torch.Tensor | None] = self.conv_states  # type: ignore[attr-defined]
        self.past = {i: state.clone() for i, state in states.items() if state is not None}
        self._inputs = None

    def record(self, num_tokens: int, limit: int) -> None:
        """Remember the inputs of the step that ended, `limit` of them in all."""
        assert self.past is not None
        for i, before in self.past.items():
            state = self.conv_states[i]  # type: ignore[attr-defined]
            # One token passes through the state in place, without `update_conv_state`.
            new = (self._inputs or {}).get(i, state[..., -num_tokens:])
            self.past[i] = torch.cat([before, new], -1)[..., -(state.shape[-1] + limit) :]
        self._inputs = None

    def forget_past(self) -> None:
        """Stop remembering."""
        self.past = self._inputs = None

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens of what this layer holds itself; the cache has checked that they are recorded."""
        assert self.past is not None
        for i, inputs in self.past.items():
            end, width = inputs.shape[-1] + tokens_to_remove, self.conv_states[i].shape[-1]  # type: ignore[attr-defined]
            self.conv_states[i] = inputs[..., end - width : end].clone()  # type: ignore[attr-defined]
        for kind in (DynamicSlidingWindowLayer, DynamicLayer):
            if isinstance(self, kind):
                kind.crop(self, tokens_to_remove)
                break
        self.mark()


_replay_classes: dict[type, type] = {}


def replay_class(base: type) -> type:
    """The class of a layer of ours that otherwise is a `base`."""
    if base not in _replay_classes:
        _replay_classes[base] = type(f"Replay{base.__name__}", (ReplayLayerMixin, base), {})
    return _replay_classes[base]


def recast(layer: Any, to: Any) -> Any:
    """The same layer as another class; its recurrent state is left behind."""
    other = to.__new__(to)
    left = ("recurrent_states", "past", "_inputs", "owner")
    other.__dict__.update({name: value for name, value in layer.__dict__.items() if name not in left})
    return other
