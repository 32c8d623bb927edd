"""Tables, units and JSON shared by the commands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from replayssm.env import require

PLOTS = (".pdf", ".png", ".svg")


def _output_file(path: Path | None) -> Path | None:
    """Checks the option of a file to write, before any work is done for it."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise typer.BadParameter(f"{str(path)!r} is a folder, or lies in none that is there")
    return path


def _plot_file(path: Path | None) -> Path | None:
    if path is not None and path.suffix not in PLOTS:
        raise typer.BadParameter(f"{str(path)!r} ends otherwise than in {', '.join(PLOTS)}")
    if path is not None:
        require("matplotlib", "plots")
    return _output_file(path)


JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
CsvFile = Annotated[
    Path | None, typer.Option("--csv", help="Also write the numbers to this file.", callback=_output_file)
]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", help="Also draw them to this file (needs the plots extra).", callback=_plot_file),
]
TextFile = Annotated[
    Path | None,
    typer.Option("--text", help="A text file; default: modules of the standard library.", exists=True, dir_okay=False),
]


def console(*, stderr: bool = False) -> Console:
    """A console for the current stdout or stderr; text goes out as it is, without markup."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def print_json(value: Mapping[str, object]) -> None:
    """Print `value` as one JSON object on stdout."""
    print(json.dumps(value, indent=2))


def print_table(title: str, rows: Sequence[tuple[str, ...]], columns: tuple[str, ...] | None = None) -> None:
    """Print `rows` under `title`; with headings, all columns but the first are right-aligned."""
    table = Table(box=box.SIMPLE_HEAD, show_header=columns is not None, pad_edge=False, collapse_padding=True)
    for i, heading in enumerate(columns or ("",) * len(rows[0])):
        table.add_column(heading, justify="right" if columns is not None and i else "left")
    for row in rows:
        table.add_row(*row)
    out = console()
    if title:
        out.print(title)
    # Wider than the terminal rather than with numbers cut off.
    out.width = max(out.width, out.measure(table, options=out.options.update(max_width=1000)).maximum)
    out.print(table)


def human_bytes(count: float) -> str:
    """`count` in binary units with at least three significant digits: 50331648 -> '48.0 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.{0 if unit == 'B' or count >= 100 else 1}f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
