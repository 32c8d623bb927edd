"""Registers ops that write in place with `torch.library`: one function for CPUs and one for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Function = Callable[..., Any]
_LIBRARIES: list[torch.library.Library] = []  # a Library must outlive its registrations


def register(schemas: Mapping[str, str], on_cpu: Callable[[str], Function], on_gpu: Callable[[str], Function]) -> None:
    """Make `torch.ops.replayssm.NAME` of every schema; they return nothing, so their fakes do nothing."""
    library = torch.library.Library("replayssm", "FRAGMENT")
    for name, schema in schemas.items():
        library.define(f"{name}({schema}) -> ()")
        library.impl(name, on_cpu(name), "CPU")
        library.impl(name, on_gpu(name), "CUDA")
        torch.library.register_fake(f"replayssm::{name}", lambda *_, **__: None, lib=library)
    _LIBRARIES.append(library)
