"""Train one miniature on the sources of the running interpreter's standard library.

python benchmarks/train_miniatures.py gdn --out miniatures/gdn --seconds 170

Twice, the second time with `--start miniatures/gdn`, made those in the repository.

Rows of a batch read streams of whole modules in random order; the recurrent states go on from one segment to the next
(gradients stop there), so that the model sees contexts far longer than a segment. Some segments repeat an earlier
passage. The learning rate follows the clock; weights are saved every 20 seconds.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from miniature_evidence import bits_per_byte, evidence
from miniature_models import FAMILIES, Carry, build
from miniature_text import Streams

from replayssm.drift.text import held_out_text

WARMUP, LAST_RATE = 0.04, 0.03


def optimizer_of(model: Any, rate: float) -> torch.optim.Optimizer:
    """AdamW; gates move more slowly, and only matrices decay."""
    groups: dict[tuple[bool, bool], list[Any]] = {}
    for name, parameter in model.named_parameters():
        is_gate = name.endswith(("A_log", "dt_bias"))
        groups.setdefault((is_gate, parameter.dim() > 1 and not is_gate), []).append(parameter)
    settings = [
        {"params": params, "weight_decay": 0.1 if decays else 0.0, "scale": 0.3 if is_gate else 1.0}
        for (is_gate, decays), params in groups.items()
    ]
    on_gpu = torch.cuda.is_available()
    for group in settings:
        # A tensor, so that a captured step reads the rate of its moment.
        group["lr"] = torch.tensor(rate, device="cuda" if on_gpu else "cpu")
    return torch.optim.AdamW(settings, lr=rate, betas=(0.9, 0.98), fused=on_gpu, capturable=on_gpu)


def rate_at(share: float, peak: float) -> float:
    """A short warm-up, then a cosine to a small rest, over the share of the time that is gone."""
    if share < WARMUP:
        return peak * (0.02 + 0.98 * share / WARMUP)
    place = min(1.0, (share - WARMUP) / (1 - WARMUP))
    return peak * (LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * place)))


def save(model: Any, folder: Path) -> None:
    """Weights in bf16 and the configuration, as transformers reads them."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tied = {"lm_head.weight"} if model.get_output_embeddings().weight is model.get_input_embeddings().weight else set()
    weights = {n: p.detach().bfloat16().cpu() for n, p in model.state_dict().items() if n not in tied}
    save_file(weights, folder / "model.safetensors.part", metadata={"format": "pt"})
    (folder / "model.safetensors.part").rename(folder / "model.safetensors")
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.bfloat16
    model.config.to_json_file(folder / "config.json", use_diff=True)


def train(arguments: argparse.Namespace) -> None:
    """The whole run: training by the clock, then the evidence from the weights as saved."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(arguments.family, arguments.seed)
    earlier = _start(model, arguments.start) if arguments.start else []
    model = model.to(device).train()
    streams = Streams(arguments.rows, arguments.length, arguments.seed + len(earlier))
    held_out = held_out_text(arguments.held_out)
    carry, optimizer = Carry(model), optimizer_of(model, arguments.rate)
    curve: list[dict[str, Any]] = []
    saved, step = 0.0, 0
    with carry.routed():
        train_step = TrainStep(model, carry, optimizer, streams.next(), graph=arguments.graph)
        started = time.monotonic()
        while (gone := time.monotonic() - started) < arguments.seconds and step != arguments.steps:
            rate = rate_at(gone / arguments.seconds, arguments.rate)
            for group in optimizer.param_groups:
                group["lr"].fill_(rate * group["scale"])
            loss = train_step(streams.next(), streams.kept())
            if step % 25 == 0:
                curve.append({"step": step, "seconds": round(gone, 1), "rate": rate, "bits": float(loss) / math.log(2)})
                print(arguments.family, curve[-1], flush=True)
            if gone - saved > 20:
                save(model, arguments.out)
                saved = gone
                curve[-1]["held_out_bits"] = bits_per_byte(model, carry, held_out[: 8 * 4096])
                _write_curve(curve, arguments.out)
            step += 1
        curve.append({"step": step, "seconds": round(gone, 1), "rate": rate, "bits": float(loss) / math.log(2)})
        save(model, arguments.out)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        curve[-1]["held_out_bits"] = bits_per_byte(model, carry, held_out)
        _write_curve(curve, arguments.out)
        record = _record(arguments, model, streams, step, gone, curve[-1]) | {"earlier": earlier}
        (arguments.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
        record["evidence"] = evidence(model, carry, held_out)
    (arguments.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(arguments.family, "done", json.dumps(record["evidence"])[:1500], flush=True)


def _start(model: Any, folder: Path) -> list[Any]:
    """Take over weights; returns the records of the runs that made them."""
    from safetensors.torch import load_file

    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    record = json.loads((folder / "training.json").read_text())
    del record["evidence"]
    return [*record.pop("earlier", []), record]


class TrainStep:
    """One step of training: eager, or captured once in a CUDA graph, since most of its kernels are small."""

    def __init__(
        self, model: Any, carry: Carry, optimizer: torch.optim.Optimizer, segments: torch.Tensor, *, graph: bool
    ) -> None:
        self._model, self._carry, self._optimizer = model, carry, optimizer
        self._segments = segments.to(model.device)
        self._kept = torch.zeros(len(segments), device=model.device)
        carry.begin(None)
        with torch.no_grad():
            model(self._segments[:, :-1], use_cache=False)
        self._states = [torch.zeros_like(state) for state in carry.states]
        self._graph = None
        if graph:
            self._capture()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        self._optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._loss = self._run()
        self._graph = graph

    def __call__(self, segments: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """The loss of a step over `segments` [rows, length + 1], before it."""
        self._segments.copy_(segments, non_blocking=True)
        self._kept.copy_(kept, non_blocking=True)
        if self._graph is None:
            return self._run()
        self._graph.replay()
        return self._loss

    def _run(self) -> torch.Tensor:
        self._carry.states = self._states
        self._carry.begin(self._kept)
        kind = self._segments.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            logits = self._model(self._segments[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), self._segments[:, 1:].flatten())
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        for state, after in zip(self._states, self._carry.states, strict=True):
            state.copy_(after.detach())
        return loss.detach()


def _write_curve(curve: list[dict[str, Any]], folder: Path) -> None:
    with (folder / "loss.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", "seconds", "rate", "bits", "held_out_bits"])
        writer.writeheader()
        writer.writerows(curve)


def _record(args: argparse.Namespace, model: Any, streams: Streams, step: int, gone: float, last: Any) -> Any:
    import platform

    import transformers

    return {
        "family": args.family,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seed": args.seed,
        "steps": step,
        "rows": args.rows,
        "segment": args.length,
        "bytes_read": step * args.rows * args.length,
        "training_text_bytes": streams.size,
        "peak_rate": args.rate,
        "seconds": round(gone, 1),
        "held_out_bits_per_byte": last["held_out_bits"],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    """Parse the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="a folder whose weights to go on from")
    parser.add_argument("--graph", action="store_true", help="capture the step in a CUDA graph")
    parser.add_argument("--seconds", type=float, default=170.0)
    parser.add_argument("--steps", type=int, default=-1, help="stop after so many steps, whatever the clock says")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", type=int, default=16 * 16384)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
