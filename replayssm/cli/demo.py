"""`replayssm demo`: three small hybrid models generate with the plain cache and with ReplaySSM."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from replayssm.cli.output import JsonFlag, console, human_bytes, print_json

if TYPE_CHECKING:
    import torch

    from replayssm.cli.demo_run import Comparison


def command(
    tokens: Annotated[int, typer.Option(help="Bytes of text that each model generates.")] = 240,
    buffer_len: Annotated[int, typer.Option(help="Committed rows a slot may hold before it flushes.")] = 16,
    json: JsonFlag = False,
) -> None:
    """Generate with three small models, plain and replayed, and compare."""
    import torch

    from replayssm.checks import check_int
    from replayssm.cli.demo_run import PROMPT
    from replayssm.env import require
    from replayssm.plan import MAX_BUFFER_LEN

    check_int("tokens", tokens, 1, 2048)
    check_int("buffer_len", buffer_len, 1, MAX_BUFFER_LEN)
    require("transformers", "transformers")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # The models' tensors are tiny: a second thread would only wait for the first.
    torch.set_num_threads(1)
    if not json:
        console().print(f"Three small hybrid models over bytes, trained on Python sources; fp32, on {_name(device)}.")
        console().print("They go on from this prompt, with the plain cache and with ReplaySSM:\n")
        console().print(_indented(PROMPT), style="dim", soft_wrap=True)
    results = _compare_all(device, tokens, buffer_len, show=not json)
    agree = all(result.agrees for result in results)
    if json:
        print_json({"device": str(device), "agree": agree, "models": [result.as_dict() for result in results]})
    else:
        console().print("\nAll models agree." if agree else "\nDISAGREEMENT: see above.")
    if not agree:
        raise typer.Exit(1)


def _compare_all(device: torch.device, tokens: int, buffer_len: int, *, show: bool) -> list[Comparison]:
    from rich.progress import Progress

    from replayssm.cli.demo_run import TITLES, compare

    results = []
    terminal = console(stderr=True)
    for family, title in TITLES.items():
        with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
            advance = partial(progress.advance, progress.add_task(title, total=2 * tokens))
            results.append(compare(family, device, tokens, buffer_len, on_token=advance))
        if show:
            _show(results[-1])
    return results


def _show(result: Comparison) -> None:
    out = console()
    out.print(f"\n{result.title}", style="bold")
    out.print(_indented(result.replay_text), soft_wrap=True)
    same = "the same both ways" if result.plain_text == result.replay_text else "DIFFERENT"
    if result.plain_text != result.replay_text:
        out.print("  with the plain cache:")
        out.print(_indented(result.plain_text), soft_wrap=True)
    out.print(f"  text       {same}; logits differ by at most {result.logit_error:.1e} (allowed {result.allowed:.1e})")
    stepwise, replay = human_bytes(result.stepwise_bytes), human_bytes(result.replay_bytes)
    out.print(f"  traffic    {stepwise} a token plain, {replay} ReplaySSM: {result.traffic_ratio:.2f}x less (counted)")
    for layer in result.layers:
        error = f"max relative error {layer.error:.1e} (allowed {layer.allowed:.1e})"
        verdict = "bit-equal" if layer.bit_equal else error
        out.print(f"  state      layer {layer.layer_idx}: {verdict}" + ("" if layer.agrees else "  FAILED"))
    out.print(f"  flushes    {result.flushes} in {result.tokens} tokens; {result.seconds:.1f} s", style="dim")


def _indented(text: str) -> str:
    return "\n".join(f"    | {line}" for line in text.rstrip("\n").split("\n"))


def _name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
