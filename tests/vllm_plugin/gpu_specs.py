"""The engines of `test_gpu.py`: what each is asked to do."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

FAMILIES = ("nano_layers", "qwen35_layers", "kimi_layers")
# Attention blocks of so many tokens are at least as large as a state with its ring.
BLOCK = {
    "nano_layers": 512,
    "granite_layers": 512,
    "qwen35_layers": 256,
    "next_layers": 256,
    "kimi_layers": 3072,
}
CHUNK = 64  # tokens of a prompt that a step takes, as long as the batch leaves room for them
# Prompts of one token, of whole chunks, and with a last chunk of one token.
PROMPT_LENS = (1, 2, 3, 17, 40, 63, 64, 65, 100, 129, 193, 255, 256, 257)
ANSWER_LENS = (256, 70, 130, 200, 300)
SEATS, AT_ONCE = 16, 11
SIZES = [1, 2, 4, 8, 16]
NGRAMS = {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1}
MTP = {"method": "mtp"}
DECODES_CAPTURED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # starts sooner: nothing is compiled


def engine(model: Path, options: dict[str, Any] | None, graphs: dict[str, Any], **llm: Any) -> dict[str, Any]:
    """28 requests for 16 seats, of which two are aborted; options: the plugin's, None for stock vLLM."""
    name, rng = model.name, random.Random(0)
    lens = [*PROMPT_LENS * 2]
    lens[3:8] = [BLOCK[name] - 40 * i for i in (1, 2, 3, 4, 5)]  # these grow into another block
    arguments = {
        "max_num_seqs": SEATS,
        # All seats of Kimi's are taken before the first of its long prompts grows into another block.
        "max_num_batched_tokens": 2048 if name == "kimi_layers" else 256,
        "long_prefill_token_threshold": 1024 if name == "kimi_layers" else CHUNK,
        "max_model_len": 4096,
        "block_size": BLOCK[name],
        "mamba_ssm_cache_dtype": "float32",
        "num_gpu_blocks_override": 4 * AT_ONCE + 1,  # four a request until one grows: then another has to go
        "kv_cache_memory_bytes": 2**31,
        "gpu_memory_utilization": 0.05,
        "kernel_config": {"enable_jit_warmup": False},
        "compilation_config": {"cudagraph_capture_sizes": SIZES, **graphs},
        "additional_config": {} if options is None else {"replayssm": options},
        **({} if name in ("nano_layers", "kimi_layers") else {"gdn_prefill_backend": "triton"}),
        **llm,
    }
    return {
        "model": str(model),
        "llm": arguments,
        "prompts": [[rng.randrange(3, 120) for _ in range(n)] for n in lens],
        "max_tokens": [ANSWER_LENS[i % len(ANSWER_LENS)] for i in range(len(lens))],
        "abort": {"2": 7, "11": 3},
        "score": True,
    }


def drafting(spec: dict[str, Any], drafts: int, **method: Any) -> dict[str, Any]:
    """The same with so many drafts a step, of which vLLM accepts 1.5 on average, whatever they are."""
    accepted = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    sizes = sorted({n * k for n in SIZES for k in (1, drafts + 1)})
    spec["llm"]["compilation_config"]["cudagraph_capture_sizes"] = sizes
    spec["llm"]["speculative_config"] = {**method, "num_speculative_tokens": drafts, **accepted}
    return spec


def to_states(spec: dict[str, Any], file: Path) -> dict[str, Any]:
    """The same in a cache for all, which steps alike whatever a page holds, up to the states once all have run."""
    spec["llm"] |= {"num_gpu_blocks_override": 4 * 40, "async_scheduling": False, "max_num_batched_tokens": 256}
    return {
        **spec,
        "max_tokens": [60 + 17 * (i % 5) for i in range(len(spec["prompts"]))],
        "states": str(file),
        "prefilled": str(file.with_suffix(".prefilled")),
        "score": False,
    }


def prefixed(spec: dict[str, Any], block: int) -> dict[str, Any]:
    """Prompts with three beginnings of a block, which go on for two turns: the second starts from what was decoded."""
    rng = random.Random(1)
    beginnings = [[rng.randrange(3, 120) for _ in range(block + 80)] for _ in range(3)]
    lens = [block + more for more in (-70, -1, 0, 1, 2, 17, 79, -20, 40)]
    prompts = [beginnings[i % 3][:n] + [rng.randrange(3, 120) for _ in range(i % 3)] for i, n in enumerate(lens)]
    spec["llm"] |= {"enable_prefix_caching": True, "num_gpu_blocks_override": 200, "long_prefill_token_threshold": 0}
    spec["llm"]["max_num_batched_tokens"] = 1024
    answers = [50 + 13 * (i % 4) for i in range(len(prompts))]
    return {**spec, "prompts": prompts, "max_tokens": answers, "abort": {}, "turns": 2}


def parallel(model: Path) -> dict[str, dict[str, Any]]:
    """On two GPUs: each rank has half the heads."""
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    return {
        f"{model.name}/two": engine(model, {}, DECODES_CAPTURED, **two),
        f"{model.name}/two-drafts": drafting(engine(model, {}, DECODES_CAPTURED, **two), 4, **NGRAMS),
        f"{model.name}/two-stock": engine(model, None, DECODES_CAPTURED, **two),
    }


def family(model: Path, work: Path) -> dict[str, dict[str, Any]]:
    """What every family is asked to do."""
    name, captured = model.name, DECODES_CAPTURED
    found = {
        "plugin": engine(model, {}, {}),
        "drafts": drafting(engine(model, {}, captured), 4, **NGRAMS),
        "stock": engine(model, None, captured),
        "nvfp4": engine(model, {"read": "nvfp4"}, captured),
        "serial": to_states(engine(model, {"replay": "serial"}, captured), work / f"{name}-serial.pt"),
        "stepwise": to_states(engine(model, {"buffer_len": 1}, captured), work / f"{name}-stepwise.pt"),
        "prefix": prefixed(engine(model, {}, captured), BLOCK[name]),
    }
    return {**parallel(model), **{f"{name}/{kind}": spec for kind, spec in found.items()}}


def engines(work: Path, models: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """All, by name, in the order in which they start."""
    nano, qwen, following = (models[name] for name in ("nano_layers", "qwen35_layers", "next_layers"))
    pieces, captured = {"cudagraph_mode": "PIECEWISE"}, DECODES_CAPTURED
    mtp = drafting(engine(qwen, {}, captured, num_gpu_blocks_override=3 * AT_ONCE + 1), 3, **MTP)
    alone = {
        "next_layers/stock": engine(following, None, captured),
        "next_layers/plugin": engine(following, {}, captured),
        "next_layers/drafts": drafting(engine(following, {}, captured), 4, **{**NGRAMS, "method": "ngram_gpu"}),
        "qwen35_layers/mtp": mtp,
        "qwen35_layers/pieces": engine(qwen, {}, pieces),
        "qwen35_layers/pieces-drafts": drafting(engine(qwen, {}, pieces), 4, **NGRAMS),
        "qwen35_layers/rounded": engine(qwen, {"checkpoint": "bf16"}, captured),
        "qwen35_layers/rounded-stock": engine(qwen, None, captured, mamba_ssm_cache_dtype="bfloat16"),
        "nano_layers/eager": engine(nano, {}, {}, enforce_eager=True),
    }
    families = [family(models[name], work) for name in FAMILIES]
    by_turns = {name: families[i][name] for names in zip(*families, strict=True) for i, name in enumerate(names)}
    return {**alone, **parallel(models["granite_layers"]), **by_turns}
