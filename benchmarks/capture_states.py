"""Real keys, values, gates and states of the miniatures, for tests and benchmarks of formats.

python benchmarks/capture_states.py --out miniatures/captured.safetensors

Of every miniature's second SSM layer: its state after 16,384 held-out bytes, and what the next 64 give the recurrence.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from replayssm.drift.forward import routed, run
from replayssm.drift.models import MINIATURES, load, text_tokens
from replayssm.drift.scan import PIECE
from replayssm.drift.variants import Variant

BEFORE, TOKENS, LAYER = 16384, 64, 1
_NAMES = {
    "torch_chunk_gated_delta_rule": ("q", "k", "v"),
    "chunk_kimi_delta_attention": ("q", "k", "v"),
    "mamba2_chunk_scan": ("x", "dt", "A", "B", "C"),
}
_KEYWORDS = ("g", "beta", "D", "dt_bias")


def capture(name: str) -> dict[str, torch.Tensor]:
    """Tensors of one miniature: "state" [heads, V, K] fp32, and [TOKENS, ...] inputs as the layer's op takes them."""
    model, calls = load(name), []
    with routed(model):
        module, function = next(
            (module, function)
            for layer in model.modules()
            if hasattr(layer, "conv1d")
            for module in [sys.modules[type(layer).__module__]]
            for function in _NAMES
            if hasattr(module, function)
        )
        through = getattr(module, function)

        def record(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(_NAMES[function], args, strict=False))
            calls.append(given | {n: kwargs[n] for n in _KEYWORDS if n in kwargs})
            return through(*args, **kwargs)

        setattr(module, function, record)
        found = run(model, text_tokens(name, BEFORE + PIECE), Variant.parse("none/fp32"), [BEFORE])
    inputs = {n: t if t.dim() == 1 else _narrow(n, t[0, BEFORE : BEFORE + TOKENS]) for n, t in calls[LAYER].items()}
    return {"state": found.layers[LAYER].states[BEFORE], **inputs}


def _narrow(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Activations as a model in bf16 would have them; gates stay fp32."""
    return tensor.bfloat16() if name in ("q", "k", "v", "x", "B", "C") else tensor.float()


def main() -> None:
    """Capture all miniatures into one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("miniatures/captured.safetensors"))
    arguments = parser.parse_args()
    tensors = {
        f"{name}.{field}": tensor.detach().contiguous().clone()
        for name in MINIATURES
        for field, tensor in capture(name).items()
    }
    save_file(tensors, arguments.out)
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
