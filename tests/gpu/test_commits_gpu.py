"""The kernels that end a step on a GPU: the tests of `commit_cases.py`."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
if torch.cuda.is_available():
    from commit_cases import (  # noqa: F401
        test_a_cache_of_all_families_commits_paths_with_kernels,
        test_commits,
        test_commits_of_many_rows_and_of_none,
        test_moves,
        test_taking_back,
    )
