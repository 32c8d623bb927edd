"""No portable kernel touches what lies before or past its tensors: in Triton's interpreter, in other processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
STEPS, COMMITS = (str(Path(__file__).with_name(name)) for name in ("guarded_steps.py", "guarded_commits.py"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def check(*arguments: str) -> None:
    result = run("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "0", *arguments)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


# Trees read all that chains do.
@pytest.mark.parametrize("launches", ["tokens or stepwise", "trees", "stochastic"])
def test_steps(launches: str) -> None:
    check("-k", launches, STEPS)


def test_commits_and_convolutions() -> None:
    check(COMMITS)


@pytest.mark.parametrize(("end", "last", "next"), [("end", "95", "96"), ("start", "0", "-1")])
def test_an_access_past_a_tensor_of_96_would_be_found(end: str, last: str, next: str) -> None:
    assert run(COMMITS, end, last).returncode == 0
    assert run(COMMITS, end, next).returncode == -signal.SIGSEGV
