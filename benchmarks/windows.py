"""Window steps of the presets' layers beside one-token steps: a markdown table for docs/measurements.md, and CSV.

    python benchmarks/windows.py --csv windows.csv [--read nvfp4] [--tokens 4 6] [--models qwen3.5-4b ...]

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
BATCHES = (1, 8, 64, 256)
Case = tuple[str, str, str, int]  # model, read, checkpoint, tokens


def make_plan(case: Case) -> Plan:
    """The first layer of the model, verifying windows."""
    model, read, checkpoint, tokens = case
    layers = preset(model)[:1]
    return Plan(layers, num_draft_tokens=tokens - 1, read=read, checkpoint=checkpoint, device="cuda")


def table_row(case: Case, batch: int, phases: dict[str, Timing]) -> str:
    """Times of one token and of a window, the mixed window's fraction of the read ceiling, and the ratio of both."""
    token, window = phases["token_mixed"], phases["window_mixed"]
    cells = [
        *map(str, (*case, batch)),
        f"{phases['token_half'].us:.1f}",
        f"{token.us:.1f} ({token.read_fraction:.2f})",
        f"{phases['window_half'].us:.1f} ({phases['window_half'].read_fraction:.2f})",
        f"{window.us:.1f} (**{window.read_fraction:.2f}**)",
        f"{window.us * window.read_fraction:.1f}",
        f"{window.us / token.us:.2f}x",
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
    times = "1 token, half us | mixed us | window, half us | mixed us | limit"
    print(f"| layer of | read | checkpoint | tokens | batch | {times} | |")
    print("|" + "---|" * 11)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["model", "read", "checkpoint", "tokens", *Timing.__dataclass_fields__])
        writer.writeheader()
        for case, timings in results.items():
            names = dict(zip(("model", "read", "checkpoint", "tokens"), case, strict=True))
            final = against(timings, ceilings)
            writer.writerows({**names, **asdict(timing)} for timing in final)
            for batch, phases in by_batch(final).items():
                print(table_row(case, batch, phases))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--read", nargs="+", default=["none"], help="formats of the read copy")
    parser.add_argument("--checkpoints", nargs="+", default=["fp32"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4])
    parser.add_argument("--check", choices=["first", "only", "skip"], default="first")
    parser.add_argument("--csv", type=Path, default=Path("windows.csv"))
    options = parser.parse_args()
    cases: list[Case] = list(product(options.models, options.read, options.checkpoints, options.tokens))
    if options.check != "skip":
        for case in cases:
            plan = make_plan(case)
            require_correct(plan.layers[0], plan, options.batches)
            print(f"{case}, batches {options.batches}: right", flush=True)
    if options.check != "only":
        measure(cases, options.batches, options.csv)


if __name__ == "__main__":
    main()
