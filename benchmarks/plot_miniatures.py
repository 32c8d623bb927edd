"""How the miniatures learnt and what they remember, from their records.

python benchmarks/plot_miniatures.py --out docs/images/miniatures.png
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1] / "miniatures"
TITLES = {"mamba2": "Mamba-2", "gdn": "GDN", "kda": "KDA"}


def curve(name: str) -> tuple[list[float], list[float]]:
    """Megabytes read and bits per byte of the training text, of all runs one after the other."""
    read, bits, before = [], [], 0.0
    for path in sorted((ROOT / name).glob("loss-*.csv")):
        rows = list(csv.DictReader(path.open()))
        read += [before + int(row["step"]) * 8 * 4096 / 1e6 for row in rows]
        bits += [float(row["bits"]) for row in rows]
        before = read[-1]
    return read, bits


def draw(records: dict[str, Any]) -> Figure:
    """Loss, what context is worth, and half-lives."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    loss, context, lives = figure.subplots(1, 3)
    for name, record in records.items():
        evidence = record["evidence"]
        loss.plot(*curve(name), label=TITLES[name], linewidth=1)
        bits = {int(length): value for length, value in evidence["bits_per_byte_by_context"].items()}
        context.plot(list(bits), [value - bits[128] for value in bits.values()], marker="o", markersize=3)
        values = sorted(life for layer in evidence["half_lives"].values() for life in layer)
        lives.plot(values, [(i + 1) / len(values) for i in range(len(values))])
    loss.set(xlabel="megabytes read", ylabel="bits per byte (training)", ylim=(0.9, 3.5), title="training")
    loss.legend(frameon=False)
    context.axvline(128, color="0.7", linestyle=":")
    context.set(xscale="log", xlabel="bytes of context", title="held-out bits per byte (0: at 128)")
    lives.set(
        xscale="log", xlabel="half-life, tokens", ylabel="share of heads (KDA: channels)", title="decays, measured"
    )
    for panel in (loss, context, lives):
        panel.grid(alpha=0.25)
    return figure


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/images/miniatures.png"))
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    records = {name: json.loads((ROOT / name / "training.json").read_text()) for name in TITLES}
    draw(records).savefig(arguments.out, dpi=90)


if __name__ == "__main__":
    main()
