"""`replayssm check`: correctness on this device, with its driver, and for a model's own shapes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from replayssm.cli.output import JsonFlag, console, print_json, print_table
from replayssm.cli.plan import model_layers

if TYPE_CHECKING:
    import torch

    from replayssm.check import CheckCase, CheckResult
    from replayssm.config import LayerSpec

GPU_BATCHES = (1, 3, 40, 160)  # one for each way in which kernels are launched


def command(
    model: Annotated[
        str | None, typer.Argument(help="A preset, config.json or folder; default: common shapes.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu; default: a GPU if there is one.")] = "",
    batch: Annotated[list[int] | None, typer.Option(help="Requests decoded together; may be repeated.")] = None,
    json: JsonFlag = False,
) -> None:
    """Compare outputs and states of every family, dtype and mode with float64; exit code 1 if anything disagrees."""
    import torch

    from replayssm.check import MODES, SHAPES, check_cases, run_check, shrink
    from replayssm.checks import check_int

    where = pick_device(device)
    shapes = SHAPES if model is None else tuple(dict.fromkeys(shrink(spec) for spec in _distinct(model)))
    batches = batch or (GPU_BATCHES if where.type == "cuda" else (3,))
    for rows in batches:
        check_int("batch", rows, 1)
    cases = check_cases(shapes, tuple(MODES), batches)
    out, results = console(stderr=True), []
    with out.status("checking") as status:
        for i, case in enumerate(cases):
            status.update(f"{i + 1} of {len(cases)}: {_name(case)}")
            results.append(run_check(case, where))
    failed = [result for result in results if not result.passed]
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU"
    if json:
        print_json({"device": name, "passed": not failed, "results": [_row(result) for result in results]})
    else:
        _show(name, results)
    raise typer.Exit(1 if failed else 0)


def pick_device(device: str) -> torch.device:
    """The device by name, or the best one here; raises if it is not there."""
    import torch

    from replayssm.checks import fail

    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name.split(":")[0] not in ("cuda", "cpu"):
        raise fail("device", name, "cuda, cuda:N or cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise fail("device", name, "cpu (no CUDA device was found here)")
    return torch.device(name)


def _distinct(model: str) -> list[LayerSpec]:
    from dataclasses import replace

    return [replace(spec, layer_idx=0) for spec in model_layers(model)]


def _name(case: CheckCase) -> str:
    shape = "x".join(map(str, case.spec.state_shape))
    return f"{case.spec.family} {shape}, {case.activation} inputs, {case.checkpoint} checkpoint, {case.mode}"


def _row(result: CheckResult) -> dict[str, object]:
    values = {key: value for key, value in asdict(result).items() if key != "case"}
    case = result.case
    return {
        "family": case.spec.family,
        "state_shape": case.spec.state_shape,
        "activation": case.activation,
        "checkpoint": case.checkpoint,
        "mode": case.mode,
        "batch": case.rows,
        **values,
    }


def _show(device: str, results: list[CheckResult]) -> None:
    by_layer: dict[str, list[tuple[str, ...]]] = {}
    for r in results:
        row = (
            f"{r.case.activation}/{r.case.checkpoint}",
            r.case.mode,
            str(r.case.rows),
            f"{r.output_error:.1e}",
            f"{r.stepwise_output_error:.1e}",
            f"{r.state_error:.1e}",
            f"{r.stepwise_state_error:.1e}",
            "equal" if r.bit_equal else "-",
            "pass" if r.passed else "FAIL",
        )
        by_layer.setdefault(f"{r.case.spec.family} {'x'.join(map(str, r.case.spec.state_shape))}", []).append(row)
    typer.echo(f"{device}: relative errors against float64; in brackets ordinary decoding's own")
    heads = ("formats", "mode", "rows", "output", "(own)", "state", "(own)", "bits", "")
    for layer, rows in by_layer.items():
        print_table(layer, rows, heads)
    passed = sum(r.passed for r in results)
    typer.echo(f"{passed} passed, {len(results) - passed} failed")
