"""The convolution kernels on a GPU, as compiled; the tests themselves are in `conv_cases.py`."""

from __future__ import annotations

import pytest
from conv_cases import test_convolution, test_windows

pytestmark = pytest.mark.gpu

__all__ = ["test_convolution", "test_windows"]
