"""Caches with read copies over the portable kernels, and their rounding, in Triton's interpreter; plans on a GPU.

The interpreted tests are in `interpreted_read_cache.py` and `interpreted_rounding.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from replayssm import GDNSpec, Mamba2Spec, Plan, ReplayError, routes


@pytest.mark.parametrize(
    "tests", ["interpreted_rounding.py", pytest.param("interpreted_read_cache.py", marks=pytest.mark.slow)]
)
def test_in_the_interpreter(tests: str) -> None:
    pytest.importorskip("triton")
    path = Path(__file__).with_name(tests)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "0", str(path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


LAYERS = (Mamba2Spec(2, 8, 32, 1), GDNSpec(1, 2, 32, 8, layer_idx=1), GDNSpec(1, 2, 48, 8, layer_idx=2))


def kernels_for(*pairs: tuple[str, str]) -> SimpleNamespace:
    """A module that has kernels for these pairs of read copy and checkpoint, without windows."""

    def supports(spec: object, *, checkpoint: str, read: str, max_window_len: int, rounding: str) -> bool:
        return (read, checkpoint) in pairs and max_window_len == 1 and rounding == "nearest"

    return SimpleNamespace(supports=supports, route=lambda spec, **options: f"{options['read']}-kernel")


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """On a GPU that reads nvfp4 and int8 copies of fp32 states, if Mamba-2's; of fp8 states too."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    modules = {
        "mamba2": kernels_for(("nvfp4", "fp32"), ("int8", "fp32"), ("none", "fp8")),
        "gdn": kernels_for(("nvfp4", "fp32"), ("int8", "fp32")),
    }
    monkeypatch.setattr(routes, "read_launch_module", lambda family: modules[family])
    plain = SimpleNamespace(route=lambda *_: "plain-kernel")
    monkeypatch.setattr(routes, "launch_module", lambda family: plain)
    return Plan(LAYERS, backend="triton", read={0: "int8", 1: "nvfp4", 2: "none"})


def test_each_layer_has_its_kernel(plan: Plan) -> None:
    plan.check_runnable()
    assert plan.kernels(3) == {
        "mamba2 2x8x32, int8": "int8-kernel",
        "gdn 2x8x32, nvfp4": "nvfp4-kernel",
        "gdn 2x8x48": "plain-kernel",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"read": {0: "int8", 1: "fp8", 2: "none"}}, "read/checkpoint is fp8/fp32 with rounding 'nearest' and"),
        ({"read": "nvfp4", "checkpoint": "fp16"}, "none/fp32, int8/fp32, nvfp4/fp32, none/fp16, none/bf16, none/fp8"),
        ({"read": "none", "checkpoint": "fp8"}, "for gdn 2x8x32; allowed on a GPU: none/fp32, int8/fp32, nvfp4/fp32"),
        (
            {"num_draft_tokens": 2},
            "num_draft_tokens 2 for mamba2 2x8x32; allowed on a GPU: none/fp32, none/fp16, none/bf16",
        ),
        ({"read": "none", "checkpoint": "bf16", "rounding": "stochastic"}, "allowed on a GPU: no pair"),
        ({"read": "none", "checkpoint": "fp8", "route": "stepwise"}, "route is 'stepwise' with checkpoint 'fp8'"),
    ],
)
def test_what_has_no_kernel_is_refused(plan: Plan, options: dict, message: str) -> None:
    with pytest.raises(ReplayError) as error:
        plan.with_options(**options).check_runnable()
    assert message in str(error.value)
