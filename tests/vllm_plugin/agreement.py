"""Compare two results of `engine_run`: `python agreement.py STOCK.json PLUGIN.json`.

Three numbers an engine or pair. `noise`: |log-probability while decoding - the same token scored by one prefill|, an
engine against itself. `apart`: the same of two engines over the tokens that both generated before they first differ.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def noise(run: dict[str, Any]) -> list[float]:
    """Decoding against prefill, every token of every request."""
    return [abs(x - y) for r in run["requests"] for x, y in zip(r["logprobs"], r["scored"], strict=True)]


def apart(a: dict[str, Any], b: dict[str, Any]) -> list[float]:
    """Two engines, as far as their texts agree."""
    differences = []
    for x, y in zip(a["requests"], b["requests"], strict=True):
        for i, (s, t) in enumerate(zip(x["tokens"], y["tokens"], strict=False)):
            if s != t:
                break
            differences.append(abs(x["logprobs"][i] - y["logprobs"][i]))
    return differences


def summary(values: list[float]) -> dict[str, float]:
    values = sorted(values)
    mean = sum(values) / len(values)
    return {"n": len(values), "mean": mean, "p99": values[int(0.99 * (len(values) - 1))], "max": values[-1]}


def check_as_near(run: dict[str, Any], stock: dict[str, Any]) -> None:
    """A decoded token's log-probability is as near to that of a prefill of the same text as in stock vLLM."""
    ours, theirs = summary(noise(run)), summary(noise(stock))
    print(ours, theirs)
    assert ours["mean"] < 1.25 * theirs["mean"], (ours, theirs)
    assert ours["max"] < 2.0 * theirs["max"], (ours, theirs)


def main() -> None:
    stock, plugin = (json.loads(Path(path).read_text()) for path in sys.argv[1:3])
    tokens = sum(len(r["tokens"]) for r in stock["requests"])
    print("tokens", tokens, "replayed layers", stock["replayed"], plugin["replayed"])
    for name, values in (
        ("noise stock", noise(stock)),
        ("noise plugin", noise(plugin)),
        ("stock and plugin apart", apart(stock, plugin)),
    ):
        print(f"{name:24}", {k: round(v, 5) for k, v in summary(values).items()})


if __name__ == "__main__":
    main()
