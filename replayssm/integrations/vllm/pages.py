"""Where the plugin meets vLLM's memory: the size of a page, and the layers that a KV-cache group binds."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from replayssm.config import LayerSpec
from replayssm.integrations.vllm.group import Group
from replayssm.integrations.vllm.one_token import verify_prompts_of_one_token
from replayssm.integrations.vllm.prefix import follow_copies

SIZES = {"get_mamba_state_shape_from_config": "get_state_shape", "get_mamba_state_dtype_from_config": "get_state_dtype"}


def connect(vllm_config: Any) -> None:
    """Called by every replayed layer when it is made; the first call of a process does the work."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.worker import utils

    model = vllm_config.model_config
    model_class, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    for name, of_layer in SIZES.items():
        _size_by_layers(model_class, name, of_layer)
    follow_copies()
    if vllm_config.num_speculative_tokens:
        verify_prompts_of_one_token()
    if not hasattr(utils.share_replayssm_ring_trackers, "__wrapped__"):
        utils.share_replayssm_ring_trackers = _form_groups_after(utils.share_replayssm_ring_trackers)


def _size_by_layers(model_class: type, name: str, of_layer: str) -> None:
    """vLLM sizes pages by a method of the model class, which knows nothing of rings: let the built layers answer."""
    original = getattr(model_class, name)
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def sized(cls: type, vllm_config: Any) -> Any:
        layers = replayed(vllm_config.compilation_config.static_forward_context)
        return getattr(next(iter(layers.values())), of_layer)() if layers else original(vllm_config)

    setattr(model_class, name, classmethod(sized))


def replayed(layers: dict[str, Any]) -> dict[str, Any]:
    """The layers that go through the ring, by name."""
    from replayssm.integrations.vllm.layer import ReplayLayer

    return {name: layer for name, layer in layers.items() if isinstance(layer, ReplayLayer) and layer.plan is not None}


def _form_groups_after(original: Any) -> Any:
    """vLLM calls this once it has bound the pages of all layers, in the model's order."""

    @functools.wraps(original)
    def form(ordered_layer_names: list[str], forward_context: dict[str, Any], kv_cache_groups: Any = None) -> None:
        original(ordered_layer_names, forward_context, kv_cache_groups)
        form_groups(ordered_layer_names, forward_context, kv_cache_groups or ())

    return form


def form_groups(ordered_names: list[str], layers: dict[str, Any], kv_cache_groups: Sequence[Any]) -> list[Group]:
    """Give the replayed layers of every KV-cache group their cursors; a layer in no group is one by itself."""
    namespace = {name: index for index, group in enumerate(kv_cache_groups) for name in group.layer_names}
    members: dict[int | str, list[str]] = {}
    for name in ordered_names:
        if name in replayed({name: layers[name]}):
            members.setdefault(namespace.get(name, name), []).append(name)
    groups = []
    for names in members.values():
        state = layers[names[0]].kv_cache[1]
        caches = [layers[name].cache for name in names]
        group = Group(layers[names[0]].plan, len(state), state.device, names, caches)
        for name in names:
            layers[name].join(group)
        groups.append(group)
    _log(ordered_names, layers, groups)
    return groups


def _log(ordered_names: list[str], layers: dict[str, Any], groups: list[Group]) -> None:
    """What runs through replay and what does not, and the kernels of the largest batch; a line each."""
    from vllm.logger import init_logger

    log = init_logger("vllm.replayssm").info_once
    by_kind: dict[str, int] = {}
    for name in ordered_names:
        plan = getattr(layers[name], "plan", None)
        kind = f"{_title(layers[name].spec)} through replay" if plan else f"{type(layers[name]).__name__} as in vLLM"
        by_kind[kind] = by_kind.get(kind, 0) + 1
    chosen = ""
    if groups:
        plan = groups[0].plan
        chosen = f"; buffer_len {plan.buffer_len}, checkpoint {plan.checkpoint}, read {plan.read}, {plan.backend}"
    log("replayssm: %s%s", ", ".join(f"{count} {kind}" for kind, count in by_kind.items()), chosen)
    for layer in replayed(layers).values():
        for kind, kernel in layer.plan.kernels(layer.max_batch).items():
            log("replayssm: %s, %d requests: %s", kind, layer.max_batch, kernel)


def _title(spec: LayerSpec) -> str:
    return f"{spec.family} {'x'.join(map(str, spec.state_shape))}"
