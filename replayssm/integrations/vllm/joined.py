"""Linear layers that read the same input as one product: their weights become parts of one."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

ALIGNED = 16  # outputs of all layers together: a row of them then starts where vector loads may


def joined(*layers: Any) -> Joined | None:
    """The layers as one, if their weights are plain ones: None else."""
    plain = all(type(layer.quant_method) is UnquantizedLinearMethod and layer.bias is None for layer in layers)
    return Joined(layers) if plain and sum(len(layer.weight) for layer in layers) % ALIGNED == 0 else None


class Joined(torch.nn.Module):
    """The outputs of layers side by side. They keep their weights, as views of this one's."""

    def __init__(self, layers: tuple[Any, ...]) -> None:
        super().__init__()
        self.parts = layers  # a tuple, so that no layer is registered a second time
        self.quant_method = JoinedMethod()  # vLLM calls what it finds under this name once weights are loaded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, outputs of all layers]."""
        return self.quant_method.apply(self, x)


class JoinedMethod(UnquantizedLinearMethod):
    """How a `Joined` gets its weight."""

    def process_weights_after_loading(self, layer: Joined) -> None:
        """Copy the loaded weights into one, and let the layers have its parts: later updates in place reach both."""
        weight = torch.cat([part.weight.data for part in layer.parts])
        for part, rows in zip(layer.parts, weight.split([len(part.weight) for part in layer.parts]), strict=True):
            part.weight.data = rows
        layer.register_buffer("weight", weight, persistent=False)
