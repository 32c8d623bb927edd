"""`replayssm drift`: how far low-precision reads and checkpoints move a model's predictions over a long text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replayssm.cli.check import pick_device
from replayssm.cli.output import CsvFile, JsonFlag, PlotFile, TextFile, console, print_json, print_table

if TYPE_CHECKING:
    import torch

    from replayssm.drift.laboratory import Result, ResultFile
    from replayssm.drift.variants import Variant


def command(
    model: Annotated[str, typer.Argument(help="gdn, kda, mamba2 (the miniatures), or a local Hugging Face folder.")],
    length: Annotated[int, typer.Option(help="Tokens of the text; a multiple of 1024.")] = 16384,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="READ/CHECKPOINT, then @N for a buffer_len or @token for ordinary decoding; repeatable."),
    ] = None,
    text: TextFile = None,
    dtype: Annotated[str, typer.Option(help="Of weights and activations: fp32 or bf16.")] = "fp32",
    device: Annotated[str, typer.Option(help="cuda or cpu; default: a GPU if there is one.")] = "",
    jobs: Annotated[int, typer.Option(help="Variants that run at once.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Keep results here (JSON lines), and skip those it holds.")] = None,
    csv_path: CsvFile = None,
    plot: PlotFile = None,
    json: JsonFlag = False,
) -> None:
    """Compare with fp32 ordinary decoding at 1K, 4K, 16K ... tokens of a given text."""
    from replayssm.checks import check_choice, check_int
    from replayssm.drift.laboratory import ResultFile
    from replayssm.drift.report import draw, table, write_csv
    from replayssm.drift.variants import DEFAULTS, Variant
    from replayssm.env import require

    check_int("length", length, 1024)
    check_int("jobs", jobs, 1, 64)
    check_choice("dtype", dtype, ("fp32", "bf16"))
    variants = [Variant.parse(name) for name in variant or DEFAULTS]
    where = pick_device(device)
    require("transformers", "transformers")
    results = _measure(model, length, text, dtype, where, variants, ResultFile(out), jobs)
    if csv_path is not None:
        write_csv(csv_path, results)
    if plot is not None:
        draw(plot, results)
    if json:
        print_json({"results": [asdict(result) for result in results]})
    else:
        headings, rows = table(results)
        print_table(f"{model}, {dtype}: nats a token against ordinary decoding with an fp32 state", rows, headings)


def _measure(
    name: str,
    length: int,
    text: Path | None,
    dtype: str,
    device: torch.device,
    variants: list[Variant],
    results: ResultFile,
    jobs: int,
) -> list[Result]:
    import torch
    from rich.progress import Progress, TimeElapsedColumn

    from replayssm.drift.laboratory import measure
    from replayssm.drift.models import load, text_tokens
    from replayssm.hf_config import layer_specs

    tokens = text_tokens(name, length, text)
    model = load(name, device, torch.bfloat16 if dtype == "bf16" else torch.float32)
    layers = len(layer_specs(model.config))
    terminal = console(stderr=True)
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        bars: dict[str, Any] = {}

        def on_tokens(variant: str, count: int) -> None:
            if variant not in bars:
                bars[variant] = progress.add_task(variant, total=length * layers)
            progress.advance(bars[variant], count)

        return measure(name, model, tokens, variants, results, jobs=jobs, on_tokens=on_tokens)
