"""Layers whose products are one: they keep their weights, which are parts of the joined one."""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from replayssm.integrations.vllm.joined import joined


def layer(outputs: int) -> torch.nn.Module:
    linear = torch.nn.Linear(32, outputs, bias=False).requires_grad_(False)
    linear.quant_method = UnquantizedLinearMethod()
    return linear


def test_one_product() -> None:
    parts, x = (layer(40), layer(8)), torch.randn(3, 32)
    both = joined(*parts)
    assert both is not None
    both.quant_method._gemm_impl = lambda _, x, weight, bias: torch.nn.functional.linear(x, weight, bias)
    both.quant_method.process_weights_after_loading(both)
    for scale in (1.0, 2.0):
        parts[1].weight.data.mul_(scale)  # as weights that are updated in place
        torch.testing.assert_close(both(x), torch.cat([part(x) for part in parts], dim=1))
    assert not list(both.named_parameters()) and not both.state_dict()  # nothing that a checkpoint would have to hold


@pytest.mark.parametrize("other", [layer(7), torch.nn.Linear(32, 8)])
def test_others_stay_apart(other: torch.nn.Module) -> None:
    other.quant_method = getattr(other, "quant_method", object())
    assert joined(layer(40), other) is None
