"""Rounding errors of the storage formats on random states and on states that the recurrences have grown.

python benchmarks/format_errors.py [--tokens 4096] [--captured miniatures/captured.safetensors] [--json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from replayssm.quant import dequantize, quantize
from replayssm.rounding import random_words

HEADS, V, K = 16, 128, 128
FORMATS = ("fp16", "bf16", "int8", "fp8", "nvfp4")
STOCHASTIC = ("fp16", "bf16", "fp8")


def random_states(generator: torch.Generator) -> torch.Tensor:
    """Normal states whose rows spread by e and columns by its root."""
    rows = torch.exp(torch.randn(64, V, 1, generator=generator))
    columns = torch.exp(0.5 * torch.randn(64, 1, K, generator=generator))
    return torch.randn(64, V, K, generator=generator) * rows * columns


def grown_states(tokens: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """fp32 states of 16 heads with half-lives from 8 to 50,000 tokens after `tokens` bf16 inputs."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    half_lives = torch.logspace(0.903, 4.699, HEADS)
    channel_lives = torch.exp(torch.empty(HEADS, K).uniform_(2.08, 10.82, generator=generator))
    decay, channel_decay = torch.exp2(-1 / half_lives)[:, None, None], torch.exp2(-1 / channel_lives)[:, None]
    common = 0.5 * normal(HEADS, K)  # keys of a head share a direction
    states = {name: torch.zeros(HEADS, V, K) for name in ("GDN", "KDA", "Mamba-2")}
    for _ in range(tokens):
        k = torch.nn.functional.normalize((normal(HEADS, K) + common).bfloat16().float(), dim=-1)
        v, beta = normal(HEADS, V).bfloat16().float(), torch.sigmoid(normal(HEADS, 1))
        rate = torch.exp(0.5 * normal(HEADS, 1, 1))
        for name, factor in (("GDN", decay**rate), ("KDA", channel_decay)):
            S = states[name].mul_(factor)
            u = beta * (v - (S @ k[..., None])[..., 0])
            S.addcmul_(u[..., None], k[:, None])
        x, B = (torch.nn.functional.silu(normal(HEADS, dim)).bfloat16().float() for dim in (V, K))
        states["Mamba-2"].mul_(decay**rate).addcmul_(0.01 * rate * x[..., None], B[:, None])
    return states


def relative_errors(state: torch.Tensor, rounded: torch.Tensor, q: torch.Tensor) -> tuple[float, float]:
    """Root-mean-square relative error of a head's state and of its products with `q`, mean over heads, in percent."""

    def percent(difference: torch.Tensor, value: torch.Tensor) -> float:
        ratio = difference.square().sum((-2, -1)) / value.square().sum((-2, -1))
        return 100 * float(ratio.sqrt().mean())

    return percent(rounded - state, state), percent((rounded - state) @ q, state @ q)


def captured_states(path: Path) -> dict[str, torch.Tensor]:
    """States of trained models, as `capture_states.py` keeps them."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    return {f"{key.split('.')[0]} trained": state for key, state in tensors.items() if key.endswith(".state")}


def measure(tokens: int, captured: Path | None) -> list[dict[str, object]]:
    """One row a format and kind of state."""
    generator = torch.Generator().manual_seed(0)
    states = {"random": random_states(generator), **grown_states(tokens, generator)}
    states |= captured_states(captured) if captured else {}
    table = []
    for kind, state in states.items():
        q = torch.randn(len(state), K, 256, generator=generator)
        words = random_words(
            torch.arange(len(state)), torch.zeros(len(state), dtype=torch.int32), tuple(state.shape[1:])
        )
        for format in FORMATS:
            for noise in (None, words) if format in STOCHASTIC else (None,):
                rounded = dequantize(quantize(state, format, words=noise))
                of_state, of_output = relative_errors(state, rounded, q)
                name = format if noise is None else f"{format}, stochastic"
                table.append({"format": name, "states": kind, "state %": of_state, "output %": of_output})
    return table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--captured", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    table = measure(arguments.tokens, arguments.captured)
    if arguments.json:
        print(json.dumps(table, indent=2))
        return
    kinds = list(dict.fromkeys(str(row["states"]) for row in table))
    print("| format | " + " | ".join(f"{kind}: state / output" for kind in kinds) + " |")
    print("|---|" + "---|" * len(kinds))
    for name in dict.fromkeys(row["format"] for row in table):
        cells = [f"{r['state %']:.3g} / {r['output %']:.3g}" for r in table if r["format"] == name]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
