"""One-token decode steps of the presets' layers: a markdown table for docs/measurements.md and all numbers as CSV.

    python benchmarks/decode.py --csv decode.csv [--models qwen3.5-4b ...] [--batches 1 8 ...] [--checkpoints fp32 bf16]
        [--reads none int8 ...]

Checks each layer first; a layer that fails its check is not timed. `--check only` and `--check skip` divide the two,
so that many layers can be checked (and compiled) side by side before one process times them.
"""

from __future__ import annotations

import argparse
import csv
import sys
import traceback
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch

from replayssm import Plan, preset
from replayssm.bench.decode import Timing
from replayssm.bench.measure import against, by_batch, time_layer
from replayssm.bench.timing import measure_ceilings
from replayssm.cli.bench import environment, require_correct

MODELS = ("nemotron-3-super-120b-a12b", "nemotron-3-nano-4b", "qwen3.5-122b-a10b", "qwen3.5-4b", "kimi-linear-48b")
BATCHES = (1, 8, 32, 128, 256, 512)
Case = tuple[str, str, str]  # model, checkpoint, read copy


def make_plan(case: Case) -> Plan:
    """The first layer of the model."""
    model, checkpoint, read = case
    return Plan(preset(model)[:1], checkpoint=checkpoint, read=read, device="cuda")


def table_row(case: Case, batch: int, phases: dict[str, Timing]) -> str:
    """Stepwise and cycle times, the cycle's fraction of the read ceiling and the flush's of the update ceiling."""
    stepwise, cycle, flush = phases["stepwise"], phases["cycle"], phases["flush"]
    cells = [
        *(*case, str(batch)),
        f"{stepwise.us:.1f} ({stepwise.update_fraction:.2f})",
        f"{cycle.us:.1f} (**{cycle.read_fraction:.2f}**)",
        f"{stepwise.us / cycle.us:.2f}x",
        f"{phases['cycle_lockstep'].us:.1f}",
        f"{phases['middle'].us:.1f} ({phases['middle'].read_fraction:.2f})",
        f"{flush.us:.1f} ({flush.update_fraction:.2f})",
    ]
    return "| " + " | ".join(cells) + " |"


def measure(cases: list[Case], batches: list[int], path: Path) -> None:
    """Time all cases between two measurements of the ceilings; print the table, write the CSV.

    Rows go to stderr as they come, as fractions of the first ceilings.
    """
    ceilings, results = measure_ceilings(torch.device("cuda")), {}
    for case in cases:
        try:
            results[case] = time_layer(make_plan(case), batches, ceilings)
        except Exception:
            traceback.print_exc()
            continue
        for batch, phases in by_batch(results[case]).items():
            print(table_row(case, batch, phases), file=sys.stderr, flush=True)
    ceilings = ceilings.best(measure_ceilings(torch.device("cuda")))
    print(environment(), ceilings)
    print("| layer of | format | read | batch | stepwise us | cycle us | gain | lockstep us | 8 rows us | flush us |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["model", "checkpoint", "read", *Timing.__dataclass_fields__])
        writer.writeheader()
        for case, timings in results.items():
            final = against(timings, ceilings)
            names = dict(zip(("model", "checkpoint", "read"), case, strict=True))
            writer.writerows({**names, **asdict(timing)} for timing in final)
            for batch, phases in by_batch(final).items():
                print(table_row(case, batch, phases))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--checkpoints", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--reads", nargs="+", default=["none"])
    parser.add_argument("--check", choices=["first", "only", "skip"], default="first")
    parser.add_argument("--csv", type=Path, default=Path("decode.csv"))
    options = parser.parse_args()
    cases: list[Case] = list(product(options.models, options.checkpoints, options.reads))
    if options.check != "skip":
        for case in cases:
            plan = make_plan(case)
            require_correct(plan.layers[0], plan, options.batches)
            print(f"{case}, batches {options.batches}: right", flush=True)
    if options.check != "only":
        measure(cases, options.batches, options.csv)


if __name__ == "__main__":
    main()
