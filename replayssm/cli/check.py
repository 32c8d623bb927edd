"""`replayssm check`: correctness on this device, with its driver, and for a model's own shapes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from replayssm.cli.output import JsonFlag, console, print_json, print_table
from replayssm.cli.plan import model_layers

if TYPE_CHECKING:
    import torch

    from replayssm.check import CheckResult
    from replayssm.check_cases import CheckCase
    from replayssm.config import LayerSpec

GPU_BATCHES = (1, 3, 40, 160)  # one for each way in which kernels are launched


def command(
    model: Annotated[
        str | None, typer.Argument(help="A preset, config.json or folder; default: common shapes.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu; default: a GPU if there is one.")] = "",
    batch: Annotated[list[int] | None, typer.Option(help="Requests decoded together; may be repeated.")] = None,
    read: Annotated[list[str] | None, typer.Option(help="Only this read format; may be repeated.")] = None,
    json: JsonFlag = False,
) -> None:
    """Compare outputs and states of every family, dtype and mode with float64; exit code 1 if anything disagrees."""
    import torch

    from replayssm.check import run_check
    from replayssm.check_cases import FORMATS, MODES, SHAPES, check_cases, shrink
    from replayssm.checks import check_choice, check_int
    from replayssm.formats import READ_FORMATS

    where = pick_device(device)
    shapes = SHAPES if model is None else tuple(dict.fromkeys(shrink(spec) for spec in _distinct(model)))
    batches = batch or (GPU_BATCHES if where.type == "cuda" else (3,))
    for rows in batches:
        check_int("batch", rows, 1)
    for name in read or ():
        check_choice("read", name, READ_FORMATS)
    formats = [formats for formats in FORMATS if read is None or formats[2] in read]
    wanted = check_cases(shapes, tuple(MODES), batches, formats=formats)
    cases = [case for case in wanted if case.runs_on(where)]
    out, results = console(stderr=True), []
    with out.status("checking") as status:
        for i, case in enumerate(cases):
            status.update(f"{i + 1} of {len(cases)}: {_name(case)}")
            results.append(run_check(case, where))
    failed = [result for result in results if not result.passed]
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU"
    if json:
        report = {"device": name, "passed": not failed, "not_here": len(wanted) - len(cases)}
        print_json({**report, "results": [_row(result) for result in results]})
    else:
        _show(name, results, len(wanted) - len(cases))
    raise typer.Exit(1 if failed else 0)


def pick_device(device: str) -> torch.device:
    """The device by name, or the best one here; raises if it is not there."""
    import torch

    from replayssm.plan_checks import present_device

    return present_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _distinct(model: str) -> list[LayerSpec]:
    from dataclasses import replace

    return [replace(spec, layer_idx=0) for spec in model_layers(model)]


def _name(case: CheckCase) -> str:
    shape = "x".join(map(str, case.spec.state_shape))
    rounding = " (stochastic rounding)" if case.rounding == "stochastic" else ""
    formats = f"{case.activation} inputs, {case.checkpoint} checkpoint{rounding}, read copy {case.read}"
    return f"{case.spec.family} {shape}, {formats}, {case.mode}"


def _formats(case: CheckCase) -> str:
    random = "*" if case.rounding == "stochastic" else ""
    return f"{case.activation}/{case.checkpoint}{random}" + ("" if case.read == "none" else f"/{case.read}")


def _row(result: CheckResult) -> dict[str, object]:
    values = {key: value for key, value in asdict(result).items() if key != "case"}
    case = result.case
    return {
        "family": case.spec.family,
        "state_shape": case.spec.state_shape,
        "activation": case.activation,
        "checkpoint": case.checkpoint,
        "read": case.read,
        "rounding": case.rounding,
        "mode": case.mode,
        "batch": case.rows,
        **values,
    }


def _show(device: str, results: list[CheckResult], not_here: int) -> None:
    by_layer: dict[str, list[tuple[str, ...]]] = {}
    for r in results:
        row = (
            _formats(r.case),
            str(r.case.rows),
            f"{r.output_error:.1e}",
            f"{r.stepwise_output_error:.1e}",
            f"{r.state_error:.1e}",
            f"{r.stepwise_state_error:.1e}",
            "equal" if r.bit_equal else "-",
            "" if r.case.read == "none" else "exact" if r.copies_exact else "WRONG",
            "pass" if r.passed else "FAIL",
        )
        layer = f"{r.case.spec.family} {'x'.join(map(str, r.case.spec.state_shape))}, {r.case.mode}"
        by_layer.setdefault(layer, []).append(row)
    typer.echo(f"{device}: relative errors against float64 from the same bytes; in brackets ordinary decoding's own")
    typer.echo("formats: inputs, checkpoint (*: stochastic rounding), read copy")
    heads = ("formats", "rows", "output", "(own)", "state", "(own)", "bits", "copy", "")
    for layer, rows in by_layer.items():
        print_table(layer, rows, heads)
    passed = sum(r.passed for r in results)
    left_out = f"; {not_here} more have formats that this device has no kernels for" if not_here else ""
    typer.echo(f"{passed} passed, {len(results) - passed} failed{left_out}")
