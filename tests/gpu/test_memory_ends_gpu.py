"""No step reads past the end of its tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
STEPS = str(Path(__file__).with_name("guarded_steps.py"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("family", ["mamba2", "delta"])
def test_nothing_past_a_tensor_is_read(family: str) -> None:
    result = run("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "0", "-k", family, STEPS)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


def test_a_read_past_a_tensor_of_96_would_be_found() -> None:
    assert run(STEPS, "95").returncode == 0
    assert "illegal memory access" in run(STEPS, "96").stderr
