"""What every replaced layer has in common: its rings in vLLM's page, and the views of them that the ops take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from replayssm.checks import check_choice
from replayssm.config import LayerSpec
from replayssm.integrations.vllm.group import NULL_BLOCK, Group, Rows
from replayssm.integrations.vllm.options import STATE_DTYPES, chosen_options
from replayssm.integrations.vllm.pages import connect
from replayssm.integrations.vllm.support import check_supported
from replayssm.layer import LayerCache, layer_shapes, view_layer
from replayssm.plan import Plan

State = tuple[tuple[int, ...], ...]
RENEWED_AT_ONCE = 16  # states that are quantised together after a prefill: each takes several fp32 copies


class ReplayLayer:
    """Mixin for a vLLM layer with a recurrent state; without the option everything is vLLM's own.

    vLLM's page of a layer holds (conv, state); with the option it goes on with the rings, in the order of
    `layer_shapes`, so that vLLM accounts for them, allocates and frees them with the block.
    """

    plan: Plan | None = None
    max_batch: int = 1
    group: Group | None = None
    _pages: Any = ()
    _views: LayerCache | None = None

    def start_replay(self, vllm_config: Any, spec: LayerSpec) -> None:
        """Decide once, at the end of the layer's construction, whether it goes through the ring."""
        options = chosen_options(vllm_config.additional_config)
        if options is None:
            return
        check_supported(vllm_config)
        stored = self.get_state_dtype()[1]
        check_choice("dtype of the state", stored, STATE_DTYPES)
        self.plan = Plan(
            (spec,),
            buffer_len=options.buffer_len,
            num_draft_tokens=vllm_config.num_speculative_tokens,
            checkpoint=options.checkpoint or STATE_DTYPES[stored],
            read=options.read,
            activation=vllm_config.model_config.dtype,
            device=vllm_config.device_config.device,
            spread_flushes=options.spread_flushes,
            replay=options.replay,
        )
        self.plan.check_runnable()
        self.max_batch = vllm_config.scheduler_config.max_num_seqs
        connect(vllm_config)

    @property
    def spec(self) -> LayerSpec:
        """Family and dimensions on this rank."""
        assert self.plan is not None
        return self.plan.layers[0]

    def get_state_shape(self) -> State:
        """Shapes of one block: vLLM's pair, then the rings."""
        conv, state = super().get_state_shape()  # type: ignore[misc]
        return conv, state, *(shape for shape, _ in self._rings().values())

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Dtypes of one block: vLLM's pair, the state in the checkpoint's, then the rings."""
        conv, state = super().get_state_dtype()  # type: ignore[misc]
        if self.plan is not None:
            state = self.plan.checkpoint_dtype
        return conv, state, *(dtype for _, dtype in self._rings().values())

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """vLLM's without blocks for states of drafts, for which the ring stands in, and for those inside a prefill."""
        spec = super().get_kv_cache_spec(vllm_config)  # type: ignore[misc]
        if self.plan is None or spec is None:
            return spec
        none = {"num_prefill_checkpoint_blocks": 0, "prefill_checkpoint_alignment": None}
        return replace(spec, num_speculative_blocks=0, **none)

    def _rings(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        if self.plan is None:
            return {}
        shapes = layer_shapes(self.spec, self.plan)
        shapes.pop("state")
        return shapes

    @property
    def kv_cache(self) -> Any:
        """The tensors of vLLM's pages, as vLLM binds and clears them."""
        return self._pages

    @kv_cache.setter
    def kv_cache(self, pages: Any) -> None:
        self._pages, self._views = pages, None

    def join(self, group: Group) -> None:
        """Take part in a KV-cache group, once its pages are bound."""
        self.group, self._views = group, None

    def cache(self) -> LayerCache:
        """State and rings of all blocks, checked when they were bound."""
        assert self.plan is not None and self.group is not None
        if self._views is None:
            tensors = dict(zip(("state", *self._rings()), self._pages[1:], strict=True))
            self._views = view_layer(self.spec, self.plan, tensors, self.group.cursors)
            self._views.A = getattr(self, "A", None)
        return self._views

    def before_prefill(self, rows: Rows) -> None:
        """A prefill reads the plain state of a request that it continues; the ring may hold its last tokens."""
        if rows.continued is not None:
            cache = self.cache()
            cache.replay(rows.continued, None, cache.state, rows.continued, NULL_BLOCK)

    def after_prefill(self, rows: Rows) -> None:
        """A prefill writes the plain state; what outputs are read from follows it."""
        cache = self.cache()
        if rows.prefills is not None and cache.read_copy is not None:
            for some in rows.prefills.long().split(RENEWED_AT_ONCE):
                cache.stored.renew(some)
