"""Prefix caching on a CPU: requests that start from blocks which others read, or decoded, to their end."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from agreement import apart, check_as_near, noise, summary
from launch import result_of
from models import save
from test_agreement import FAMILIES, PLUGIN, READ, spec_of

pytestmark = pytest.mark.timeout(900)
BLOCK = 128


def prefix_spec(folder: Path, additional: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Prompts with three beginnings that go on for two turns: the second starts from what the first decoded."""
    rng = random.Random(1)
    beginnings = [[rng.randrange(3, 120) for _ in range(200)] for _ in range(3)]
    prompts = [beginnings[i % 3][: rng.choice((70, 110, 127, 128, 129, 199))] for i in range(18)]
    prompts = [prompt + [rng.randrange(3, 120) for _ in range(rng.choice((0, 1, 5)))] for prompt in prompts]
    lens = [60 + 7 * (i % 4) for i in range(len(prompts))]
    spec = spec_of(folder, additional, prompts=prompts, max_tokens=lens, abort={}, turns=2, **changes)
    spec["llm"] |= {"enable_prefix_caching": True, "num_gpu_blocks_override": 200}
    return spec


@pytest.fixture(scope="module", params=FAMILIES)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    work = tmp_path_factory.mktemp(f"prefix-{request.param}")
    model = save(request.param, work / request.param)
    engines = (("stock", {}), ("plugin", PLUGIN), ("read", READ))
    return {name: result_of(work / name, prefix_spec(model, additional)) for name, additional in engines}


def test_the_cache_is_used(runs: dict[str, Any]) -> None:
    for run in runs.values():
        assert sum(r["cached"] >= BLOCK for r in run["requests"]) >= 5
    assert [r["cached"] for r in runs["plugin"]["requests"]] == [r["cached"] for r in runs["stock"]["requests"]]


def test_log_probabilities(runs: dict[str, Any]) -> None:
    """As near to those of one prefill without the cache as stock vLLM's; with a copy, what its format costs."""
    check_as_near(runs["plugin"], runs["stock"])
    stock, plugin, read = (summary(noise(runs[name])) for name in ("stock", "plugin", "read"))
    assert summary(apart(runs["stock"], runs["plugin"]))["mean"] < stock["mean"]
    assert read["mean"] < 2**6 * plugin["mean"]
