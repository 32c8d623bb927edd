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


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A plan of layers with and without read copies on a GPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    special = SimpleNamespace(route=lambda spec, **options: f"{options['read']}-kernel")
    monkeypatch.setattr(routes, "read_launch_module", lambda family: special)
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
        ({"checkpoint": "bf16", "rounding": "stochastic"}, "rounding is 'stochastic' with K = 6; allowed on a GPU: K"),
        ({"checkpoint": "fp8", "route": "stepwise"}, "route is 'stepwise' with checkpoint 'fp8'; allowed on a GPU: r"),
    ],
)
def test_what_has_no_kernel_is_refused(plan: Plan, options: dict, message: str) -> None:
    plan = plan.with_options(layers=(Mamba2Spec(2, 8, 6, 1),), read="none", **options)
    with pytest.raises(ReplayError) as error:
        plan.check_runnable()
    assert message in str(error.value)
