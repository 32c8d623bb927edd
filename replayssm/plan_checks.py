"""Validation of a plan's options that takes more than a range or a list of names."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import TypeGuard

import torch

from replayssm.checks import ReplayError, check_choice, fail
from replayssm.config import GDNSpec, LayerSpec, Mamba2Spec
from replayssm.formats import READ_FORMATS

BACKENDS = ("auto", "torch", "triton", "reference")
REPLAYS = ("auto", "serial", "chunk")


def check_layers(layers: object) -> tuple[LayerSpec, ...]:
    """At least one LayerSpec, each with a layer_idx of its own."""
    if not isinstance(layers, (tuple, list)) or not layers:
        raise ReplayError(f"layers is {layers!r}; allowed: a tuple of at least one LayerSpec")
    for spec in layers:
        if not isinstance(spec, (Mamba2Spec, GDNSpec)):
            raise ReplayError(f"layers holds {spec!r}; allowed: Mamba2Spec, GDNSpec, KDASpec")
    repeated = [i for i, n in Counter(spec.layer_idx for spec in layers).items() if n > 1]
    if repeated:
        raise ReplayError(f"layers has layer_idx {repeated[0]} more than once; allowed: one spec a layer")
    return tuple(layers)


def check_read(read: object, layers: tuple[LayerSpec, ...]) -> str | tuple[tuple[int, str], ...]:
    """One name if all layers have the same, else (layer_idx, name) pairs in the order of the layers."""
    if isinstance(read, str):
        check_choice("read", read, READ_FORMATS)
        chosen = {spec.layer_idx: read for spec in layers}
    else:
        pairs = tuple(read.items()) if isinstance(read, Mapping) else read if _are_pairs(read) else ()
        chosen, indices = dict(pairs), [spec.layer_idx for spec in layers]
        if set(chosen) != set(indices) or len(pairs) != len(indices):
            raise fail("read", read, f"a format, or a mapping from every layer_idx {indices} to one")
    for spec in layers:
        name = chosen[spec.layer_idx]
        check_choice(f"read[{spec.layer_idx}]", name, READ_FORMATS)
        READ_FORMATS[name].check_dims("read", spec.state_shape[2])
    names = {chosen[spec.layer_idx] for spec in layers}
    return names.pop() if len(names) == 1 else tuple((spec.layer_idx, chosen[spec.layer_idx]) for spec in layers)


def _are_pairs(value: object) -> TypeGuard[tuple[tuple[int, str], ...]]:
    return isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)


def check_device(device: object) -> torch.device:
    """The device by name."""
    try:
        found = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise fail("device", device, "cpu, cuda or cuda:N")
    return found


def present_device(device: torch.device | str) -> torch.device:
    """The device with its index; raises if it is not there."""
    device = check_device(device)
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count <= (device.index or 0):
        raise fail(
            "device",
            str(device),
            f"cpu, cuda:0 to cuda:{count - 1}" if count else "cpu (no CUDA device was found here)",
        )
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def choose_backend(backend: str, device: torch.device) -> str:
    """What "auto" stands for on a device; raises for a backend that cannot run there."""
    check_choice("backend", backend, BACKENDS)
    if backend == "auto":
        return "triton" if device.type == "cuda" else "torch"
    if backend == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ReplayError(f"backend is 'triton' on {device}; allowed: a cuda device, or TRITON_INTERPRET=1")
    return backend


def check_replay(replay: object, backend: str, activation: torch.dtype) -> None:
    """The chunk form is one of GPU kernels, and splits nothing but 16-bit inputs exactly."""
    check_choice("replay", replay, REPLAYS)
    if replay == "chunk" and (backend != "triton" or activation == torch.float32):
        raise ReplayError(
            f"replay is 'chunk' with backend {backend!r} and activation {activation}; allowed: replay auto or serial, "
            "or backend triton with 16-bit activations"
        )
