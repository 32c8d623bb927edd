"""What a transformers model is made of: the module that runs its layers, and the device that holds them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn

from replayssm.checks import fail

OLDEST_TRANSFORMERS = "5.17.0"


def decoder_of(model: object) -> Any:
    """The module that runs the layers, whatever wraps it."""
    if Version(transformers.__version__) < Version(OLDEST_TRANSFORMERS):
        raise fail("transformers", transformers.__version__, f"at least {OLDEST_TRANSFORMERS}")
    if not isinstance(model, transformers.PreTrainedModel):
        raise fail("model", type(model).__name__, "a transformers model")
    return model.get_decoder()


def device_of(decoder: nn.Module) -> torch.device:
    """The one device that a decoder's parameters are on."""
    devices = {parameter.device for parameter in decoder.parameters()}
    if len(devices) != 1 or torch.device("meta") in devices:
        raise fail("model.device", sorted(map(str, devices)), "one device that holds all layers")
    return devices.pop()
