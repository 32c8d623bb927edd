"""The convolution kernel in Triton's interpreter; the tests themselves are in `conv_cases.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    tests = Path(__file__).with_name("conv_cases.py")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "0", str(tests)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
