"""What benchmarks of one layer share: their arguments, a check before anything is timed, a markdown table, and CSV."""

from __future__ import annotations

import argparse
import csv
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from replayssm import Plan
from replayssm.bench.decode import Timing
from replayssm.bench.measure import against, by_batch, time_layer
from replayssm.bench.timing import measure_ceilings
from replayssm.cli.bench import environment, require_correct

MODELS = ("nemotron-3-super-120b-a12b", "nemotron-3-nano-4b", "qwen3.5-122b-a10b", "qwen3.5-4b", "kimi-linear-48b")
Case = tuple[str | int, ...]


@dataclass(frozen=True)
class Table:
    """names: what a case gives; plan: a case's plan; heads, cells: a row after case and batch, from its phases."""

    names: tuple[str, ...]
    plan: Callable[..., Plan]
    heads: tuple[str, ...]
    cells: Callable[[dict[str, Timing]], Iterable[str]]

    def header(self) -> str:
        """The head of the table."""
        heads = ("layer of", *self.names[1:], "batch", *self.heads)
        return line(heads) + "\n|" + "---|" * len(heads)

    def row(self, case: Case, batch: int, phases: dict[str, Timing]) -> str:
        """A row of the table."""
        return line((*map(str, case), str(batch), *self.cells(phases)))


def line(cells: Iterable[str]) -> str:
    """One line of a markdown table."""
    return "| " + " | ".join(cells) + " |"


def parser(description: str, batches: Sequence[int], path: str) -> argparse.ArgumentParser:
    """The arguments that all have."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--models", nargs="+", default=MODELS)
    arguments.add_argument("--batches", nargs="+", type=int, default=batches)
    arguments.add_argument("--check", choices=["first", "only", "skip"], default="first")
    arguments.add_argument("--csv", type=Path, default=Path(path))
    return arguments


def run(table: Table, cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Check every case and time it, as `--check` says."""
    if options.check != "skip":
        for case in cases:
            plan = table.plan(*case)
            require_correct(plan.layers[0], plan, options.batches)
            print(f"{case}, batches {options.batches}: right", flush=True)
    if options.check != "only":
        measure(table, cases, options.batches, options.csv)


def measure(table: Table, cases: Sequence[Case], batches: Sequence[int], path: Path) -> None:
    """Time all cases between two measurements of the ceilings; print the table, write the CSV.

    Rows go to stderr as they come, as fractions of the first ceilings.
    """
    ceilings, results = measure_ceilings(torch.device("cuda")), {}
    for case in cases:
        try:
            results[case] = time_layer(table.plan(*case), batches, ceilings)
        except Exception:
            traceback.print_exc()
            continue
        for batch, phases in by_batch(results[case]).items():
            print(table.row(case, batch, phases), file=sys.stderr, flush=True)
    ceilings = ceilings.best(measure_ceilings(torch.device("cuda")))
    print(environment(), ceilings)
    print(table.header())
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*table.names, *Timing.__dataclass_fields__])
        writer.writeheader()
        for case, timings in results.items():
            final = against(timings, ceilings)
            writer.writerows({**dict(zip(table.names, case, strict=True)), **asdict(timing)} for timing in final)
            for batch, phases in by_batch(final).items():
                print(table.row(case, batch, phases))
