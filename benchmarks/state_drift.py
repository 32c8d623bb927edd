"""The error of a layer's state over a long text, format by format: a markdown table, JSON lines and a plot.

    python benchmarks/state_drift.py [mamba2 gdn kda] [--length N] [--device cuda] --out states.jsonl --plot states.png

A miniature's first recurrent layer gets the inputs that a text gives it, in bf16, and decodes them as the library does,
in windows of 16 tokens. The state is compared with that of stepwise decoding of the same inputs in float64.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from replayssm import LayerSpec, Mamba2Spec, Plan, ReplayCache, delta_decode, mamba2_decode
from replayssm.drift import forward
from replayssm.drift.models import MINIATURES, load, text_tokens
from replayssm.drift.scan import scan
from replayssm.drift.variants import REFERENCE, Variant
from replayssm.hf_config import layer_specs
from replayssm.ops.registry import family_ops
from replayssm.workload import op_options, positional

WINDOW = 16
MARKS = tuple(1024 * n for n in (1, 4, 16, 64, 128))
STEPWISE = ("fp32", "fp16", "bf16")
REPLAY = ("none/fp32", "bf16/fp32", "int8/fp32", "fp8/fp32", "nvfp4/fp32", "none/fp16", "none/bf16", "none/fp8")
STOCHASTIC = ("none/fp16", "none/bf16", "none/fp8")
SIMULATED = ("none/nvfp4", "none/nvfp4@token", "none/fp8@token")  # no layer of the library keeps its state so
States = dict[int, torch.Tensor]


class Captured(Exception):
    """The arguments of the first recurrent layer's function: reason to go no further."""


@dataclass(frozen=True)
class Layer:
    """A layer, its inputs over the text [T, ...] and its parameters, by the names of the family's ops."""

    spec: LayerSpec
    inputs: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]

    def windows(self, dtype: torch.dtype | None = None) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """How many tokens there are up to the end of each 16, and these tokens' arguments; all in `dtype` if given."""
        for done in range(WINDOW, len(next(iter(self.inputs.values()))) + 1, WINDOW):
            window = {name: t[done - WINDOW : done] for name, t in self.inputs.items()} | self.parameters
            yield done, window if dtype is None else {name: t.to(dtype) for name, t in window.items()}


def first_layer(name: str, length: int, device: str) -> Layer:
    """The first recurrent layer of a miniature on its held-out text."""

    def stop(*args: Any, **options: Any) -> None:
        raise Captured(args, options)

    model = load(name, device)
    with patch.object(forward, "_delta", stop), patch.object(forward, "_mamba2", stop), forward.routed(model):
        try:
            model.get_decoder()(text_tokens(name, length)[None].to(device), use_cache=False)
        except Captured as captured:
            args, options = captured.args
    spec = layer_specs(model.config)[0]
    if name == "mamba2":
        x, dt, A, B, C = args
        inputs = {"x": x[0], "dt": dt[0], "B": B[0], "C": C[0]}
        parameters = {"A": A.float(), "D": options["D"].float(), "dt_bias": options["dt_bias"].float()}
    else:
        # The models' functions take log decays and betas; the library's ops too where they get no A_log.
        names = {"query": "q", "key": "k", "value": "v", "g": "g", "beta": "beta"}
        given = dict(zip(names, args, strict=False)) | options
        inputs, parameters = {short: given[long][0] for long, short in names.items()}, {}
    inputs = {key: t if key in ("dt", "g", "beta") else t.bfloat16() for key, t in inputs.items()}
    return Layer(spec, {key: t.contiguous() for key, t in inputs.items()}, parameters)


def stepwise_states(layer: Layer, checkpoint: torch.dtype, device: str) -> States:
    """States after the marks, decoded token by token, the state kept in `checkpoint`."""
    exact = checkpoint == torch.float64
    ops = family_ops(layer.spec.family, "torch" if exact or device == "cpu" else "triton", torch.device(device))
    state = torch.zeros(1, *layer.spec.state_shape, dtype=checkpoint, device=device)
    slots, starts = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([0], [0, WINDOW]))
    options: dict[str, Any] = {"pad_slot_id": -1, "max_window_len": WINDOW, **op_options(layer.spec)}
    out_dtype = torch.float64 if exact else torch.bfloat16
    out, states = torch.empty(WINDOW, *layer.spec.state_shape[:2], dtype=out_dtype, device=device), {}
    for done, window in layer.windows(torch.float64 if exact else None):
        ops.stepwise(*positional(layer.spec, window), state, slots, starts, out, **options)
        if done in MARKS:
            states[done] = state[0].to(torch.float64, copy=True)
    return states


