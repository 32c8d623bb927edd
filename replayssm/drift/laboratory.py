"""Measure a model: the reference once, then every variant, with results kept as JSON lines."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from replayssm.checks import ReplayError, fail
from replayssm.drift.compare import Drift, compare, marks_up_to
from replayssm.drift.forward import Run, routed, run
from replayssm.drift.models import model_folder
from replayssm.drift.scan import PIECE
from replayssm.drift.variants import REFERENCE, Variant
from replayssm.hf_config import layer_specs

_EDGE = 1 << 20  # bytes at both ends of a weight file that stand for all of it


@dataclass(frozen=True)
class Result:
    """The drift of one variant of one model on one text; `setting` names these but for the variant."""

    model: str
    setting: str
    dtype: str
    device: str
    tokens: int
    variant: str
    seconds: float
    drifts: tuple[Drift, ...]


class ResultFile:
    """Results as JSON lines: what is there is not measured again."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lock = path, Lock()
        self.results: list[Result] = []
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise fail("out", str(path), "a file in a folder that is there")
        if path is not None and path.exists():
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                self.results.append(_parse(path, number, line))

    def find(self, setting: str, variant: str) -> Result | None:
        """The result that is there already."""
        return next((r for r in self.results if (r.setting, r.variant) == (setting, variant)), None)

    def add(self, result: Result) -> None:
        """Keep a result, on disk at once."""
        with self._lock:
            self.results.append(result)
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps(asdict(result)) + "\n")


def _parse(path: Path, number: int, line: str) -> Result:
    try:
        fields = json.loads(line)
        drifts = tuple(_drift(drift) for drift in fields["drifts"])
        return Result(**{**fields, "drifts": drifts})
    except (ValueError, TypeError, KeyError) as error:
        raise ReplayError(f"{path}:{number} is no result ({error}); allowed: files that this command wrote") from error


def _drift(fields: dict[str, Any]) -> Drift:
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    return Drift(**values)


def setting_of(name: str, tokens: torch.Tensor, dtype: torch.dtype) -> str:
    """A fingerprint of the weights, the text and the dtype."""
    digest = hashlib.sha256(str(dtype).encode() + tokens.cpu().numpy().tobytes())
    folder = model_folder(name)
    for path in sorted((*folder.glob("config.json"), *folder.glob("*.safetensors"))):
        with path.open("rb") as file:
            digest.update(file.read(_EDGE))
            file.seek(max(0, path.stat().st_size - _EDGE))
            digest.update(file.read(_EDGE))
    return digest.hexdigest()[:16]


def measure(
    name: str,
    model: Any,
    tokens: torch.Tensor,
    variants: Sequence[Variant],
    results: ResultFile,
    *,
    jobs: int = 1,
    on_tokens: Callable[[str, int], object] = lambda variant, tokens: None,
) -> list[Result]:
    """Results of `variants` in that order: those in `results` as they are, the others measured and added to it.

    jobs: variants that run at once, each in its own thread and CUDA stream. on_tokens(variant, n): called whenever n
    more tokens of a layer are done.
    """
    if len(tokens) < PIECE or len(tokens) % PIECE:
        raise fail("length", len(tokens), f"a multiple of {PIECE}")
    layers = len(layer_specs(model.config))
    if wrong := [str(v) for v in variants if v.num_layers not in (1, layers)]:
        raise fail("variant", wrong[0], f"one read format, or one for each of the {layers} SSM layers")
    setting = setting_of(name, tokens, model.dtype)
    missing = [v for v in dict.fromkeys(variants) if results.find(setting, str(v)) is None]
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu"

    def one(variant: Variant, reference: Run | None) -> Run:
        started = time.perf_counter()
        with _own_stream(model.device):
            found = run(model, tokens, variant, marks_up_to(len(tokens)), partial(on_tokens, str(variant)))
            if reference is not None:
                drifts = tuple(compare(model, tokens, reference, found))
                seconds = round(time.perf_counter() - started, 2)
                dtype = str(model.dtype).removeprefix("torch.")
                results.add(Result(name, setting, dtype, device, len(tokens), str(variant), seconds, drifts))
        return found

    if missing:
        with routed(model), ThreadPoolExecutor(jobs) as pool:
            reference = one(Variant.parse(REFERENCE), None)
            for future in [pool.submit(lambda v: one(v, reference) and None, variant) for variant in missing]:
                future.result()
    found = [results.find(setting, str(variant)) for variant in variants]
    return [result for result in found if result is not None]


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield
        stream.synchronize()
