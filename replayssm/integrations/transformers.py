"""enable / disable: let a transformers model generate through ReplaySSM."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType, TracebackType
from typing import Any, SupportsIndex
from weakref import WeakSet, finalize, ref

import torch
from torch import nn
from transformers import DynamicCache

from replayssm.checks import ReplayError, fail
from replayssm.hf_config import layer_specs
from replayssm.integrations import hf_route
from replayssm.integrations.hf_assisted import ASSISTED, check_generation, limit_drafts, prepare_drafts
from replayssm.integrations.hf_cache import ReplayDynamicCache
from replayssm.integrations.hf_call import CACHE_NAMES, CallSignature, Split
from replayssm.integrations.hf_model import decoder_of, device_of
from replayssm.plan import Plan

_HANDLE = "_replayssm_handle"


class ReplayHandle:
    """An enabled model. Leaving it as a context manager, or `disable`, gives the model back as it was."""

    def __init__(self, decoder: nn.Module, config: Any, plan: Plan, patched: list[tuple[ModuleType, str]]) -> None:
        self.plan = plan
        self._config = config
        self._decoder = ref(decoder)
        # Also when the model is dropped without `disable`.
        self._release = finalize(decoder, hf_route.release, patched)
        self._generators: list[tuple[ref[nn.Module], tuple[str, ...]]] = []  # and what was set on them
        self._caches: WeakSet[ReplayDynamicCache] = WeakSet()
        self._signature = CallSignature(decoder)
        self._hooks = [
            decoder.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            decoder.register_forward_hook(self._after_forward, with_kwargs=True),
        ]
        setattr(decoder, _HANDLE, self)

    def new_cache(self) -> ReplayDynamicCache:
        """A cache to pass to `forward` or `generate` and to continue from later."""
        cache = ReplayDynamicCache(self._config, self.plan)
        cache.join(self._caches)
        return cache

    def disable(self) -> None:
        """Restore the model; live caches become ordinary ones and keep their content."""
        decoder = self._decoder()
        if decoder is None or getattr(decoder, _HANDLE, None) is not self:
            return
        delattr(decoder, _HANDLE)
        for hook in self._hooks:
            hook.remove()
        self._release()
        for reference, names in self._generators:
            if (model := reference()) is not None:
                for name in names:
                    model.__dict__.pop(name, None)
        for cache in list(self._caches):
            cache.to_plain()
        self._caches.clear()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise ReplayError("model is enabled; allowed: disable(model) before it is copied or pickled")

    def __enter__(self) -> ReplayHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()

    def _before_forward(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cache = self._signature.cache(args, kwargs)
        changed = None
        if cache is None and self._wants_cache(decoder, self._signature.get("use_cache", args, kwargs)):
            cache = self.new_cache()
            changed = args, kwargs = self._signature.with_cache(cache, args, kwargs)
        if not isinstance(cache, ReplayDynamicCache) or not cache.is_replaying:
            return None
        if cache.plan is not self.plan and cache.plan != self.plan:
            raise ReplayError(
                "cache was made for another model or other options; allowed: new_cache() of this model's handle"
            )
        tokens = self._signature.tokens(args, kwargs)
        if tokens is None:
            return changed
        if tokens.device.type != torch.device(self.plan.device).type:
            raise fail(
                "model.device", str(tokens.device), f"{self.plan.device}; after a move disable and enable it anew"
            )
        cache.join(self._caches)
        head_len = cache.begin_call(tokens.shape[1])
        if (head_len or cache.is_step(tokens.shape[1])) and torch.is_grad_enabled():
            if any(parameter.requires_grad for parameter in decoder.parameters()):
                raise ReplayError(
                    "torch.is_grad_enabled() is True while decoding; allowed: torch.no_grad() or inference_mode()"
                )
        if head_len:
            changed = self._run_head(decoder, cache, head_len, args, kwargs)
        cache.begin_forward(tokens.shape[0], tokens.shape[1] - head_len)
        return changed

    def _run_head(
        self,
        decoder: nn.Module,
        cache: ReplayDynamicCache,
        head_len: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run the first part of a call; returns the arguments of the second."""
        head, rest = self._signature.split(head_len, args, kwargs, starts=cache.length == 0)
        cache.split = Split()
        try:
            cache.split.output = decoder(**head)
        except BaseException:
            cache.split = None
            raise
        return (), rest

    def _wants_cache(self, decoder: nn.Module, use_cache: bool | None) -> bool:
        if use_cache is None:
            return bool(getattr(self._config, "use_cache", True)) and not decoder.training
        return use_cache

    def _after_forward(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        cache = self._signature.cache(args, kwargs)
        if not isinstance(cache, ReplayDynamicCache) or not cache.is_replaying:
            return None
        cache.end_forward()
        return cache.end_call(output)

    def route_generate(self, model: nn.Module) -> None:
        """Let `model.generate` start with our cache."""
        if not hasattr(model, "_prepare_cache_for_generation") or "_prepare_cache_for_generation" in model.__dict__:
            return
        methods: Any = model
        class_method = methods._prepare_cache_for_generation.__func__
        class_candidates = methods._get_candidate_generator.__func__
        owner = ref(model)

        def prepare(
            generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *args: Any, **kwargs: Any
        ) -> Any:
            check_generation(generation_config, generation_mode.value, self._signature.cache_name)
            given = {name for name in CACHE_NAMES if model_kwargs.get(name) is not None}
            result = class_method(owner(), generation_config, model_kwargs, generation_mode, *args, **kwargs)
            for name in CACHE_NAMES:
                if name not in given and type(model_kwargs.get(name)) is DynamicCache:
                    model_kwargs[name] = self.new_cache()
            cache = next((model_kwargs[name] for name in CACHE_NAMES if model_kwargs.get(name) is not None), None)
            prepare_drafts(generation_config, generation_mode.value == ASSISTED, self.plan, cache)
            return result

        def candidates(*args: Any, **kwargs: Any) -> Any:
            return limit_drafts(class_candidates(owner(), *args, **kwargs), self.plan)

        on_model = {
            "_prepare_cache_for_generation": prepare,
            "_get_candidate_generator": candidates,
            "_is_stateful": False,  # what transformers asks before it verifies drafts
        }
        model.__dict__.update(on_model)
        self._generators.append((ref(model), tuple(on_model)))


def enable(
    model: nn.Module,
    *,
    buffer_len: int = 16,
    num_draft_tokens: int = 0,
    checkpoint: str = "fp32",
    read: str | Mapping[int, str] = "none",
    activation: torch.dtype | None = None,
    backend: str = "auto",
    spread_flushes: bool | None = None,
    route: str = "replay",
    replay: str = "auto",
    rounding: str = "nearest",
    seed: int = 0,
) -> ReplayHandle:
    """Let `model.generate(...)` and `model(...)` decode through ReplaySSM, until `disable`.

    model: the one that is called (of which only a part is enabled, a model generates with its own plain cache). A cache
    that the caller passes is used as it is: a ReplayDynamicCache replays, any other one decodes as before.
    num_draft_tokens: most drafts that assisted generation (`assistant_model=`, `prompt_lookup_num_tokens=`) verifies in
    one call; an assistant that was not told how many to draft drafts at most as many. A model that is an assistant
    itself drafts at most buffer_len - 1.
    activation: dtype of the layers' inputs (default: the model's). The other options are those of `Plan`. Calling it
    again with the same options does nothing.
    """
    decoder = decoder_of(model)
    config = decoder.config.get_text_config(decoder=True)
    plan = Plan(
        layers=layer_specs(config),
        buffer_len=buffer_len,
        num_draft_tokens=num_draft_tokens,
        checkpoint=checkpoint,
        read=read,
        activation=decoder.dtype if activation is None else activation,
        device=device_of(decoder),
        backend=backend,
        spread_flushes=spread_flushes,
        route=route,
        replay=replay,
        rounding=rounding,
        seed=seed,
    )
    plan.check_runnable()
    handle: ReplayHandle | None = getattr(decoder, _HANDLE, None)
    if handle is not None and handle.plan != plan:
        raise ReplayError(
            "model is enabled with other options already; allowed: the same options, or disable(model) first"
        )
    if handle is None:
        handle = ReplayHandle(decoder, config, plan, _patch(decoder, type(model).__name__, set(plan.family_counts)))
    handle.route_generate(model)
    return handle


def _patch(decoder: nn.Module, name: str, families: set[str]) -> list[tuple[ModuleType, str]]:
    """Route the calls of the modules that the SSM layers come from; raises unless all that are wanted are there."""
    # All SSM layers have a short convolution; other parts may come from other models' modules.
    modules = {sys.modules[type(module).__module__] for module in decoder.modules() if hasattr(module, "conv1d")}
    patched = hf_route.acquire(modules, families)
    wanted = {calls[family][0] for family in families for calls in (hf_route.DECODE_CALLS, hf_route.WINDOW_CALLS)}
    if {name for _, name in patched} != wanted:
        hf_route.release(patched)
        names = ", ".join(sorted(wanted))
        raise fail("model", name, f"a model whose module calls {names}, as in transformers 5.17 to 5.24")
    return patched


def disable(model: nn.Module) -> None:
    """Give an enabled model back as it was; does nothing for other models."""
    handle: ReplayHandle | None = getattr(decoder_of(model), _HANDLE, None)
    if handle is not None:
        handle.disable()
