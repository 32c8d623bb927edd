"""`replayssm bench`: decode steps of a model's layers on this GPU, beside its ceilings and the byte limit."""

from __future__ import annotations

import csv
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replayssm.cli.output import CsvFile, JsonFlag, PlotFile, console, print_json, print_table
from replayssm.cli.plan import model_layers

if TYPE_CHECKING:
    from replayssm.bench.decode import Timing
    from replayssm.bench.timing import Ceilings
    from replayssm.config import LayerSpec
    from replayssm.plan import Plan

BATCHES = (1, 8, 32, 128, 256)
DECODE_HEADS = ("batch", "stepwise", "cycle", "lockstep", "flush", "gain", "GB/s", "of read", "flush")
WINDOW_HEADS = (
    *("batch", "token, half", "token, mixed", "window, half", "window, mixed"),
    *("to token", "byte limit", "GB/s", "of read"),
)


def command(
    model: Annotated[str, typer.Argument(help="A preset, config.json or folder.")] = "qwen3.5-4b",
    batch: Annotated[list[int] | None, typer.Option(help="Requests decoded together; may be repeated.")] = None,
    buffer_len: Annotated[int, typer.Option(help="Committed rows a slot may hold before it flushes.")] = 16,
    drafts: Annotated[int, typer.Option(help="Draft tokens a step: times windows of one more token.")] = 0,
    checkpoint: Annotated[str, typer.Option(help="Format of the checkpoint.")] = "fp32",
    read: Annotated[str, typer.Option(help="Format of the read copy.")] = "none",
    replay: Annotated[str, typer.Option(help="How flushes run the ring: auto, serial or chunk.")] = "auto",
    tp: Annotated[int, typer.Option(help="Tensor-parallel size: the times are those of one rank.")] = 1,
    csv_path: CsvFile = None,
    plot: PlotFile = None,
    json: JsonFlag = False,
) -> None:
    """Time ordinary decoding, whole flush cycles and flushes of one layer, or windows, after checking that layer."""
    import torch

    from replayssm.checks import ReplayError, check_int
    from replayssm.plan import Plan

    if not torch.cuda.is_available():
        raise ReplayError("device is 'cpu'; allowed for bench: a CUDA device (none was found here)")
    batches = [check_int("batch", b, 1) for b in batch or BATCHES]
    spec = next(iter(dict.fromkeys(layer.shard(tp) for layer in model_layers(model))))
    plan = Plan(
        (spec,),
        buffer_len=buffer_len,
        num_draft_tokens=drafts,
        checkpoint=checkpoint,
        read=read,
        replay=replay,
        device="cuda",
    )
    plan.check_runnable()
    ceilings, timings = _measure(spec, plan, batches)
    if csv_path is not None:
        _write_csv(csv_path, model, timings)
    if plot is not None:
        _draw(plot, model, timings)
    if json:
        print_json({"model": model, **environment(), **asdict(ceilings), "timings": [asdict(t) for t in timings]})
    else:
        _show(model, plan, ceilings, timings)


def _measure(spec: LayerSpec, plan: Plan, batches: list[int]) -> tuple[Ceilings, list[Timing]]:
    import torch

    from replayssm.bench.measure import against, time_layer
    from replayssm.bench.timing import measure_ceilings

    with console(stderr=True).status("checking") as status:
        require_correct(spec, plan, batches)
        status.update("measuring the ceilings")
        before = measure_ceilings(torch.device("cuda"))
        timings = time_layer(plan, batches, before, lambda b: status.update(f"batch {b}"))
        status.update("measuring the ceilings again")
        ceilings = before.best(measure_ceilings(torch.device("cuda")))
    return ceilings, against(timings, ceilings)


