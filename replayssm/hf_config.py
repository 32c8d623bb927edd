"""layer_specs: read the SSM layers of a model from its Hugging Face configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from replayssm.checks import ReplayError, fail
from replayssm.config import LayerSpec
from replayssm.hf_models import READERS, Fields, MissingError

_NESTED = ("text_config", "llm_config", "language_config")


def layer_specs(config: object) -> tuple[LayerSpec, ...]:
    """The SSM layers of a model, in order, from its Hugging Face configuration.

    `config` is a transformers configuration object, a dict, or the path of a config.json or of a folder that holds one.
    """
    if isinstance(config, (str, os.PathLike)):
        config = _read_json(Path(config))
    if isinstance(config, Mapping):
        return _specs_of_mapping(config)
    if not hasattr(config, "model_type"):
        raise fail(
            "config", type(config).__name__, "a transformers configuration, a dict, or the path of a config.json"
        )
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return _read(str(text.model_type), Fields(text))


def _read_json(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReplayError(
            f"config is {str(path)!r} ({error}); allowed: a config.json or a folder that holds one"
        ) from error
    if not isinstance(content, dict):
        raise ReplayError(f"config is {str(path)!r}, which holds a {type(content).__name__}; allowed: a JSON object")
    return content


def _specs_of_mapping(config: Mapping[str, Any]) -> tuple[LayerSpec, ...]:
    outer = config.get("model_type")
    text = next((config[name] for name in _NESTED if isinstance(config.get(name), Mapping)), config)
    model_type = str(text.get("model_type", outer))
    try:
        return _read(model_type, Fields(text), defaults_known=False)
    except MissingError as missing:
        if find_spec("transformers") is None:
            raise ReplayError(
                f"config of model_type {model_type!r} has no field {str(missing)!r}; "
                "allowed: a config with that field, or an installed transformers, which knows the model's defaults"
            ) from None
    return _read(model_type, Fields(_with_defaults(model_type, text)))


def _with_defaults(model_type: str, text: Mapping[str, Any]) -> object:
    """The transformers configuration object for raw fields, with its class's defaults filled in."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(**{**text, "model_type": model_type})
    except Exception as error:  # transformers raises its own kinds for values it rejects
        raise ReplayError(f"config of model_type {model_type!r} is not accepted by transformers: {error}") from error
    return config.get_text_config(decoder=True)


def _read(model_type: str, fields: Fields, *, defaults_known: bool = True) -> tuple[LayerSpec, ...]:
    reader = READERS.get(model_type.removesuffix("_text"))
    if reader is None:
        raise fail("model_type", model_type, ", ".join(READERS))
    try:
        specs = tuple(reader(fields))
    except MissingError as missing:
        if not defaults_known:
            raise
        raise ReplayError(
            f"config of model_type {model_type!r} has no field {str(missing)!r}, which it needs"
        ) from None
    except ReplayError:
        raise
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise ReplayError(
            f"config of model_type {model_type!r} has a wrong value ({error}); allowed: what transformers allows"
        ) from error
    if not specs:
        raise ReplayError(f"config of model_type {model_type!r} has no SSM layers; allowed: at least one")
    return specs
