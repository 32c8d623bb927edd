"""Drift as a table, a CSV file and a plot."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replayssm.drift.laboratory import Result
from replayssm.drift.variants import Variant

_COLORS = {"fp32": "0.5", "fp16": "C5", "bf16": "C0", "int8": "C2", "fp8": "C1", "nvfp4": "C3", "none": "0.5"}


def table(results: Sequence[Result]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and one row a variant: KL at every mark; at the last, agreement and the worst layer's errors."""
    places = [_short(d.tokens) for d in results[0].drifts]
    rows = [
        (
            result.variant,
            *(f"{d.kl:.1e}" for d in result.drifts),
            f"{100 * result.drifts[-1].agreement:.2f}",
            f"{max(result.drifts[-1].output_errors):.1e}",
            f"{max(result.drifts[-1].state_errors):.1e}",
        )
        for result in results
    ]
    return ("KL at", *places, "same %", "output", "state"), rows


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """Every number, one line a result, mark and layer-independent quantity; layers as separate columns."""
    layers = max(len(d.output_errors) for result in results for d in result.drifts)
    names = [f"{what} {i}" for what in ("output error", "state error") for i in range(layers)]
    quantiles = ["dlogp 50%", "dlogp 90%", "dlogp 99%", "dlogp max"]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        head = [
            "model",
            "dtype",
            "device",
            "variant",
            "tokens",
            "kl",
            "kl 99%",
            "agreement",
            *quantiles,
            "bits",
            *names,
        ]
        writer.writerow(head)
        for r in results:
            for d in r.drifts:
                padding = [""] * (layers - len(d.output_errors))
                errors = [*d.output_errors, *padding, *d.state_errors, *padding]
                values = [d.tokens, d.kl, d.kl_99, d.agreement, *d.log_prob, d.bits, *errors]
                writer.writerow([r.model, r.dtype, r.device, r.variant, *values])


def draw(path: Path, results: Sequence[Result]) -> None:
    """KL against the number of tokens, a panel a model and a line a variant."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(result.model for result in results))
    figure = Figure(figsize=(4.2 * len(models) + 2.2, 4.6), layout="constrained")
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for panel, model in zip(panels, models, strict=True):
        for result in (r for r in results if r.model == model):
            panel.plot(
                [d.tokens for d in result.drifts],
                [max(d.kl, 1e-15) for d in result.drifts],
                **_style(result.variant),
            )
        panel.set(xscale="log", yscale="log", xlabel="tokens", title=model)
        panel.set_xticks([d.tokens for d in results[0].drifts], [_short(d.tokens) for d in results[0].drifts])
        panel.minorticks_off()
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("KL(fp32 ordinary decoding || run), nats a token")
    lines = {line.get_label(): line for panel in panels for line in panel.get_lines()}
    names = [name for name in dict.fromkeys(result.variant for result in results) if name in lines]
    figure.legend([lines[name] for name in names], names, loc="outside right center", frameon=False)
    figure.savefig(path, dpi=110)


def _style(text: str) -> dict[str, Any]:
    """A colour a format; read copies solid, checkpoints dashed, dash-dotted if stochastic, dotted if once a token."""
    variant = Variant.parse(text)
    is_read = variant.read != "none"
    color = _COLORS[(variant.read.split("+")[0] if is_read else variant.checkpoint)]
    written = ":" if variant.buffer_len == 1 else "-." if variant.option == "stochastic" else "--"
    width = 1.0 if variant.buffer_len in (1, 16) else 2.2
    return {
        "label": text,
        "color": color,
        "linestyle": "-" if is_read else written,
        "linewidth": 1.3 * width,
        "marker": "o",
        "markersize": 3,
    }


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)
