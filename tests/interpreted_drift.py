"""The laboratory's scan kernel against its window by window scan; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from replayssm.drift.forward import delta_inputs, mamba2_inputs
from replayssm.drift.launch import launch_scan
from replayssm.drift.scan import Checkpoint, scan_windows
from replayssm.drift.variants import Variant
from replayssm.drift.windows import LayerInputs

TOKENS = 8
VARIANTS = (
    *(Variant("none", format, 1) for format in ("fp32", "fp16", "int8", "fp8", "nvfp4")),
    *(Variant(read, "fp32", 4) for read in ("none", "int8", "fp8", "nvfp4")),
    Variant("nvfp4", "fp8", 4),
    *(Variant("none", format, 4, "stochastic") for format in ("fp16", "bf16", "fp8")),
)


def inputs_of(family: str) -> LayerInputs:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = normal(TOKENS, 2, 32), normal(TOKENS, 2, 32), normal(TOKENS, 2, 4)
    if family == "mamba2":
        return mamba2_inputs(v, torch.rand(TOKENS, 2, generator=generator), torch.tensor([-0.1, -2.0]), k, q, None)
    g = -torch.exp(normal(TOKENS, 2, 32)) if family == "kda" else -torch.exp(normal(TOKENS, 2))
    return delta_inputs(q, k, v, g, torch.rand(TOKENS, 2, generator=generator))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("family", ["mamba2", "gdn", "kda"])
def test_the_scan_kernel(family: str, variant: Variant) -> None:
    inputs = inputs_of(family)
    expected, found = (Checkpoint.empty(2, 4, 32, inputs.v) for _ in range(2))
    out, out_found = scan_windows(variant, inputs, expected), launch_scan(variant, inputs, found)
    assert torch.equal(found.flushes, expected.flushes) or variant.option != "stochastic"
    # Equal but where rounding noise of fp32 moves a value over the border between two codes.
    close = torch.isclose(found.state, expected.state, rtol=1e-5, atol=1e-6)
    near = torch.isclose(out_found, out, rtol=1e-4, atol=1e-5)
    assert close.float().mean() > 0.97 and near.float().mean() > 0.85
    if variant.checkpoint == "fp32":
        assert close.all() and (variant.read != "none" or near.all())


def test_a_head_dim_that_is_no_power_of_two() -> None:
    inputs = inputs_of("gdn")
    cut = LayerInputs(inputs.q, inputs.k, inputs.v[..., :3], inputs.g, inputs.beta)
    whole, part = (Checkpoint.empty(2, V, 32, inputs.v) for V in (4, 3))
    out, out_cut = (launch_scan(Variant("fp8", "bf16", 4), i, c) for i, c in ((inputs, whole), (cut, part)))
    # Rows of the state know nothing of each other in these formats.
    assert torch.equal(out_cut, out[..., :3]) and torch.equal(part.state, whole.state[:, :3])
