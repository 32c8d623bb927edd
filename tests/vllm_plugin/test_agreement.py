"""The plugin against stock vLLM on a CPU: mixed lengths, chunked prefill, preemption, aborts; texts and states."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import apart, check_as_near, noise, summary
from launch import HERE, result_of
from models import save

pytestmark = pytest.mark.timeout(900)  # three engines start in a fixture
FAMILIES = ("nemotron_h", "qwen3_next")
READ = {"replayssm": {"buffer_len": 5, "read": "nvfp4"}}
STEPWISE = {"replayssm": {"buffer_len": 1}}  # every token is replayed into the checkpoint before the next
PLUGIN = {"replayssm": {"buffer_len": 5}}
CHUNK = 64  # tokens of a step
# Prompts of one token, of a whole chunk, and with a last chunk of one token.
PROMPT_LENS = (1, 2, 3, 17, 40, 63, 64, 65, 66, 100, 129, 130)
BLOCKS = {"nemotron_h": 14, "qwen3_next": 14}


def spec_of(folder: Path, additional: dict[str, Any], **changes: Any) -> dict[str, Any]:
    rng = random.Random(0)
    lens = [PROMPT_LENS[i % len(PROMPT_LENS)] for i in range(24)]
    llm = {
        "enforce_eager": True,
        "max_num_seqs": 6,
        "max_num_batched_tokens": CHUNK,
        "mamba_ssm_cache_dtype": "float32",
        "num_gpu_blocks_override": BLOCKS[folder.name],
        "kv_cache_memory_bytes": 2**26,
        "additional_config": additional,
    }
    return {
        "model": str(folder),
        "llm": llm,
        "prompts": [[rng.randrange(3, 120) for _ in range(n)] for n in lens],
        "max_tokens": [20 + rng.randrange(40) for _ in lens],
        "abort": {"4": 7, "11": 3},
        "score": True,
        **changes,
    }


@pytest.fixture(scope="module", params=FAMILIES)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results and states of stock vLLM, the plugin, and the plugin replaying every token."""
    work = tmp_path_factory.mktemp(request.param)
    model = save(request.param, work / request.param)
    found: dict[str, Any] = {"model": model}
    for name, additional in (("stock", {}), ("plugin", PLUGIN), ("stepwise", STEPWISE)):
        states = work / f"{name}.pt"
        found[name] = result_of(work / name, spec_of(model, additional, states=str(states)))
        found[name]["states"] = torch.load(states)
    return found


def test_what_ran(runs: dict[str, Any]) -> None:
    assert (runs["stock"]["replayed"], runs["plugin"]["replayed"]) == (0, 2)
    assert re.search(r"replayssm: 2 (mamba2 8x16x16|gdn 4x64x64) through replay", runs["plugin"]["log"])
    assert "replayssm" not in runs["stock"]["log"].replace(str(HERE), "")
    for run in (runs["stock"], runs["plugin"]):
        assert run["preempted"] > 0
        assert [len(r["tokens"]) < 20 for r in run["requests"]].count(True) == 2  # the aborted ones
        assert sum(len(r["tokens"]) for r in run["requests"]) > 500


def test_log_probabilities(runs: dict[str, Any]) -> None:
    """A decoded token's log-probability is as near to that of a prefill of the same text as in stock vLLM."""
    check_as_near(runs["plugin"], runs["stock"])
    assert summary(apart(runs["stock"], runs["plugin"]))["mean"] < summary(noise(runs["stock"]))["mean"]


@pytest.mark.parametrize("runs", FAMILIES[:1], indirect=True)  # the copy is made in what the layers share
def test_reads_from_a_copy(runs: dict[str, Any], tmp_path: Path) -> None:
    """A read copy costs what its format costs; a prompt that one prefill reads to its end is served without it."""
    read = result_of(tmp_path, spec_of(runs["model"], READ))
    assert "read nvfp4" in read["log"]
    for i, (a, b) in enumerate(zip(runs["plugin"]["requests"], read["requests"], strict=True)):
        if PROMPT_LENS[i % len(PROMPT_LENS)] <= CHUNK // 2:
            assert abs(a["logprobs"][0] - b["logprobs"][0]) < 2**-6
    # Values of nvfp4 are right to 2**-3, those of bf16, which every engine rounds its outputs to, to 2**-9.
    assert 0.0 < summary(noise(read))["mean"] < 2**6 * summary(noise(runs["plugin"]))["mean"]


def test_states_are_those_of_stepwise_decoding(runs: dict[str, Any]) -> None:
    """Bit for bit in the first layer, whose inputs are the tokens alone; further on its outputs are rounded to bf16."""
    ours, exact = runs["plugin"]["states"], runs["stepwise"]["states"]
    same = [i for i in ours["tokens"] if _same_tokens(runs, int(i))]
    names = [name for name in ours if name != "tokens"]
    assert len(same) >= 2 and len(names) == 2
    for i in same:
        assert torch.equal(ours[names[0]][i], exact[names[0]][i])
        torch.testing.assert_close(ours[names[1]][i], exact[names[1]][i], rtol=2**-6, atol=2**-6)


def _same_tokens(runs: dict[str, Any], i: int) -> bool:
    """Whether the states of request i hold the same tokens: greedy texts may part where tokens are equally likely."""
    ours, exact = (runs[name] for name in ("plugin", "stepwise"))
    held = ours["states"]["tokens"][str(i)]
    if exact["states"]["tokens"].get(str(i)) != held:
        return False
    n = max(held - PROMPT_LENS[i % len(PROMPT_LENS)], 0)
    return ours["requests"][i]["tokens"][:n] == exact["requests"][i]["tokens"][:n]
