"""The plugin on a GPU, with layers of real shapes: `pytest -m gpu tests/vllm_plugin`; with two GPUs also in parallel.

All engines start at once. What decoding says of a token is compared with one prefill of the same text.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import apart, check_as_near, noise, summary
from gpu_specs import BLOCK, FAMILIES, engines
from launch import HERE, Engines, gpus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
LAYERS = {
    "nano_layers": "mamba2 {}x80x128",
    "granite_layers": "mamba2 {}x64x128",
    "qwen35_layers": "gdn {}x128x128",
    "next_layers": "gdn {}x128x128",
    "kimi_layers": "kda {}x128x128",
}
HEADS = {"nano_layers": 96, "granite_layers": 128, "qwen35_layers": 32, "next_layers": 32, "kimi_layers": 32}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def run(work: Path) -> Iterator[Engines]:
    folders = {name: work / name for name in LAYERS}
    script = str(HERE / "models.py")
    made = [subprocess.Popen([sys.executable, script, n, str(f)]) for n, f in folders.items()]
    assert [process.wait() for process in made] == [0] * len(made)
    started = Engines(work / "runs", engines(work, folders))
    yield started
    started.close()


def check_logs(result: dict[str, Any], family: str, ranks: int = 1) -> None:
    """The layers went through the ring: the log names them with the heads of a rank."""
    title = LAYERS[family].format(HEADS[family] // ranks)
    assert re.search(rf"replayssm: 3 {title} through replay, \d \w+ as in vLLM", result["log"])


def check_apart(result: dict[str, Any], stock: dict[str, Any]) -> None:
    """Decoding by both, each as far from the exact value as from a prefill at most: their squares add up."""
    assert summary(apart(stock, result))["mean"] < 2**0.5 * summary(noise(stock))["mean"]


@pytest.mark.parametrize("family", FAMILIES)
def test_plugin(run: Engines, family: str) -> None:
    """vLLM's own settings: compiled, whole steps and pieces captured; a cache that makes requests give way."""
    plugin, stock = run[f"{family}/plugin"], run[f"{family}/stock"]
    check_logs(plugin, family)
    assert (stock["replayed"], plugin["replayed"]) == (0, 3)
    assert plugin["preempted"] > 0
    assert [len(r["tokens"]) < 20 for r in plugin["requests"]].count(True) == 2  # the aborted ones
    assert max(len(r["tokens"]) for r in plugin["requests"]) == 300
    check_as_near(plugin, stock)
    check_apart(plugin, stock)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_stepwise_decoding(run: Engines, work: Path, family: str) -> None:
    """Bit for bit in the first layer, whose inputs are the tokens; further on as near as those of one prefill are."""
    results = [run[f"{family}/{kind}"] for kind in ("serial", "stepwise")]
    files = (f"{family}-serial.pt", f"{family}-stepwise.pt", f"{family}-stepwise.prefilled")
    ours, exact, prefilled = (torch.load(work / file) for file in files)
    assert ours["tokens"] == exact["tokens"] == prefilled["tokens"]
    first, *others = [name for name in ours if name != "tokens"]
    same = [i for i, held in ours["tokens"].items() if same_text(results, int(i), held)]
    assert len(same) >= 3 and len(others) == 2
    assert all(torch.equal(ours[first][i], exact[first][i]) for i in same)
    for name in others:
        mean, allowed = (sum(distance(s[name][i], exact[name][i]) for i in same) / len(same) for s in (ours, prefilled))
        print(name, len(same), mean, allowed)
        assert mean < 1.25 * allowed


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def same_text(results: list[dict[str, Any]], i: int, held: int) -> bool:
    """Whether request i held the same tokens in both: greedy texts may part where tokens are equally likely."""
    ours, exact = (result["requests"][i] for result in results)
    n = max(held - ours["prompt"], 0)
    return ours["tokens"][:n] == exact["tokens"][:n]


@pytest.mark.parametrize("family", FAMILIES)
def test_reads_from_a_copy(run: Engines, family: str) -> None:
    """A read copy costs what its format costs: nvfp4 is right to 2**-3, bf16, as all outputs, to 2**-9."""
    read = run[f"{family}/nvfp4"]
    assert "read nvfp4" in read["log"] and read["preempted"] > 0
    ours, theirs = summary(noise(read)), summary(noise(run[f"{family}/stock"]))
    print(ours, theirs)
    assert 0.0 < ours["mean"] < 2**6 * theirs["mean"]


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_caching(run: Engines, family: str) -> None:
    """Requests that start from blocks which others read, or decoded, to their end."""
    prefix = run[f"{family}/prefix"]
    assert sum(r["cached"] >= BLOCK[family] for r in prefix["requests"]) >= 5
    check_as_near(prefix, run[f"{family}/stock"])


DRAFTS = [f"{family}/drafts" for family in (*FAMILIES, "next_layers")]


@pytest.mark.parametrize("name", [*DRAFTS, "qwen35_layers/mtp", "qwen35_layers/pieces-drafts"])
def test_drafts(run: Engines, name: str) -> None:
    """Windows of drafts, of which vLLM takes 1.5 on average; by n-grams or by the model's own layer."""
    family, drafts = name.split("/")[0], run[name]
    check_logs(drafts, family)
    assert drafts["preempted"] > 0
    assert 1.5 < drafts["tokens_a_step"] < 2.8
    check_as_near(drafts, run[f"{family}/stock"])


@pytest.mark.parametrize("name", ["next_layers/plugin", "qwen35_layers/pieces", "nano_layers/eager"])
def test_other_settings(run: Engines, name: str) -> None:
    """The interleaved projections of Qwen3-Next; graphs of pieces alone; no graphs."""
    check_logs(run[name], name.split("/")[0])
    assert run[name]["preempted"] > 0
    check_as_near(run[name], run[name.split("/")[0] + "/stock"])


def test_a_state_of_16_bits(run: Engines) -> None:
    """It is rounded once a window, where stock vLLM rounds it with every token."""
    rounded = run["qwen35_layers/rounded"]
    assert "checkpoint bf16" in rounded["log"]
    check_as_near(rounded, run["qwen35_layers/rounded-stock"])


@pytest.mark.skipif(len(gpus()) < 2, reason="needs two GPUs")
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, "granite_layers"])
def test_two_ranks(run: Engines, family: str, drafts: bool) -> None:
    """Every rank keeps half the heads in rings of its own."""
    two, stock = run[f"{family}/two-drafts" if drafts else f"{family}/two"], run[f"{family}/two-stock"]
    check_logs(two, family, ranks=2)
    assert two["preempted"] > 0
    check_as_near(two, stock)
    if drafts:
        assert 1.5 < two["tokens_a_step"] < 2.8
    else:
        check_apart(two, stock)
