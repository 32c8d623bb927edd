"""Whole decode steps in vLLM with dummy weights, stock against the plugin: a markdown table, and JSON if asked for.

    python benchmarks/serve.py --model qwen3.5-4b --batches 1 32 256 [--options '{}' '{"read": "nvfp4"}' ...]
        [--draft-tokens 4 --acceptance 2.5] [--together --kv-gib 69 21] [--llm '{"gdn_prefill_backend": "triton"}']

Every engine is a process of its own; nothing is downloaded. They run one after the other, each with the same fraction
of the GPU's memory, or start together and measure one at a time, stock first, each with its own --kv-gib of cache.
Busy is the GPU's time in which a kernel or a copy ran, from the torch profiler: wall time is the host's on many
machines. The weights mean nothing, so neither do the outputs; with drafts vLLM accepts as many as `--acceptance` says,
bonus token included, and the table shows how many it did. `requests` is how many of `--max-model-len` tokens vLLM says
its cache holds; with --kv-gib, how many it would in stock's memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
COLUMNS = ("engine", "batch", "busy ms/step", "tokens/step", "tokens/s busy", "gain", "wall ms/token", "requests")
TELLING = ("replayssm:", "Maximum concurrency", "GPU KV cache size")  # lines of an engine's log that are shown


class Engine:
    """A process of serve_engine.py, with a folder for what it is told and what it tells."""

    def __init__(self, name: str, spec: dict[str, Any], folder: Path) -> None:
        self.name, self.folder = name, folder
        folder.mkdir()
        (folder / "spec.json").write_text(json.dumps(spec))
        environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **os.environ}
        command = [sys.executable, str(HERE / "serve_engine.py"), str(folder)]
        with (folder / "log.txt").open("w") as output:
            self.process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def started(self) -> bool:
        """Whether it has stopped loading, for good or ill."""
        return (self.folder / "ready").exists() or not self.running

    def stop(self) -> None:
        """End it and what it started: vLLM's processes must not keep the GPU."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def result(self) -> dict[str, Any] | None:
        """What it measured; the end of its log is shown if that is not all."""
        complete, found = self.process.returncode == 0, self.folder / "result.json"
        lines = (self.folder / "log.txt").read_text(errors="replace").splitlines()
        shown = [line for line in lines if any(text in line for text in TELLING)]
        if not complete:
            shown += [f"{self.name} failed:", *lines[-25:]]
        print(*shown, sep="\n", file=sys.stderr, flush=True)
        return {**json.loads(found.read_text()), "complete": complete} if found.exists() else None


def model_folder(name: str, work: Path) -> str:
    """A folder with a config.json: `name` itself, or a published shape of serve_models.json."""
    if Path(name).is_dir():
        return name
    shapes = json.loads((HERE / "serve_models.json").read_text())
    if name not in shapes:
        raise SystemExit(f"--model {name!r}: a folder with a config.json, or one of {', '.join(shapes)}")
    folder = work / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shapes[name]))
    return str(folder)


def specs(args: argparse.Namespace, model: str) -> dict[str, dict[str, Any]]:
    """What each engine runs, by the name that its rows get: stock first."""
    common: dict[str, Any] = json.loads(args.llm)
    if args.draft_tokens:
        common["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": args.draft_tokens,
            "prompt_lookup_max": 2,
            "prompt_lookup_min": 1,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": args.acceptance,
        }
    engines: dict[str, dict[str, Any]] = {} if args.no_stock else {"stock": common}
    for text in args.options:
        engines[f"replayssm {text}"] = {**common, "additional_config": {"replayssm": json.loads(text)}}
    memory = args.kv_gib * len(engines) if len(args.kv_gib) == 1 else args.kv_gib
    if len(memory) != len(engines):
        raise SystemExit(f"--kv-gib: {len(memory)} values for {len(engines)} engines ({', '.join(engines)})")
    shared = {name: getattr(args, name) for name in ("batches", "draft_tokens", "gpu_fraction", "max_model_len")}
    return {
        name: {"model": model, "kv_gib": gib, **shared, "llm": llm}
        for (name, llm), gib in zip(engines.items(), memory, strict=True)
    }


def run(
    engines: dict[str, dict[str, Any]], work: Path, together: bool, timeout: float
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Start engines and let one at a time measure: their names and results. None outlives the timeout, or this call."""
    waves = [list(engines)] if together else [[name] for name in engines]
    for wave in waves:
        end = time.monotonic() + timeout
        running = [Engine(name, engines[name], work / str(list(engines).index(name))) for name in wave]
        try:
            while not all(engine.started for engine in running) and time.monotonic() < end:
                time.sleep(0.2)
            for engine in running:
                (engine.folder / "go").touch()
                while engine.running and time.monotonic() < end:
                    time.sleep(0.2)
                engine.stop()
                yield engine.name, engine.result()
        finally:
            for engine in running:
                engine.stop()


def rows(name: str, engines: dict[str, dict[str, Any]], results: dict[str, dict[str, Any] | None]) -> list[str]:
    """The table's rows of one engine; `gain` is in tokens of GPU-busy time over stock's."""
    found, stock = results[name], results.get("stock")
    if found is None:
        return [f"| {name} | failed |" + " |" * (len(COLUMNS) - 2)]
    base = {step["batch"]: rate(step) for step in stock["steps"]} if stock else {}
    own, first = engines[name]["kv_gib"], next(iter(engines.values()))["kv_gib"]
    requests = found["concurrency"] * (first / own if own else 1.0)
    lines = []
    for step in found["steps"]:
        batch, tokens = step["batch"], rate(step)
        gain = f"{tokens / base[batch]:.2f}x" if batch in base else "-"
        cells = (name, str(batch), f"{step['busy_ms']:.3f}", f"{step['accepted']:.2f}", f"{tokens:.0f}", gain)
        lines.append("| " + " | ".join((*cells, f"{step['wall_ms']:.2f}", f"{requests:.1f}")) + " |")
    return lines


def rate(step: dict[str, Any]) -> float:
    """Tokens a second of GPU-busy time."""
    return step["batch"] * step["accepted"] / step["busy_ms"] * 1e3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3.5-4b", help="a name of serve_models.json, or a model's folder")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--options", nargs="*", default=["{}"], help="one plugin engine for each JSON object")
    parser.add_argument("--no-stock", action="store_true", help="the plugin's engines alone")
    parser.add_argument("--draft-tokens", type=int, default=0, help="drafts a step, from n-grams; 0: none")
    parser.add_argument("--acceptance", type=float, default=2.5, help="tokens a step that vLLM accepts, with drafts")
    parser.add_argument("--max-model-len", type=int, default=1024, help="tokens of the longest request")
    parser.add_argument("--llm", default="{}", help="more arguments of vllm.LLM, as JSON")
    parser.add_argument("--gpu-fraction", type=float, default=0.85, help="gpu_memory_utilization")
    parser.add_argument("--kv-gib", type=float, nargs="+", default=[0.0], help="GiB of cache, of each engine or of all")
    parser.add_argument("--together", action="store_true", help="start all engines at once; needs --kv-gib")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that an engine, or all together, may take")
    parser.add_argument("--work", type=Path, help="keep the engines' logs and results in this new folder")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    return parser.parse_args()


def main() -> int:
    args = parse()
    found: dict[str, dict[str, Any] | None] = {}
    print("| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS), sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        work = args.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        engines = specs(args, model_folder(args.model, work))
        for name, result in run(engines, work, args.together, args.timeout):
            found[name] = result
            print(*rows(name, engines, found), sep="\n", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0 if all(result and result["complete"] for result in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
