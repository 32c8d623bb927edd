"""Models beside those of `test_agreement`: their layers and names, engines of some, Kimi-K3's metadata."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agreement import apart, check_as_near, noise, summary
from launch import HERE, QUIET
from models import save
from step_metadata import step_metadata
from vllm.model_executor.models.registry import ModelRegistry

import replayssm.integrations.vllm as plugin
from replayssm import KDASpec, Plan
from replayssm.checks import ReplayError
from replayssm.integrations.vllm.delta_rows import delta_rows, only_prefills, token_parts
from replayssm.integrations.vllm.support import ARCHITECTURES, NOT_SERVED, check_supported

pytestmark = pytest.mark.timeout(600)
ENGINES = {"granite": 2, "falcon_h1": 2, "mamba2": 2, "zamba2": 3}  # replayed layers
NEWER = {"AliceAIForCausalLM"}  # not in the version for CPUs


def test_architectures_are_vllms() -> None:
    assert set(ARCHITECTURES) | set(NOT_SERVED) <= set(ModelRegistry.get_supported_archs()) | NEWER
    assert "BambaForCausalLM" not in ModelRegistry.get_supported_archs()  # vLLM dropped it


@pytest.mark.parametrize(("architecture", "reason"), NOT_SERVED.items())
def test_refused_with_the_reason(architecture: str, reason: str) -> None:
    with pytest.raises(ReplayError, match=reason):
        check_supported(SimpleNamespace(model_config=SimpleNamespace(architecture=architecture)))


@pytest.mark.parametrize(("base", "ours"), plugin.LAYERS.items())
def test_layers_are_vllms(base: str, ours: tuple[str, str]) -> None:
    if ours[0] == "glm5_next":
        pytest.importorskip("torchvision")  # which vLLM imports for the pictures of the same model
    layer = getattr(import_module(f"replayssm.integrations.vllm.{ours[0]}"), ours[1])
    assert layer.__mro__[-1] is object and base in [cls.__name__ for cls in layer.__mro__[1:]]


def test_states_of_kda_are_stored_as_vllm_stores_them() -> None:
    from replayssm.integrations.vllm.kda import ReplayKDA

    class Pages:
        def get_state_dtype(self) -> tuple[torch.dtype, torch.dtype]:
            return torch.bfloat16, torch.float32

    class Layer(ReplayKDA, Pages):
        head_dim = 8

    config = SimpleNamespace(additional_config={"replayssm": {"checkpoint": "bf16"}})
    with pytest.raises(ReplayError, match="checkpoint of KDA layers"):
        Layer().start_kda(config, 4, 4, None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every model's requests through the ring and without it."""
    work = tmp_path_factory.mktemp("models")
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 120) for _ in range(n)] for n in (1, 2, 17, 40, 65, 130)]
    llm = {
        "enforce_eager": True,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "mamba_ssm_cache_dtype": "float32",
        "num_gpu_blocks_override": 14,
        "kv_cache_memory_bytes": 2**26,
        "additional_config": {"replayssm": {"buffer_len": 5}},
    }
    asked = {"llm": llm, "prompts": prompts, "max_tokens": [20 + rng.randrange(20) for _ in prompts]}
    files = [work / "specs.json", work / "results.json"]
    files[0].write_text(json.dumps([{"model": str(save(name, work / name)), **asked} for name in ENGINES]))
    done = subprocess.run(
        [sys.executable, str(HERE / "models_run.py"), *map(str, files)],
        env={**os.environ, **QUIET, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return dict(zip(ENGINES, json.loads(files[1].read_text()), strict=True))


@pytest.mark.parametrize(("name", "layers"), ENGINES.items())
def test_log_probabilities(runs: dict[str, Any], name: str, layers: int) -> None:
    """A decoded token's log-probability is as near to that of a prefill of the same text as without the ring."""
    found = runs[name]
    assert found["replayed"] == layers
    check_as_near(found["plugin"], found["stock"])
    assert summary(apart(found["stock"], found["plugin"]))["mean"] < summary(noise(found["stock"]))["mean"]


def kimi_k3_metadata(folder: Path, *step: Any) -> Any:
    """`step_metadata` of Kimi-K3, completed."""
    from replayssm.integrations.vllm.kimi_k3 import OneBlockBuilder, complete

    metadata = step_metadata(OneBlockBuilder, folder, *step)
    complete(metadata)
    return metadata


def test_kimi_k3_rows(tmp_path: Path) -> None:
    """Rows of one token before prefills; windows alone, and around a prompt that goes on and one that starts."""
    folder = save("qwen3_next", tmp_path / "qwen3_next")
    plan = [Plan((KDASpec(4, 4, 8, 8),), num_draft_tokens=n) for n in (0, 3)]

    metadata = kimi_k3_metadata(folder, False, [20, 30, 12, 0], [9, 9, 40, 6], [1, 1, 8, 6])
    rows = delta_rows(plan[0], metadata)
    assert rows.decodes is not None and rows.prefills is not None and rows.continued is not None
    assert rows.decodes.slot_indices.tolist() == [11, 12]
    assert (rows.prefills.tolist(), rows.continued.tolist()) == ([13, 14], [13, 0])
    assert token_parts(metadata) == (slice(0, 2), slice(2, None))
    assert only_prefills(metadata).non_spec_query_start_loc.tolist() == [0, 8, 14]

    rows = delta_rows(plan[1], kimi_k3_metadata(folder, True, [20, 30, 40], [9, 9, 9], [4, 1, 3]))
    assert rows.decodes is not None and rows.accepted is not None and rows.prefills is None
    assert rows.decodes.query_start_loc.tolist() == [0, 4, 5, 8] and rows.accepted.tolist() == [1, 2, 3]

    metadata = kimi_k3_metadata(folder, True, [20, 10, 30, 0, 16], [9, 40, 9, 7, 17], [4, 5, 2, 7, 1])
    rows = delta_rows(plan[1], metadata)
    assert rows.decodes is not None and rows.prefills is not None and rows.continued is not None
    assert (rows.decodes.slot_indices.tolist(), rows.prefills.tolist()) == ([11, 13], [12, 14, 15])
    assert (rows.accepted.tolist(), rows.continued.tolist()) == ([1, 3], [12, 0, 15])
    assert token_parts(metadata)[0].tolist() == [0, 1, 2, 3, 9, 10]
    alone = only_prefills(metadata)
    assert alone.non_spec_query_start_loc.tolist() == [0, 5, 12, 13]
    assert alone.non_spec_token_start is None and alone.num_spec_decodes == 0