def require_correct(spec: LayerSpec, plan: Plan, batches: list[int]) -> None:
    """A number without a passing check is not a number."""
    from dataclasses import replace

    import torch

    from replayssm.check import run_check
    from replayssm.check_cases import check_cases, shrink
    from replayssm.checks import ReplayError

    mode = "verify" if plan.num_draft_tokens else "decode"
    formats = [("bf16", plan.checkpoint, plan.read_format(spec.layer_idx), plan.rounding)]
    for case in check_cases([shrink(replace(spec, layer_idx=0))], [mode], batches, formats=formats):
        result = run_check(replace(case, drafts=plan.num_draft_tokens, replay=plan.replay), torch.device("cuda"))
        if not result.passed:
            raise ReplayError(f"check failed: {result}; see `replayssm check`")


def environment() -> dict[str, str]:
    """The device and versions that a number belongs to."""
    import torch

    from replayssm.env import package_version

    versions = {name: package_version(name) or "none" for name in ("replayssm", "torch", "triton")}
    return {"gpu": torch.cuda.get_device_name(), **versions}


def _show(model: str, plan: Plan, ceilings: Ceilings, timings: list[Timing]) -> None:
    from replayssm.bench.measure import by_batch

    spec, where = plan.layers[0], environment()
    table = by_batch(timings).items()
    title = (
        f"{model}, one {spec.family} layer with state {'x'.join(map(str, spec.state_shape))}, on {where['gpu']} "
        f"(torch {where['torch']}, triton {where['triton']})\n"
        f"ceilings: read {ceilings.read_gbps:.0f} GB/s, update {ceilings.update_gbps:.0f} GB/s; times in microseconds"
    )
    if plan.num_draft_tokens:
        print_table(title, [_window_row(batch, phases) for batch, phases in table], WINDOW_HEADS)
        typer.echo(f"windows of {plan.max_window_len} tokens; half: half the ring committed, no flush; mixed: rows at")
        typer.echo("random positions, a fifth of them flushing; of read: useful bytes of mixed against the ceiling.")
        return
    print_table(title, [_decode_row(batch, phases) for batch, phases in table], DECODE_HEADS)
    typer.echo("cycle: mean step of a whole window with flushes spread over the rows; lockstep: all rows together.")
    typer.echo("of read: useful bytes of a cycle against the read ceiling; flush (last): against the update ceiling.")


def _decode_row(batch: int, phases: dict[str, Timing]) -> tuple[str, ...]:
    stepwise, cycle, flush = phases["stepwise"], phases["cycle"], phases["flush"]
    times = (stepwise, cycle, phases["cycle_lockstep"], flush)
    gain, fractions = stepwise.us / cycle.us, (cycle.read_fraction, flush.update_fraction)
    return (
        *(str(batch), *(f"{t.us:.1f}" for t in times)),
        *(f"{gain:.2f}x", f"{cycle.gbps:.0f}", *(f"{f:.2f}" for f in fractions)),
    )


def _window_row(batch: int, phases: dict[str, Timing]) -> tuple[str, ...]:
    mixed, token = phases["window_mixed"], phases["token_mixed"]
    times = (phases["token_half"], token, phases["window_half"], mixed)
    limit = mixed.us * mixed.read_fraction
    return (
        *(str(batch), *(f"{t.us:.1f}" for t in times)),
        *(f"{mixed.us / token.us:.2f}x", f"{limit:.1f}", f"{mixed.gbps:.0f}", f"{mixed.read_fraction:.2f}"),
    )


def _write_csv(path: Path, model: str, timings: list[Timing]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["model", *asdict(timings[0])])
        writer.writeheader()
        writer.writerows({"model": model, **asdict(timing)} for timing in timings)


def _draw(path: Path, model: str, timings: list[Timing]) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6, 4), layout="constrained")).subplots()
    for phase in dict.fromkeys(timing.phase for timing in timings):
        points = [(t.batch, t.us / t.batch) for t in timings if t.phase == phase]
        axes.plot(*zip(*points, strict=True), marker="o", label=phase.replace("_", ", "))
    axes.set(xscale="log", yscale="log", xlabel="batch", ylabel="microseconds a row", title=model)
    axes.legend()
    figure.savefig(path, dpi=150)
