"""The laboratory's Triton kernel: in the interpreter, in a process of its own, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from replayssm.drift.forward import delta_inputs, mamba2_inputs
from replayssm.drift.scan import scan
from replayssm.drift.variants import DEFAULTS, Variant
from replayssm.drift.windows import LayerInputs

# Whole windows of 64, and few enough for the slow formats on the CPU.
TOKENS = 256


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    tests = Path(__file__).with_name("interpreted_drift.py")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "0", str(tests)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def inputs_of(family: str, device: str) -> LayerInputs:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(TOKENS, *shape, generator=generator).to(device)

    beta = normal(4).sigmoid()
    if family == "mamba2":
        A = -torch.logspace(-4, 0, 4).to(device)
        return mamba2_inputs(normal(4, 64), 0.1 * beta, A, normal(2, 128), normal(2, 128), normal(4)[0])
    g = -torch.exp(normal(4, 128) - 4) if family == "kda" else -torch.exp(normal(4) - 4)
    return delta_inputs(normal(4, 128), normal(4, 128), normal(4, 128), g, beta)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", DEFAULTS)
@pytest.mark.parametrize("family", ["mamba2", "gdn", "kda"])
def test_on_a_gpu(family: str, variant: str) -> None:
    chosen = Variant.parse(variant)
    expected = scan(chosen, inputs_of(family, "cpu"), [TOKENS])
    found = scan(chosen, inputs_of(family, "cuda"), [TOKENS])
    # Codes on the border of two fall to either side and, where the state is what is rounded, stay there.
    allowed = 1e-4 if variant.startswith("none/fp32") else 2e-2 if "/fp32" in variant else 0.3
    for a, b in ((found.outputs, expected.outputs), (found.states[TOKENS], expected.states[TOKENS])):
        assert float((a.cpu() - b).norm() / b.norm()) < allowed