def replayed_states(layer: Layer, variant: str, rounding: str, device: str) -> States:
    """States after the marks, materialized from a cache that decoded the text."""
    read, checkpoint = variant.split("/")
    spec = replace(layer.spec, layer_idx=0)
    plan = Plan([spec], num_draft_tokens=WINDOW - 1, read=read, checkpoint=checkpoint, rounding=rounding, device=device)
    cache, states = ReplayCache(plan, 1), {}
    cache.reset([0])
    decode: Callable[..., torch.Tensor] = mamba2_decode if isinstance(spec, Mamba2Spec) else delta_decode
    for done, window in layer.windows():
        step = cache.begin_step([0], WINDOW)
        decode(cache.layer(0), step, **window)
        cache.commit(step)
        if done in MARKS:
            states[done] = cache.materialize(0, [0])[0].double()
    return states


def simulated_states(layer: Layer, variant: str, device: str) -> States:
    """As `replayssm drift` has it, for states that the library does not keep."""
    inputs = {name: t.to(device) for name, t in (layer.inputs | layer.parameters).items()}
    if "x" in inputs:
        dt = torch.nn.functional.softplus(inputs["dt"].float() + inputs["dt_bias"])
        made = forward.mamba2_inputs(inputs["x"], dt, inputs["A"], inputs["B"], inputs["C"], None)
    else:
        made = forward.delta_inputs(*(inputs[name] for name in ("q", "k", "v", "g", "beta")))
    return {n: s.double() for n, s in scan(Variant.parse(variant), made, MARKS).states.items()}


def variants(layer: Layer, device: str) -> Iterator[tuple[str, Callable[[], States]]]:
    """Names, and what gives their states."""
    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    for name in STEPWISE:
        yield REFERENCE.replace("fp32", name), lambda name=name: stepwise_states(layer, dtypes[name], device)
    for name in REPLAY:
        yield name, lambda name=name: replayed_states(layer, name, "nearest", device)
    for name in STOCHASTIC:
        yield f"{name}:stochastic", lambda name=name: replayed_states(layer, name, "stochastic", device)
    for name in SIMULATED:
        yield name, lambda name=name: simulated_states(layer, name, device)


def error(states: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative, in the Euclidean norm."""
    return float((states - exact).norm() / exact.norm())


def measure(name: str, length: int, device: str) -> Iterator[dict[str, Any]]:
    """A result a variant: errors at the marks, and whether the last state is stepwise fp32's bit for bit."""
    layer = first_layer(name, length, device)
    exact, plain = stepwise_states(layer, torch.float64, device), None
    for variant, states_of in variants(layer, device):
        states = states_of()
        plain = plain or states
        errors = {mark: error(states[mark], exact[mark]) for mark in exact}
        equal = all(torch.equal(states[mark], plain[mark]) for mark in exact)
        yield {"model": name, "device": device, "variant": variant, "errors": errors, "bit_equal": equal}


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Errors against tokens, a panel a model: a colour a checkpoint; one line for all whose states are the same."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(result["model"] for result in results))
    figure, axes = pyplot.subplots(1, len(models), figsize=(4 * len(models), 4), sharey=True, squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        for result in (r for r in results if r["model"] == model):
            read, checkpoint = result["variant"].split("/")
            if result["bit_equal"] and (read, checkpoint) != ("none", "fp32"):
                continue
            name = checkpoint.partition("@")[0].partition(":")[0]
            style = "--" if "@token" in checkpoint else ":" if ":" in checkpoint else "-"
            label = checkpoint.replace("@", ", every ").replace(":", ", ")
            label = "fp32, any read, or every token" if name == "fp32" else label
            color = f"C{('fp32', 'fp16', 'bf16', 'fp8', 'nvfp4').index(name)}"
            axis.loglog(list(result["errors"]), list(result["errors"].values()), style, color=color, label=label)
        axis.set_title(model)
        axis.set_xlabel("tokens")
    axes[0][0].set_ylabel("relative error of the state")
    axes[0][0].set_ylim(top=1e2)  # what lies above has lost its state
    axes[0][-1].legend(title="checkpoint", fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=110, bbox_inches="tight")


@torch.no_grad()
def main() -> None:
    """Print a row a variant as it comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MINIATURES))
    parser.add_argument("--length", type=int, default=MARKS[-1])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    results = []
    for name in args.models:
        for result in measure(name, args.length, args.device):
            results.append(result)
            cells = [
                name,
                result["variant"],
                *(f"{e:.1e}" for e in result["errors"].values()),
                str(result["bit_equal"]),
            ]
            print("| " + " | ".join(cells) + " |", flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(result) + "\n")
    if args.plot:
        draw(results, args.plot)


if __name__ == "__main__":
    main()
