"""Shared set-up: versions in the header, seeds, the hypothesis profile and the gpu marker."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from replayssm.env import collect

settings.register_profile(
    "replayssm",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("replayssm")

_NO_GPU = "no CUDA device"


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


def pytest_report_header(config: pytest.Config) -> list[str]:
    found = collect()
    packages = ", ".join(f"{name} {version or 'not installed'}" for name, version in found.packages.items())
    gpus = ", ".join(gpu.name for gpu in found.gpus) or "none"
    return [f"versions: python {found.python}, {packages}", f"GPU: {gpus}"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=_NO_GPU))


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _give_memory_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers share a GPU: none may sit on what its last test allocated."""
    yield
    if request.node.get_closest_marker("gpu"):
        torch.cuda.empty_cache()
