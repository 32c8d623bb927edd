"""Whole decode steps in vLLM with dummy weights, stock against the plugin: a markdown table, and JSON if asked for.

    python benchmarks/serve.py --model qwen3.5-4b --batches 1 32 256 [--options '{"read": "nvfp4"}' ...]
        [--draft-tokens 3 --acceptance 2.5] [--llm '{"gdn_prefill_backend": "triton"}'] [--json serve.json]

The engines run one after the other, each in a process of its own; nothing is downloaded. GPU-busy is the time in which
a kernel or a copy ran, from the torch profiler: wall time is the host's on many machines. The weights mean nothing, so
neither do the outputs; with drafts vLLM accepts as many as `--acceptance` says, bonus token included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
COLUMNS = ("engine", "batch", "GPU-busy ms/step", "gain", "tokens/s, GPU-busy", "wall ms/token", "concurrency")


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
    engines: dict[str, dict[str, Any]] = {"stock": common}
    for text in args.options:
        engines[f"replayssm {text}"] = {**common, "additional_config": {"replayssm": json.loads(text)}}
    shared = {
        "model": model,
        "batches": args.batches,
        "draft_tokens": args.draft_tokens,
        "gpu_fraction": args.gpu_fraction,
    }
    return {name: {**shared, "llm": llm} for name, llm in engines.items()}


def run(name: str, spec: dict[str, Any], work: Path) -> dict[str, Any] | None:
    """The measurements of one engine; None if it failed, whose log then ends here."""
    request, result, log = work / "spec.json", work / "result.json", work / "log.txt"
    result.unlink(missing_ok=True)
    request.write_text(json.dumps(spec))
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **os.environ}
    command = [sys.executable, str(HERE / "serve_engine.py"), str(request), str(result)]
    with log.open("w") as output:
        subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)
    lines = log.read_text(errors="replace").splitlines()
    print(*(line for line in lines if "replayssm:" in line), sep="\n", file=sys.stderr)
    if not result.exists():
        print(f"{name} failed:", *lines[-20:], sep="\n", file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def rows(name: str, found: dict[str, Any], stock: dict[str, Any] | None, tokens_a_step: float) -> list[str]:
    """The table's rows of one engine; `gain` is stock's GPU-busy time over this one's."""
    base = {step["batch"]: step["busy_ms"] for step in stock["steps"]} if stock else {}
    lines = []
    for step in found["steps"]:
        batch, busy = step["batch"], step["busy_ms"]
        gain = f"{base[batch] / busy:.2f}x" if batch in base else "-"
        rate = batch * tokens_a_step / busy * 1e3
        cells = (name, str(batch), f"{busy:.3f}", gain, f"{rate:.0f}", f"{step['wall_ms']:.2f}")
        lines.append("| " + " | ".join((*cells, f"{found['concurrency']:.1f}")) + " |")
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3.5-4b", help="a name of serve_models.json, or a model's folder")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--options", nargs="*", default=["{}"], help="one plugin engine for each JSON object")
    parser.add_argument("--draft-tokens", type=int, default=0, help="drafts a step, from n-grams; 0: none")
    parser.add_argument("--acceptance", type=float, default=2.5, help="tokens a step that vLLM accepts, with drafts")
    parser.add_argument("--llm", default="{}", help="more arguments of vllm.LLM, as JSON")
    parser.add_argument("--gpu-fraction", type=float, default=0.85, help="gpu_memory_utilization")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    return parser.parse_args()


def main() -> int:
    args, found = parse(), {}
    tokens_a_step = args.acceptance if args.draft_tokens else 1.0
    print("| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS), sep="\n")
    with tempfile.TemporaryDirectory() as folder:
        for name, spec in specs(args, model_folder(args.model, Path(folder))).items():
            found[name] = run(name, spec, Path(folder))
            if found[name]:
                print(*rows(name, found[name], found.get("stock"), tokens_a_step), sep="\n", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
