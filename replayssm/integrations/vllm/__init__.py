"""A vLLM plugin: Mamba-2, Gated DeltaNet and KDA layers of an unmodified vLLM decode through checkpoint and ring.

vLLM finds `register` by its entry point, in every process. It only offers the layers; they do what vLLM's own do
until the option "replayssm" asks for more (see `options`).
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

# vLLM's layer: our module and class.
LAYERS = {
    "BailingMoeV3KimiDeltaAttention": ("bailing", "ReplayBailing"),
    "Glm5NextLinearAttention": ("glm5_next", "ReplayGlm5Next"),
    "KimiGatedDeltaNetAttention": ("kda", "ReplayKimiDelta"),
    "KimiK3DeltaAttention": ("kimi_k3", "ReplayKimiK3"),
    "MambaMixer2": ("mamba2", "ReplayMambaMixer2"),
    "OlmoHybridGatedDeltaNetAttention": ("olmo", "ReplayOlmo"),
    "QwenGatedDeltaNetAttention": ("gdn", "ReplayGatedDeltaNet"),
}


def register() -> None:
    """Entry point of the group `vllm.general_plugins`; may be called more than once."""
    from replayssm.integrations.vllm.support import check_when_configured

    check_when_configured()
    _offer_layers()


def _offer_layers() -> None:
    """Let vLLM build our subclasses of its layers, each imported when the first of its kind is built."""
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    original = PluggableLayer.__new__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def made(cls: Any, *args: Any, **kwargs: Any) -> Any:
        name = cls.__name__
        if name in LAYERS and name not in op_registry_oot:
            module, ours = LAYERS[name]
            cls.register_oot(name=name)(getattr(import_module(f"{__name__}.{module}"), ours))
        return original(cls, *args, **kwargs)

    PluggableLayer.__new__ = made
