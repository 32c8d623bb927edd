"""More models on a GPU: `pytest -m gpu tests/vllm_plugin/test_models_gpu.py`; weights are random, nothing is loaded.

All engines start at once. What decoding says of a token is compared with one prefill of the same text.
"""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agreement import apart, check_as_near, noise, summary
from gpu_configs import CONFIGS, save_config
from launch import Engines

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
LAYERS = {
    "kimi_k3": "3 kda 24x128x128",
    "glm5_next": "4 kda 24x128x128",
    "bailing": "3 kda 16x128x128",
    "olmo": "3 gdn 16x192x96",
}
# vLLM imports it for the pictures of the same model.
HERE = [name for name in CONFIGS if name != "glm5_next" or importlib.util.find_spec("torchvision")]
SIZES = (1, 2, 4, 8, 16)
DRAFTS = {
    "method": "ngram",
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
    "num_speculative_tokens": 4,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_length": 2.5,
}


def spec_of(model: Path, kind: str) -> dict[str, Any]:
    rng = random.Random(1)
    lens = [1, 2, 3, 17, 40, 63, 64, 65, 66, 100, 129, 130, 200, 250] * 2
    windows = (1, 5) if kind == "drafts" else (1,)
    llm: dict[str, Any] = {
        "load_format": "dummy",
        "max_num_seqs": SIZES[-1],
        "max_num_batched_tokens": 256,
        "long_prefill_token_threshold": 64,
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 2**31,
        "gpu_memory_utilization": 0.05,
        "kernel_config": {"enable_jit_warmup": False},
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted({n * k for n in SIZES for k in windows}),
        },
        "additional_config": {
            **({"gdn_prefill_backend": "triton"} if model.name == "olmo" else {"kda_prefill_backend": "triton"}),
            **({} if kind == "stock" else {"replayssm": {}}),
        },
    }
    if kind == "drafts":
        llm["speculative_config"] = DRAFTS
    return {
        "model": str(model),
        "llm": llm,
        "prompts": [[rng.randrange(3, 120) for _ in range(n)] for n in lens],
        "max_tokens": [30 + rng.randrange(61) for _ in lens],
        "score": True,
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    work = tmp_path_factory.mktemp("models")
    models = {name: save_config(name, work / name) for name in HERE}
    kinds = ("plugin", "stock", "drafts")
    started = Engines(work / "runs", {f"{n}/{k}": spec_of(m, k) for k in kinds for n, m in models.items()})
    yield started
    started.close()


@pytest.mark.parametrize("kind", ["plugin", "drafts"])
@pytest.mark.parametrize("name", HERE)
def test_log_probabilities(run: Engines, name: str, kind: str) -> None:
    """A decoded token's log-probability is as near to that of a prefill of the same text as in stock vLLM."""
    ours, stock = run[f"{name}/{kind}"], run[f"{name}/stock"]
    assert re.search(f"replayssm: {LAYERS[name]} through replay", ours["log"])
    check_as_near(ours, stock)
    if kind == "drafts":
        assert 1.5 < ours["tokens_a_step"] < 2.8
    else:
        assert summary(apart(stock, ours))["mean"] < summary(noise(stock))["mean"]
