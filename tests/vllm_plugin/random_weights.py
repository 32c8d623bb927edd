"""Random weights for models that are given by their config.json alone (`load_format` dummy)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def randomise_dummies() -> None:
    """Give dummy weights values with which recurrences remember and forget, the same in every engine."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    original = DummyModelLoader.load_weights

    def load(loader: Any, model: Any, model_config: Any) -> None:
        original(loader, model, model_config)
        _randomise_all(model)

    DummyModelLoader.load_weights = load
    _know_bailing()


def _know_bailing() -> None:
    """Its configuration, which checkpoints bring along as code where transformers has none."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if "bailing_hybrid" not in CONFIG_MAPPING:
        from vllm.transformers_utils.configs.bailing_moe_v3_vl import BailingMoeV3TextConfig

        AutoConfig.register("bailing_hybrid", BailingMoeV3TextConfig)


def _randomise_all(model: Any) -> None:
    import torch
    from tiny_models import _randomise

    with torch.no_grad():
        for i, (name, parameter) in enumerate(sorted(model.named_parameters())):
            weight = torch.full(parameter.shape, float("norm" in name))
            _randomise(name.rpartition(".")[2], weight, torch.Generator().manual_seed(i))
            parameter.copy_(weight)
        for layer in model.modules():
            if getattr(layer, "decode_conv1d_weight", None) is not None:  # copies that only vLLM's loaders fill
                by_channel = layer.conv1d.weight.view(3, -1, layer.conv_size)
                layer.decode_conv1d_weight.copy_(by_channel.transpose(1, 2))
                layer.decode_norm_weight.copy_(layer.o_norm.weight)
