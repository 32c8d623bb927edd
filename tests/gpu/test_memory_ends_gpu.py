"""No launch touches what lies before or past its tensors."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
STEPS, COMMITS = (str(Path(__file__).parents[1] / name) for name in ("guarded_steps.py", "guarded_commits.py"))
LAUNCHES = [
    *product(("tokens", "windows", "trees"), ("nano", "super", "gdn32", "gdn64", "kda")),
    ("stepwise or stochastic", ""),
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def check(*arguments: str) -> None:
    result = run("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "0", *arguments)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("launches", "shape"), LAUNCHES)
def test_steps(launches: str, shape: str) -> None:
    check("-k", f"({launches}) and {shape}" if shape else launches, STEPS)


def test_commits_and_convolutions() -> None:
    check(COMMITS)


@pytest.mark.parametrize(("end", "last", "next"), [("end", "95", "96"), ("start", "0", "-1")])
def test_an_access_past_a_tensor_of_96_would_be_found(end: str, last: str, next: str) -> None:
    assert run(COMMITS, end, last).returncode == 0
    assert "illegal memory access" in run(COMMITS, end, next).stderr
