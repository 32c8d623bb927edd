"""Drift of all three miniatures at once: one process, a thread a run, so that their few programs each share the GPU.

python benchmarks/drift_miniatures.py --length 131072 --out drift.jsonl
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from replayssm.drift.laboratory import Result, ResultFile, measure
from replayssm.drift.models import MINIATURES, load, text_tokens
from replayssm.drift.variants import DEFAULTS, Variant


def main() -> None:
    """Measure and print one line a result as it comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MINIATURES)
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--variant", action="append")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--jobs", type=int, default=4, help="variants of a model that run at once; 128K tokens take about 3 GiB each"
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    variants = [Variant.parse(name) for name in arguments.variant or DEFAULTS]
    results, started = _Printed(arguments.out), time.perf_counter()
    dtype = torch.bfloat16 if arguments.dtype == "bf16" else torch.float32
    models = [(name, load(name, arguments.device, dtype)) for name in arguments.models]

    def one(name: str, model: object) -> None:
        tokens = text_tokens(name, arguments.length, arguments.text)
        measure(name, model, tokens, variants, results, jobs=arguments.jobs)

    with ThreadPoolExecutor(len(models)) as pool:
        for future in [pool.submit(one, name, model) for name, model in models]:
            future.result()
    print(f"{time.perf_counter() - started:.1f} s")


class _Printed(ResultFile):
    def add(self, result: Result) -> None:
        super().add(result)
        kl = ", ".join(f"{d.tokens}: {d.kl:.2e}" for d in result.drifts)
        print(f"{Path(result.model).name} {result.variant} {result.seconds} s  {kl}", flush=True)


if __name__ == "__main__":
    main()
