"""ReplayDynamicCache: a transformers cache whose recurrent states live in a ReplayCache."""

from __future__ import annotations

import copy
from typing import Any, Literal, SupportsIndex
from weakref import WeakSet, ref

import torch
from transformers.cache_utils import LinearAttentionLayer

from replayssm.cache import ReplayCache
from replayssm.checks import ReplayError, fail
from replayssm.cursors import Step
from replayssm.integrations.hf_layers import ReplayLayerMixin, recast, replay_class
from replayssm.integrations.hf_rollback import RollbackCache
from replayssm.layer import LayerCache
from replayssm.plan import Plan

ROUTE = "_replayssm_route"


class DecodeRoute:
    """Tags the state that a decode call receives: which layer of which cache it stands for."""

    def __init__(self, cache: ReplayDynamicCache, layer_idx: int) -> None:
        self._cache, self._layer_idx = cache, layer_idx

    def open(self) -> tuple[LayerCache, Step]:
        """The layer and the step that the call belongs to; a layer decodes once a step."""
        return self._cache.open_layer(self._layer_idx)

    @property
    def activation(self) -> torch.dtype:
        """dtype of the ring's inputs."""
        return self._cache.plan.activation


class ReplayDynamicCache(RollbackCache):
    """A DynamicCache for generation through ReplaySSM, for a model on which `enable` was called.

    Row b of the batch is slot b. Attention layers and convolution states are kept as transformers keeps them.
    """

    def __init__(self, config: Any, plan: Plan) -> None:
        super().__init__(config, plan)
        self._slots = torch.empty(0, dtype=torch.int32)
        self._mode: Literal["prefill", "decode"] | None = None
        self._step: Step | None = None
        self._seq_len = 0
        self._done: set[int] = set()
        self._users: WeakSet[ReplayDynamicCache] | None = None
        for spec in plan.layers:
            layer = self.layers[spec.layer_idx] if spec.layer_idx < len(self.layers) else None
            if not isinstance(layer, LinearAttentionLayer):
                raise ReplayError(
                    f"layer {spec.layer_idx} of the model's cache is {layer!r}; allowed: a LinearAttentionLayer"
                )
            layer = self.layers[spec.layer_idx] = recast(layer, replay_class(type(layer)))
            layer.owner, layer.layer_idx = ref(self), spec.layer_idx

    def join(self, users: WeakSet[ReplayDynamicCache]) -> None:
        """Remember who must hear when the model is disabled."""
        self._users = users
        users.add(self)

    def begin_forward(self, batch: int, seq_len: int) -> None:
        """Called before the decoder runs: start a decode step, or make the checkpoints plain states for a prefill."""
        if self._mode is not None:
            # The earlier call raised; replayed checkpoints or grown convolution states cannot be taken back.
            self._broken = self._broken or bool(self._done)
            self._mode = self._step = None
        if self._broken:
            raise ReplayError("cache was left half written by a call that raised; allowed: reset() it, or a new cache")
        has_state = self._has_state()
        core = self.core
        if core is None or (core.num_slots != batch and not has_state):
            core = self._allocate(batch)
        elif core.num_slots != batch:
            raise fail("batch size", batch, f"{core.num_slots}, the batch size of the cache")
        self._done = set()
        self._seq_len = seq_len
        if self.is_step(seq_len):
            self._step = core.begin_step(self._slots, seq_len)
            self._mode = "decode"
        else:
            self._flush()
            self._mode = "prefill"

    def _allocate(self, batch: int) -> ReplayCache:
        self.core = ReplayCache(self.plan, batch)
        self._rows = 0
        self._slots = torch.arange(batch, dtype=torch.int32, device=self.core.device)
        return self.core

    def end_forward(self) -> None:
        """Called after the decoder ran without raising: commit the step."""
        if self._mode is None or self.core is None:
            return
        missing = sorted({spec.layer_idx for spec in self.plan.layers} - self._done)
        if missing:
            self._broken = True
            raise ReplayError(
                f"layers {missing} did not pass their state through the cache; allowed: the models' own layer code "
                "(kernels that replace a whole layer bypass it)"
            )
        self.length += self._seq_len
        if self._step is not None:
            self.core.commit(self._step)
            self._count(self._seq_len)
        else:
            self._mark()
        self._mode = self._step = None

    def open_layer(self, layer_idx: int) -> tuple[LayerCache, Step]:
        """The layer and the step of a decode call."""
        if self.core is None or self._step is None or layer_idx in self._done:
            raise ReplayError(
                f"layer {layer_idx} decodes outside a step, or twice in one; allowed: once in a forward call"
            )
        self._done.add(layer_idx)
        return self.core.layer(layer_idx), self._step

    def recurrent_state(self, layer_idx: int) -> torch.Tensor | None:
        """The state as transformers lays it out; outside a forward call a materialized copy of it."""
        if self.core is None or not self.layers[layer_idx].is_recurrent_states_initialized[0]:
            return None
        layer = self.core.layer(layer_idx)
        if self._mode is None:
            return _hf_layout(layer, self._materialize(layer))
        if self._mode == "prefill":
            return _hf_layout(layer, layer.plain_state())
        view = _hf_layout(layer, layer.state.view_as(layer.state))
        setattr(view, ROUTE, DecodeRoute(self, layer_idx))
        return view

    def _materialize(self, layer: LayerCache) -> torch.Tensor:
        """A copy of every slot's plain state."""
        if self.core is None or not self._rows:
            return layer.plain_state().clone()
        return self.core.materialize(layer.spec.layer_idx, self._slots)

    def store(self, layer_idx: int, state: torch.Tensor) -> None:
        """Take a layer's state after a prefill."""
        if self.core is None or self._mode is None:
            raise ReplayError(
                "cache is a ReplayDynamicCache, but the model is not enabled; allowed: replayssm.enable(model)"
            )
        if self._mode == "decode":
            return
        layer = self.core.layer(layer_idx)
        self.core.load_layer(layer_idx, self._slots, _hf_layout(layer, state.detach()))
        self.layers[layer_idx].is_recurrent_states_initialized[0] = True
        self._done.add(layer_idx)

    def reset(self) -> None:
        """Forget every request; memory is kept."""
        super().reset()
        self._mode = self._step = None
        self._broken = False
        self._empty()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row b continues what row beam_idx[b] was: checkpoints, rings and cursors move together."""
        super().reorder_cache(beam_idx)
        if self.core is not None:
            self.core.copy(beam_idx.to(self.core.device), self._slots)
        self._mark()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the given rows, in that order; a row may be kept more than once."""
        states = {}
        if (core := self.core) is not None:
            layers = [core.layer(spec.layer_idx) for spec in self.plan.layers]
            states = {layer.spec.layer_idx: self._materialize(layer)[indices] for layer in layers}
        for layer in self.layers:
            # Some versions keep a layer without that method in the place of layers that cache nothing.
            if hasattr(layer, "batch_select_indices"):
                layer.batch_select_indices(indices)
        if states:
            self._allocate(len(indices)).load(self._slots, states)
        self._mark()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, neighbours first."""
        if self.core is not None:
            self.batch_select_indices(torch.arange(self.core.num_slots).repeat_interleave(repeats))

    def to_plain(self) -> None:
        """Become an ordinary cache in place: the states are materialized, decoding continues stepwise."""
        states = {spec.layer_idx: self.recurrent_state(spec.layer_idx) for spec in self.plan.layers}
        for layer_idx, state in states.items():
            layer = self.layers[layer_idx]
            layer = self.layers[layer_idx] = recast(layer, type(layer).__mro__[2])
            layer.recurrent_states = {0: None if state is None else state.contiguous()}
        self.core, self.is_recording, self._users = None, False, None

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if self.is_replaying:
            raise ReplayError("cache is replaying; allowed: disable(model), or to_plain(), before it is pickled")
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplayDynamicCache:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for name, value in self.__dict__.items():
            copied.__dict__[name] = value if name in ("plan", "_users") else copy.deepcopy(value, memo)
        for layer in copied.layers:
            if isinstance(layer, ReplayLayerMixin):
                layer.owner = ref(copied)
        if copied._users is not None:
            copied._users.add(copied)
        return copied


def _hf_layout(layer: LayerCache, state: torch.Tensor) -> torch.Tensor:
    """[slots, heads, V, K] <-> transformers' layout: K and V swapped for the delta rule, the same for Mamba-2."""
    return state if layer.spec.family == "mamba2" else state.transpose(-1, -2)
