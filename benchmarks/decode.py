"""One-token decode steps of the presets' layers: a markdown table for docs/measurements.md and all numbers as CSV.

    python benchmarks/decode.py --csv decode.csv [--models qwen3.5-4b ...] [--batches 1 8 ...] [--checkpoints fp32 bf16]

Checks each layer first; a layer that fails its check is not timed. `--check only` and `--check skip` divide the two,
so that many layers can be checked (and compiled) side by side before one process times them.
"""

from __future__ import annotations

import argparse
import csv
import traceback
from dataclasses import asdict
from pathlib import Path

import torch

from replayssm import Plan, preset
from replayssm.bench.decode import LayerBench, Timing
from replayssm.bench.timing import Ceilings, measure_ceilings
from replayssm.cli.bench import environment, require_correct

MODELS = ("nemotron-3-super-120b-a12b", "nemotron-3-nano-4b", "qwen3.5-122b-a10b", "qwen3.5-4b", "kimi-linear-48b")
BATCHES = (1, 8, 32, 128, 256, 512)
PHASES = ("stepwise", "cycle", "cycle_lockstep", "flush", "middle")


def check(model: str, checkpoint: str, batches: list[int]) -> None:
    """Raise unless the layer is right at every batch."""
    plan = Plan(preset(model)[:1], checkpoint=checkpoint, device="cuda")
    require_correct(plan.layers[0], plan, batches)
    print(f"{model}, {checkpoint} checkpoint, batches {batches}: right", flush=True)


def measure(model: str, checkpoint: str, batches: list[int], ceilings: Ceilings) -> list[Timing]:
    """Time every phase."""
    plan = Plan(preset(model)[:1], checkpoint=checkpoint, device="cuda")
    timings = []
    for batch in batches:
        bench = LayerBench(plan, batch)
        timings += [bench.time(phase, ceilings) for phase in PHASES]
        del bench
        torch.cuda.empty_cache()
    return timings


def table_row(model: str, checkpoint: str, timings: list[Timing]) -> str:
    """Stepwise and cycle times, the cycle's fraction of the read ceiling and the flush's of the update ceiling."""
    phases = {t.phase: t for t in timings}
    stepwise, cycle, flush = phases["stepwise"], phases["cycle"], phases["flush"]
    cells = [
        model,
        checkpoint,
        str(cycle.batch),
        f"{stepwise.us:.1f} ({stepwise.update_fraction:.2f})",
        f"{cycle.us:.1f} (**{cycle.read_fraction:.2f}**)",
        f"{stepwise.us / cycle.us:.2f}x",
        f"{phases['cycle_lockstep'].us:.1f}",
        f"{phases['middle'].us:.1f} ({phases['middle'].read_fraction:.2f})",
        f"{flush.us:.1f} ({flush.update_fraction:.2f})",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--checkpoints", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--check", choices=["first", "only", "skip"], default="first")
    parser.add_argument("--csv", type=Path, default=Path("decode.csv"))
    options = parser.parse_args()
    cases = [(model, checkpoint) for model in options.models for checkpoint in options.checkpoints]
    if options.check != "skip":
        for model, checkpoint in cases:
            check(model, checkpoint, options.batches)
    if options.check == "only":
        return
    ceilings = measure_ceilings(torch.device("cuda"))
    print(environment(), ceilings, flush=True)
    print("| layer of | format | batch | stepwise us | cycle us | gain | lockstep us | 8 rows us | flush us |")
    print("|---|---|---|---|---|---|---|---|---|")
    with options.csv.open("w", newline="") as file:
        names = ["model", "checkpoint", *Timing.__dataclass_fields__]
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for model, checkpoint in cases:
            try:
                timings = measure(model, checkpoint, options.batches, ceilings)
            except Exception:
                traceback.print_exc()
                continue
            writer.writerows({"model": model, "checkpoint": checkpoint, **asdict(t)} for t in timings)
            file.flush()
            for batch in options.batches:
                print(table_row(model, checkpoint, [t for t in timings if t.batch == batch]), flush=True)


if __name__ == "__main__":
    main()
