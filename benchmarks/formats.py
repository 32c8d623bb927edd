"""Whole flush cycles with read copies and low-precision checkpoints: a markdown table, and all numbers as CSV.

    python benchmarks/formats.py --csv formats.csv [--models qwen3.5-4b ...] [--batches 8 128 ...]
        [--formats none/fp32 nvfp4/fp16 ...] [--tokens 4]

Every pair is read copy / checkpoint. A gain is the time of ordinary decoding with an fp32 state over that of a cycle,
at the same batch in the same run; with `--tokens` windows of so many are timed too, beside those of an fp32 checkpoint.
Checks each layer first; a layer that fails its check is not timed (`--check only` and `--check skip` divide the two).
"""

from __future__ import annotations

import csv
import traceback
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from layer_tables import line, parser

from replayssm import Plan, ReplayError, preset
from replayssm.bench.decode import LayerBench, Timing
from replayssm.bench.timing import Ceilings, measure_ceilings
from replayssm.bench.windows import WindowBench
from replayssm.cli.bench import environment, require_correct

BATCHES = (1, 8, 128, 256, 512)
PLAIN = "none/fp32"
FORMATS = (
    *(PLAIN, "bf16/fp32", "int8/fp32", "fp8/fp32", "nvfp4/fp32"),
    *("int8/fp16", "nvfp4/fp16", "int8/fp8", "nvfp4/fp8", "none/fp16", "none/fp8"),
)
Timings = dict[tuple[str, str, int], dict[str, Timing]]  # model, formats, batch -> phase -> timing


def make_plan(model: str, formats: str, tokens: int) -> Plan:
    """The first layer of the model."""
    read, checkpoint = formats.split("/")
    return Plan(preset(model)[:1], read=read, checkpoint=checkpoint, num_draft_tokens=tokens - 1, device="cuda")


def time_phases(plan: Plan, formats: str, batch: int, ceilings: Ceilings) -> dict[str, Timing]:
    """A cycle and a flush; for fp32 alone ordinary decoding too; with drafts a window step."""
    bench = WindowBench(plan, batch) if plan.num_draft_tokens else LayerBench(plan, batch)
    phases = ["cycle", "flush", *(["stepwise"] if formats == PLAIN else [])]
    phases += ["window_mixed"] if plan.num_draft_tokens else []
    timings = {phase: bench.time(phase, ceilings) for phase in phases}
    del bench
    torch.cuda.empty_cache()
    return timings


def table_row(key: tuple[str, str, int], timings: Timings, plan: Plan) -> str:
    """Times, gains over fp32, bytes of a request against those of fp32 states."""
    model, formats, batch = key
    mine, fp32 = timings[key], timings[model, PLAIN, batch]
    cycle, window = mine["cycle"], mine.get("window_mixed")
    state = plan.with_options(checkpoint="fp32", read="none").state_bytes_per_request
    cells = [
        *(model, formats, str(batch)),
        f"{cycle.us:.1f} ({cycle.read_fraction:.2f})",
        f"{fp32['stepwise'].us / cycle.us:.2f}x",
        f"{fp32['cycle'].us / cycle.us:.2f}x",
        f"{mine['flush'].us:.1f}",
        f"{plan.memory_per_request / state:.2f}",
        *([f"{window.us:.1f}", f"{window.us / fp32['window_mixed'].us:.2f}"] if window else []),
    ]
    return line(cells)


def cases(options: Any) -> dict[tuple[str, str], Plan]:
    """The plans that this device has kernels for; says which it has not."""
    plans = {}
    for model, formats in product(options.models, dict.fromkeys([PLAIN, *options.formats])):
        plan = make_plan(model, formats, options.tokens)
        try:
            plan.check_runnable()
        except ReplayError as error:
            print(f"{model}, {formats}: {error}")
            continue
        plans[model, formats] = plan
    return plans


def main() -> None:
    arguments = parser(__doc__.splitlines()[0], BATCHES, "formats.csv")
    arguments.add_argument("--formats", nargs="+", default=FORMATS)
    arguments.add_argument("--tokens", type=int, default=1)
    options = arguments.parse_args()
    plans = cases(options)
    if options.check != "skip":
        for (model, formats), plan in list(plans.items()):
            try:
                require_correct(plan.layers[0], plan, options.batches)
                print(f"{model}, {formats}: right", flush=True)
            except ReplayError as error:
                print(f"{model}, {formats}: {error}", flush=True)
                del plans[model, formats]
    if options.check != "only":
        measure(plans, options.batches, options.csv)


def measure(plans: dict[tuple[str, str], Plan], batches: list[int], path: Path) -> None:
    """Time all plans; print the table, write the CSV."""
    ceilings = measure_ceilings(torch.device("cuda"))
    print(environment(), ceilings)
    timings: Timings = {}
    for ((model, formats), plan), batch in product(plans.items(), batches):
        try:
            timings[model, formats, batch] = time_phases(plan, formats, batch, ceilings)
        except Exception:
            traceback.print_exc()
    print("| layer of | read / checkpoint | batch | cycle us (of read) | gain | over fp32 cycle | flush us | memory |")
    print("|---|---|---|---|---|---|---|---|")
    for key in timings:
        if (key[0], PLAIN, key[2]) in timings:
            print(table_row(key, timings, plans[key[:2]]))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["model", "formats", *Timing.__dataclass_fields__])
        writer.writeheader()
        for (model, formats, _), phases in timings.items():
            writer.writerows({"model": model, "formats": formats, **asdict(timing)} for timing in phases.values())


if __name__ == "__main__":
    main()
