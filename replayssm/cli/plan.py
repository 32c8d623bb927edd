"""`replayssm plan`: bytes per request and per step of a model, counted from its shapes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replayssm.cli.output import JsonFlag, human_bytes, print_json, print_table

if TYPE_CHECKING:
    from replayssm.config import LayerSpec
    from replayssm.plan import Plan


def command(
    model: Annotated[str, typer.Argument(help="A preset name, a config.json, or a folder that holds one.")],
    batch: Annotated[int, typer.Option(help="Requests decoded together.")] = 1,
    buffer_len: Annotated[int, typer.Option(help="Committed rows a slot may hold before it flushes.")] = 16,
    drafts: Annotated[int, typer.Option(help="Draft tokens per step.")] = 0,
    checkpoint: Annotated[str, typer.Option(help="Format of the checkpoint.")] = "fp32",
    read: Annotated[
        str, typer.Option(help="Format of the read copy, or what `formats --json` printed (a file).")
    ] = "none",
    replay: Annotated[str, typer.Option(help="How flushes run the ring: auto, serial or chunk.")] = "auto",
    tp: Annotated[int, typer.Option(help="Tensor-parallel size: the numbers are those of one rank.")] = 1,
    json: JsonFlag = False,
) -> None:
    """Count the bytes of a model's SSM state per request and per step."""
    import torch

    from replayssm.checks import check_int
    from replayssm.plan import Plan

    check_int("batch", batch, 1)
    layers = tuple(layer.shard(tp) for layer in model_layers(model))
    plan = Plan(
        layers=layers,
        buffer_len=buffer_len,
        num_draft_tokens=drafts,
        checkpoint=checkpoint,
        read=read_formats(read),
        replay=replay,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    if json:
        print_json({**summary(model, plan, batch), "tp": tp})
    else:
        show(model, plan, batch, tp)


def read_formats(option: str) -> str | dict[int, str]:
    """A format by name, or each layer's from a JSON file."""
    import json

    from replayssm.checks import fail

    if not option.endswith(".json"):
        return option
    try:
        return {int(idx): str(name) for idx, name in json.loads(Path(option).read_text())["read"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise fail("read", option, f"a format, or what `replayssm formats --json` printed ({error})") from error


def model_layers(model: str) -> tuple[LayerSpec, ...]:
    """The SSM layers of a preset name, a config.json or a model folder."""
    from replayssm.checks import fail
    from replayssm.hf_config import layer_specs
    from replayssm.presets import PRESETS, preset

    if model in PRESETS:
        return preset(model)
    if Path(model).exists():
        return layer_specs(model)
    raise fail("MODEL", model, f"a config.json, a folder that holds one, or one of {', '.join(PRESETS)}")


def summary(model: str, plan: Plan, batch: int) -> dict[str, object]:
    """The numbers of `plan --json`."""
    step = plan.step_bytes(batch)
    return {
        "model": model,
        "batch": batch,
        "layers": plan.family_counts,
        "state_bytes_per_request": plan.state_bytes_per_request,
        "ring_bytes_per_request": plan.ring_bytes_per_request,
        "read_copy_bytes_per_request": plan.read_copy_bytes_per_request,
        "snapshot_bytes_per_request": plan.snapshot_bytes_per_request,
        "step_bytes": {"stepwise": step.stepwise, "replay": step.replay},
        "traffic_ratio": round(plan.traffic_ratio(batch), 4),
        "buffer_len": plan.buffer_len,
        "num_draft_tokens": plan.num_draft_tokens,
        "kernels": kernels(plan, batch),
        "checkpoint": plan.checkpoint,
        "read": plan.read_name,
        "replay": sorted({plan.replay_form(spec.layer_idx) for spec in plan.layers}),
    }


def kernels(plan: Plan, batch: int) -> dict[str, str]:
    """What runs here, by layer; empty for formats that this device has no kernels for."""
    from replayssm.checks import ReplayError

    try:
        plan.check_runnable()
    except ReplayError:
        return {}
    return plan.kernels(batch)


def show(model: str, plan: Plan, batch: int, tp: int) -> None:
    """Print the same numbers as two tables."""
    snapshots = []
    if plan.num_draft_tokens:
        text = f"instead: {plan.max_window_len} states, one for each token of a window"
        snapshots = [(text, human_bytes(plan.snapshot_bytes_per_request))]
    rank = f", one of {tp} tensor-parallel ranks" if tp > 1 else ""
    print_table(
        f"{model}{rank}: {_shapes(plan.layers)}",
        [
            ("state (checkpoint, " + plan.checkpoint + ")", human_bytes(plan.state_bytes_per_request)),
            (f"ring ({plan.ring_len} rows)", human_bytes(plan.ring_bytes_per_request)),
            ("read copy (" + plan.read_name + ")", human_bytes(plan.read_copy_bytes_per_request)),
            ("all", human_bytes(plan.memory_per_request)),
            *snapshots,
        ],
        ("memory of one request", "bytes"),
    )
    step = plan.step_bytes(batch)
    print_table(
        "",
        [
            ("stepwise", human_bytes(step.stepwise), "1.00x"),
            ("replay", human_bytes(step.replay), f"{plan.traffic_ratio(batch):.2f}x less"),
        ],
        (f"SSM traffic of one step, batch {batch}", "bytes", "ratio"),
    )
    for layer, kernel in kernels(plan, batch).items():
        typer.echo(f"{layer}: {kernel}")
    typer.echo("Counted from the shapes (mean over a window, flush included), not measured.")


def _shapes(layers: tuple[LayerSpec, ...]) -> str:
    counts = Counter((layer.family, layer.state_shape) for layer in layers)
    return ", ".join(
        f"{count} {family} layers with state {'x'.join(map(str, shape))}" for (family, shape), count in counts.items()
    )
