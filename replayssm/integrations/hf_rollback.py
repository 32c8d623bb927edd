"""Taking back the last tokens of a transformers cache: cursors move, attention and convolution states are cut."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from replayssm.cache import ReplayCache
from replayssm.checks import fail
from replayssm.integrations.hf_call import Split
from replayssm.integrations.hf_layers import ReplayLayerMixin
from replayssm.plan import Plan


class RollbackCache(DynamicCache):
    """The part of a ReplayDynamicCache that follows its own length and crops.

    While it records, forward calls of up to `plan.max_window_len` tokens are steps of the ring, and so are the last
    `tail_len` tokens of a longer one; whatever lies in the ring since the last flush can be cropped.
    """

    plan: Plan
    core: ReplayCache | None
    _slots: torch.Tensor

    def __init__(self, config: Any, plan: Plan) -> None:
        super().__init__(config=config)
        self.plan = plan
        self.core = None
        self.is_recording = False
        self.split: Split | None = None
        self._broken = False
        self.is_drafting = False  # an assistant's: transformers passes again what the cache does not hold
        self.tail_len = plan.max_window_len
        self.length = 0  # tokens taken so far
        self._rows = 0  # committed rows of every slot; while first windows are staggered, only whether there are any
        self._revocable = 0

    @property
    def is_replaying(self) -> bool:
        """False once the cache became an ordinary one."""
        return isinstance(self._replay_layers()[0], ReplayLayerMixin)

    def _has_state(self) -> bool:
        return all(layer.is_recurrent_states_initialized[0] for layer in self._replay_layers())

    def _replay_layers(self) -> list[Any]:
        return [self.layers[spec.layer_idx] for spec in self.plan.layers]

    def is_step(self, seq_len: int) -> bool:
        """Whether a forward call of so many tokens is a step of the ring; otherwise it is a prefill."""
        return seq_len <= (self.plan.max_window_len if self.is_recording else 1) and self._has_state()

    def begin_call(self, seq_len: int) -> int:
        """How many tokens of a forward call to run in a call of their own first, so that the others are steps."""
        if self.split is not None:
            if self.split.output is not None:
                # The earlier call raised between its parts.
                self.split, self._broken = None, True
            return 0
        if self._broken or not self.is_recording or seq_len == 1 or self.is_step(seq_len):
            return 0
        return max(0 if self._has_state() else 1, seq_len - self.tail_len)

    def end_call(self, output: Any) -> Any:
        """The output of the whole call, or None if it ran in one part."""
        if self.split is None or self.split.output is None:
            return None
        split, self.split = self.split, None
        return split.join(output)

    def activate_past_recording(self) -> None:
        """From now on remember what `crop` needs."""
        super().activate_past_recording()
        if not self.is_replaying:
            return
        self.is_recording = True
        self._flush()
        self._mark()

    def stop_recording(self) -> None:
        """Keep every token that was taken; nothing can be taken back any more."""
        if not self.is_recording:
            return
        self.crop(0)
        self.is_recording = False
        for layer in self.layers:
            if isinstance(layer, ReplayLayerMixin):
                layer.forget_past()
            elif hasattr(layer, "record_past"):
                layer.record_past = False

    def reserve(self, tokens: int) -> None:
        """Make room for steps of so many tokens in all, so that none of them is replayed before the next crop."""
        if self._rows and self._rows + tokens > self.plan.buffer_len:
            self._flush()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens of every row; at most those since the last flush or crop."""
        if not self.is_replaying:
            return super().crop(tokens_to_remove)
        if not self.is_recording:
            raise fail("tokens_to_remove", tokens_to_remove, "a crop after activate_past_recording() only")
        if self.is_drafting and -tokens_to_remove > self._revocable:
            tokens_to_remove = -self.length
        if not -self._revocable <= tokens_to_remove <= 0 and tokens_to_remove != -self.length:
            raise fail("tokens_to_remove", tokens_to_remove, f"{-self._revocable} to 0: tokens since the last flush")
        if tokens_to_remove and tokens_to_remove != -self.length and self.core is not None:
            self.core.take_back(self._slots, torch.full_like(self._slots, -tokens_to_remove))
        for layer in self.layers:
            # Some versions keep a linear-attention layer in the place of layers that cache nothing.
            if isinstance(layer, ReplayLayerMixin) or not isinstance(layer, LinearAttentionCacheLayerMixin):
                layer.crop(tokens_to_remove)
        if tokens_to_remove == -self.length:
            return self._empty()
        self._rows += tokens_to_remove
        self.length += tokens_to_remove
        self._mark()

    def _empty(self) -> None:
        self.split = None
        self._rows = self.length = 0
        for layer in self._replay_layers():
            layer.reset()
        if self.core is not None:
            self.core.reset(self._slots)
        self._mark()

    def _mark(self) -> None:
        """Crops go back to here at most."""
        self._revocable = 0
        if self.is_recording:
            for layer in self._replay_layers():
                layer.mark()

    def _flush(self) -> None:
        """Make the checkpoints plain states; while recording also end the staggered first windows."""
        if self.core is not None and (self._rows or self.is_recording):
            self.core.flush()
        self._rows = self._revocable = 0

    def _count(self, tokens: int) -> None:
        """Follow the cursors after a step of `tokens` a row, and record it."""
        flushed = self._rows > 0 and self._rows + tokens > self.plan.buffer_len
        self._rows = tokens + (0 if flushed else self._rows)
        if self.is_recording:
            self._revocable = tokens + (0 if flushed else self._revocable)
            for layer in self._replay_layers():
                layer.record(tokens, self.plan.ring_len)
