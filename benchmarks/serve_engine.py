"""One vLLM engine with dummy weights: GPU-busy and wall time of a decode step, by batch. `serve.py` runs it.

python benchmarks/serve_engine.py FOLDER  # with spec.json; makes ready, waits for go, writes result.json
"""

from __future__ import annotations

import gzip
import json
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

DELAY = 12  # steps before a profile starts: by then every prompt is read and the batch is whole
STEPS = 32
COUNTS = "vllm:spec_decode_num"
LONGEST, NAME = 40, 120  # kernels that a result lists, and letters of a name


def arguments(spec: dict[str, Any], traces: Path) -> dict[str, Any]:
    """Arguments of vllm.LLM: no checkpoint, no tokenizer, CUDA graphs of the batches that are measured."""
    sizes = sorted(batch * (1 + spec["draft_tokens"]) for batch in spec["batches"])
    memory = {"gpu_memory_utilization": spec["gpu_fraction"]}
    if spec["kv_gib"]:  # engines that share a GPU cannot each take a fraction of what they find free
        memory = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": int(spec["kv_gib"] * 2**30)}
    profiler = {
        "profiler": "torch",
        "torch_profiler_dir": str(traces),
        "torch_profiler_activities": ["CUDA"],
        "torch_profiler_with_stack": False,
        "torch_profiler_dump_cuda_time_total": False,
        "ignore_frontend": True,
    }
    return {
        "model": spec["model"],
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": spec["max_model_len"],
        "max_num_seqs": max(spec["batches"]),
        "enable_prefix_caching": False,
        "disable_log_stats": not spec["draft_tokens"],
        **memory,
        "compilation_config": {"cudagraph_capture_sizes": sizes},
        "profiler_config": profiler,
        **spec["llm"],
    }


def read_trace(trace: Path) -> dict[str, Any]:
    """Of a torch profiler's trace over STEPS steps, in milliseconds a step: when anything ran, and the longest kernels.

    {"busy_ms": time in which at least one kernel or copy ran, "kernels": [[name, launches, ms], ...]}
    """
    with (gzip.open if trace.suffix == ".gz" else open)(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    work = [e for e in events if e.get("ph") == "X" and e.get("cat") in kinds]
    busy, end = 0.0, float("-inf")
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for start, stop in sorted((e["ts"], e["ts"] + e["dur"]) for e in work):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    for e in work:
        entry = kernels[e["name"][:NAME]]
        entry[0] += 1
        entry[1] += e["dur"]
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:LONGEST]
    listed = [[name, round(count / STEPS, 2), round(us / STEPS / 1e3, 4)] for name, (count, us) in longest]
    return {"busy_ms": busy / STEPS / 1e3, "kernels": listed}


class Bench:
    """An engine and its workload: random prompts, greedy, every answer as long as asked."""

    def __init__(self, spec: dict[str, Any], traces: Path) -> None:
        from vllm import LLM

        self.traces, self.rng = traces, random.Random(0)
        self.llm = LLM(**arguments(spec, traces))
        self.config = self.llm.llm_engine.vllm_config
        self.vocabulary = self.config.model_config.get_vocab_size()

    def generate(self, batch: int, tokens: int) -> float:
        """Seconds that a batch of requests takes."""
        from vllm import SamplingParams

        greedy = SamplingParams(
            temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
        )
        prompts = [[self.rng.randrange(10, self.vocabulary - 10) for _ in range(128)] for _ in range(batch)]
        start = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
        return time.perf_counter() - start

    def measure(self, batch: int) -> dict[str, Any]:
        """GPU-busy ms a step from a profile of steady steps; wall ms a token of a request from two lengths."""
        self.generate(batch, 8)
        before = self.drafted()
        long, short = (min(self.generate(batch, tokens) for _ in range(2)) for tokens in (128, 32))
        wall = (long - short) / 96 * 1e3
        name = f"batch{batch}"
        self.llm.start_profile(name, delay_iterations=DELAY, max_iterations=STEPS)
        self.generate(batch, 4 * (DELAY + STEPS) if self.config.speculative_config else DELAY + STEPS + 24)
        self.llm.stop_profile()
        time.sleep(1)  # the engine's process writes the trace
        trace = max(self.traces.glob(f"{name}_*.json*"), key=os.path.getmtime)
        windows, taken = (now - then for now, then in zip(self.drafted(), before, strict=True))
        accepted = 1.0 + (taken / windows if windows else 0.0)
        return {"batch": batch, "accepted": accepted, "wall_ms": wall, **read_trace(trace)}

    def drafted(self) -> tuple[int, int]:
        """So far: windows with drafts, and drafts that were accepted."""
        if not self.config.speculative_config:
            return 0, 0
        counts = {metric.name: metric.value for metric in self.llm.get_metrics() if hasattr(metric, "value")}
        return counts.get(f"{COUNTS}_drafts", 0), counts.get(f"{COUNTS}_accepted_tokens", 0)

    def concurrency(self) -> float:
        """How many requests of `max_model_len` the memory holds, as vLLM's log says; 0 if this vLLM does not tell."""
        return float(getattr(self.config.cache_config, "kv_cache_max_concurrency", None) or 0)

    def blocks(self) -> dict[str, int]:
        """Blocks of the cache, and the tokens that an attention block holds."""
        cache = self.config.cache_config
        return {"number": cache.num_gpu_blocks or 0, "tokens": cache.block_size}


def wait_for_turn(folder: Path) -> None:
    """Other engines may start or measure on the same GPU."""
    (folder / "ready").touch()
    while not (folder / "go").exists():
        time.sleep(0.1)


def main() -> None:
    work = Path(sys.argv[1])
    spec = json.loads((work / "spec.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(spec, Path(folder))
        result: dict[str, Any] = {"concurrency": bench.concurrency(), "blocks": bench.blocks(), "steps": []}
        wait_for_turn(work)
        for batch in spec["batches"]:
            result["steps"].append(bench.measure(batch))
            (work / "part.json").write_text(json.dumps(result))
            (work / "part.json").replace(work / "result.json")  # outlives an engine that fails later


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads must not hold up the exit
