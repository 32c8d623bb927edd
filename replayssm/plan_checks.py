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
        chosen = dict(read) if isinstance(read, Mapping) or _are_pairs(read) else {}
        indices = [spec.layer_idx for spec in layers]
        if set(chosen) != set(indices):
            raise fail("read", read, f"a format, or a mapping from every layer_idx {indices} to one")
    for spec in layers:
        name = chosen[spec.layer_idx]
        check_choice(f"read[{spec.layer_idx}]", name, READ_FORMATS)
        READ_FORMATS[name].check_dims("read", spec.state_shape[2])
    names = {chosen[spec.layer_idx] for spec in layers}
    return names.pop() if len(names) == 1 else tuple((spec.layer_idx, chosen[spec.layer_idx]) for spec in layers)


def _are_pairs(value: object) -> TypeGuard[tuple[tuple[int, str], ...]]:
    return isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value)


def check_device(device: torch.device | str) -> torch.device:
    """The device by name."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ReplayError(f"device is {device!r}; allowed: a torch device such as cpu or cuda:0") from error


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
