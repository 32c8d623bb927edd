"""`replayssm formats`: which read copy each layer can do with, measured on captured states."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replayssm.cli.check import pick_device
from replayssm.cli.output import JsonFlag, TextFile, console, human_bytes, print_json, print_table

if TYPE_CHECKING:
    import torch

    from replayssm.read_errors import ReadErrors


def command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="STATES|MODEL",
            help="A safetensors file of states (IDX.state, IDX.queries), a model's folder, or gdn, kda, mamba2.",
        ),
    ],
    budget: Annotated[
        float, typer.Option(help="Relative error of a layer's reads, root mean square over layers.")
    ] = 0.03,
    checkpoint: Annotated[
        str, typer.Option(help="Format of the checkpoint, which a layer without a copy reads.")
    ] = "fp32",
    worst_head: Annotated[bool, typer.Option(help="Judge a layer by its worst head instead of the mean.")] = False,
    tokens: Annotated[int, typer.Option(help="Tokens that a model goes through.")] = 512,
    text: TextFile = None,
    device: Annotated[str, typer.Option(help="cuda or cpu; default: a GPU if there is one.")] = "",
    json: JsonFlag = False,
) -> None:
    """Propose a read format for every layer within an error budget."""
    from replayssm.env import require
    from replayssm.read_errors import ReadErrors, check_budget

    check_budget(budget, checkpoint)
    require("transformers", "transformers")  # which brings safetensors
    errors = ReadErrors()
    if source.endswith(".safetensors"):
        from replayssm.captures import add_file

        add_file(source, errors)
    else:
        _run_model(source, tokens, text, pick_device(device), errors)
    chosen = errors.propose(budget, checkpoint=checkpoint, worst_head=worst_head)
    report = summary(errors, chosen, checkpoint, worst_head)
    if json:
        print_json({"source": source, "budget": budget, **report})
    else:
        _show(errors, chosen, report, budget)


def _run_model(source: str, tokens: int, text: Path | None, device: torch.device, errors: ReadErrors) -> None:
    from replayssm.captures import WINDOW, add_model
    from replayssm.checks import check_int
    from replayssm.drift.models import load, text_tokens

    check_int("tokens", tokens, 2 * WINDOW)
    with console(stderr=True).status("loading") as status:
        model, ids = load(source, device), text_tokens(source, tokens, text)
        add_model(model, ids, errors, on_token=lambda done: status.update(f"{done} of {tokens} tokens"))


def summary(errors: ReadErrors, chosen: dict[int, str], checkpoint: str, worst_head: bool) -> dict[str, object]:
    """The numbers of `formats --json`."""
    layers, total, squares = [], 0, 0.0
    for idx, read in chosen.items():
        mine = errors.layers[idx]
        of = {name: {"mean": mine.mean(name), "worst_head": mine.worst(name)} for name in mine.squares}
        layers.append({"layer_idx": idx, "read": read, "errors": of})
        total += mine.nbytes(read, checkpoint)
        if read != "none":
            squares += of[read]["worst_head" if worst_head else "mean"] ** 2
    plain = sum(mine.nbytes("none", checkpoint) for mine in errors.layers.values())
    return {
        "read": {str(idx): read for idx, read in chosen.items()},
        "error": (squares / len(chosen)) ** 0.5,
        "read_bytes": total,
        "checkpoint_bytes": plain,
        "layers": layers,
    }


def _show(errors: ReadErrors, chosen: dict[int, str], report: dict[str, object], budget: float) -> None:
    names = list(errors.reads)
    rows = []
    for idx, read in chosen.items():
        mine = errors.layers[idx]
        cells = [f"{100 * mine.mean(n):.2f} ({100 * mine.worst(n):.2f})" if n in mine.squares else "-" for n in names]
        rows.append((f"{idx}: {'x'.join(map(str, mine.shape))}", *cells, read))
    print_table(
        "relative errors of what a layer reads, percent (in brackets its worst head)", rows, ("layer", *names, "choice")
    )
    read_bytes, plain = (report[name] for name in ("read_bytes", "checkpoint_bytes"))
    assert isinstance(read_bytes, int) and isinstance(plain, int)
    typer.echo(
        f"error {report['error']:.2%} of at most {budget:.2%}; a step reads {human_bytes(read_bytes)} of a request's"
    )
    typer.echo(
        f"states, {plain / read_bytes:.2f} times less than from the checkpoints. As an option of Plan or enable:"
    )
    typer.echo(f"read={chosen if len(set(chosen.values())) > 1 else repr(next(iter(chosen.values())))}")
