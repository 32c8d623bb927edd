"""One-token decode steps of the presets' layers: a markdown table for docs/measurements.md and all numbers as CSV.

    python benchmarks/decode.py --csv decode.csv [--models qwen3.5-4b ...] [--batches 1 8 ...] [--checkpoints fp32 bf16]
        [--reads none int8 ...]

Checks each layer first; a layer that fails its check is not timed. `--check only` and `--check skip` divide the two,
so that many layers can be checked (and compiled) side by side before one process times them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from layer_tables import Table, parser, run

from replayssm import Plan, preset
from replayssm.bench.decode import Timing

BATCHES = (1, 8, 32, 128, 256, 512)
HEADS = ("stepwise us", "cycle us", "gain", "lockstep us", "8 rows us", "flush us")


def make_plan(model: str, checkpoint: str, read: str) -> Plan:
    """The first layer of the model."""
    return Plan(preset(model)[:1], checkpoint=checkpoint, read=read, device="cuda")


def cells(phases: dict[str, Timing]) -> Iterator[str]:
    """Stepwise and flush times with fractions of the update ceiling, the others with fractions of the read ceiling."""
    stepwise, cycle, together = phases["stepwise"], phases["cycle"], phases["cycle_lockstep"]
    middle, flush = phases["middle"], phases["flush"]
    yield f"{stepwise.us:.1f} ({stepwise.update_fraction:.2f})"
    yield f"{cycle.us:.1f} (**{cycle.read_fraction:.2f}**)"
    yield f"{stepwise.us / cycle.us:.2f}x"
    yield f"{together.us:.1f} (**{together.read_fraction:.2f}**)"
    yield f"{middle.us:.1f} ({middle.read_fraction:.2f})"
    yield f"{flush.us:.1f} ({flush.update_fraction:.2f})"


def main() -> None:
    arguments = parser(__doc__.splitlines()[0], BATCHES, "decode.csv")
    arguments.add_argument("--checkpoints", nargs="+", default=["fp32", "bf16"])
    arguments.add_argument("--reads", nargs="+", default=["none"])
    options = arguments.parse_args()
    cases = list(product(options.models, options.checkpoints, options.reads))
    run(Table(("model", "checkpoint", "read"), make_plan, HEADS, cells), cases, options)


if __name__ == "__main__":
    main()
