"""The portable GDN and KDA kernel with read copies in Triton's interpreter; see `interpreted_read_delta.py`.

The interpreter must be chosen before Triton is imported, so they run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    tests = Path(__file__).with_name("interpreted_read_delta.py")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "0", str(tests)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
