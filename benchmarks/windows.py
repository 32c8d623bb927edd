"""Window steps of the presets' layers beside one-token steps: a markdown table for docs/measurements.md, and CSV.

    python benchmarks/windows.py --csv windows.csv [--read nvfp4] [--tokens 4 6] [--models qwen3.5-4b ...]

Checks each layer first; a layer that fails its check is not timed. `--check only` and `--check skip` divide the two,
so that many layers can be checked (and compiled) side by side before one process times them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from layer_tables import Table, parser, run

from replayssm import Plan, preset
from replayssm.bench.decode import Timing

BATCHES = (1, 8, 64, 256)
HEADS = ("1 token, half us", "mixed us", "window, half us", "mixed us", "limit", "over one token")


def make_plan(model: str, read: str, checkpoint: str, tokens: int) -> Plan:
    """The first layer of the model, verifying windows."""
    layers = preset(model)[:1]
    return Plan(layers, num_draft_tokens=tokens - 1, read=read, checkpoint=checkpoint, device="cuda")


def cells(phases: dict[str, Timing]) -> Iterator[str]:
    """Times of one token and of a window, the mixed window's fraction of the read ceiling, and the ratio of both."""
    token, half, window = phases["token_mixed"], phases["window_half"], phases["window_mixed"]
    yield f"{phases['token_half'].us:.1f}"
    yield f"{token.us:.1f} ({token.read_fraction:.2f})"
    yield f"{half.us:.1f} ({half.read_fraction:.2f})"
    yield f"{window.us:.1f} (**{window.read_fraction:.2f}**)"
    yield f"{window.us * window.read_fraction:.1f}"
    yield f"{window.us / token.us:.2f}x"


def main() -> None:
    arguments = parser(__doc__.splitlines()[0], BATCHES, "windows.csv")
    arguments.add_argument("--read", nargs="+", default=["none"], help="formats of the read copy")
    arguments.add_argument("--checkpoints", nargs="+", default=["fp32"])
    arguments.add_argument("--tokens", nargs="+", type=int, default=[4])
    options = arguments.parse_args()
    cases = list(product(options.models, options.read, options.checkpoints, options.tokens))
    run(Table(("model", "read", "checkpoint", "tokens"), make_plan, HEADS, cells), cases, options)


if __name__ == "__main__":
    main()
