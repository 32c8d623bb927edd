"""The formats and the portable Mamba-2 step with read copies in Triton's interpreter, in a process of their own.

The interpreter must be chosen before Triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["interpreted_formats.py", "interpreted_read_mamba2.py"])
def test_in_the_interpreter(name: str) -> None:
    pytest.importorskip("triton")
    tests = Path(__file__).with_name(name)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "0", str(tests)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
