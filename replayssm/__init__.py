"""ReplaySSM: decode hybrid language models from a checkpoint of the SSM state and a ring of the last inputs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replayssm.cache import ReplayCache
    from replayssm.checks import ReplayError
    from replayssm.config import GDNSpec, KDASpec, LayerSpec, Mamba2Spec
    from replayssm.cursors import Step
    from replayssm.hf_config import layer_specs
    from replayssm.integrations.hf_cache import ReplayDynamicCache
    from replayssm.integrations.transformers import disable, enable
    from replayssm.layer import LayerCache
    from replayssm.plan import Plan
    from replayssm.presets import PRESETS, preset
    from replayssm.step import delta_decode, mamba2_decode

__version__ = "0.1.0"
__all__ = [
    "PRESETS",
    "GDNSpec",
    "KDASpec",
    "LayerCache",
    "LayerSpec",
    "Mamba2Spec",
    "Plan",
    "ReplayCache",
    "ReplayDynamicCache",
    "ReplayError",
    "Step",
    "delta_decode",
    "disable",
    "enable",
    "layer_specs",
    "mamba2_decode",
    "preset",
]

# Imported when first used: the command line answers without torch, and the core runs without transformers.
_MODULES = {
    "ReplayCache": "cache",
    "ReplayError": "checks",
    "GDNSpec": "config",
    "KDASpec": "config",
    "LayerSpec": "config",
    "Mamba2Spec": "config",
    "Step": "cursors",
    "layer_specs": "hf_config",
    "ReplayDynamicCache": "integrations.hf_cache",
    "disable": "integrations.transformers",
    "enable": "integrations.transformers",
    "LayerCache": "layer",
    "Plan": "plan",
    "PRESETS": "presets",
    "preset": "presets",
    "delta_decode": "step",
    "mamba2_decode": "step",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'replayssm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"replayssm.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
