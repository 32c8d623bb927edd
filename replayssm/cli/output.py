"""Tables, units and JSON shared by the commands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


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
    out.print(table)


def human_bytes(count: float) -> str:
    """`count` in binary units with three significant digits: 50331648 -> '48.0 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}" if count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
