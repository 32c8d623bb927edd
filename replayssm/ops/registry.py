"""Registers the ops with torch and picks, once a cache, the functions that a backend runs.

`torch.ops.replayssm.*` run the vectorised torch code on a CPU and the Triton kernels on a GPU.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from replayssm.checks import fail
from replayssm.config import Family
from replayssm.ops.library import register

_MAMBA2_IN = "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias"
_MAMBA2_RING = "Tensor(b!) ring_x, Tensor(c!) ring_B, Tensor(d!) ring_dt"
_MAMBA2_OPTIONS = "int pad_slot_id, bool dt_softplus, int max_window_len"
_DELTA_IN = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias"
_DELTA_RING = "Tensor(b!) ring_k, Tensor(c!) ring_v, Tensor(d!) ring_u, Tensor(e!) ring_g, Tensor(f!) ring_beta"
_DELTA_OPTIONS = "int pad_slot_id, float scale, bool use_qk_l2norm, float? lower_bound, int max_window_len"
_STATE = "Tensor(a!) state"
_ROWS = "Tensor slot_indices, Tensor? query_start_loc, Tensor(z!) out"
_REPLAY = "Tensor cursors, Tensor slot_indices, Tensor? num_tokens, Tensor(z!) dst, Tensor dst_indices, *"
_MAMBA2_KEPT = "Tensor A, Tensor state, Tensor ring_x, Tensor ring_B, Tensor ring_dt"
_DELTA_KEPT = "Tensor state, Tensor ring_k, Tensor ring_v, Tensor ring_g, Tensor ring_beta"
_CURSORS = f"Tensor cursors, {_ROWS}, *, int buffer_len"
_TREES = "Tensor? parents=None"
_FLUSHES = "Tensor? cursors=None"
_COPY = "Tensor(g!)? read_codes=None, Tensor(h!)? read_scales=None, Tensor(i!)? read_global=None"
_ROUNDING = "Tensor(j!)? state_scales=None, Tensor? seeds=None, int stream=0"
_FORM = 'str replay="serial", int max_committed=0'
_STORED = f"{_COPY}, {_ROUNDING}, {_FORM}"

SCHEMAS = {
    "mamba2_step": f"{_MAMBA2_IN}, {_STATE}, {_MAMBA2_RING}, {_CURSORS}, {_MAMBA2_OPTIONS}, {_TREES}, {_STORED}",
    "mamba2_stepwise": f"{_MAMBA2_IN}, {_STATE}, {_ROWS}, *, {_MAMBA2_OPTIONS}, {_FLUSHES}, {_ROUNDING}",
    "mamba2_materialize": f"{_MAMBA2_KEPT}, {_REPLAY}, int pad_slot_id",
    "delta_step": f"{_DELTA_IN}, {_STATE}, {_DELTA_RING}, {_CURSORS}, {_DELTA_OPTIONS}, {_TREES}, {_STORED}",
    "delta_stepwise": f"{_DELTA_IN}, {_STATE}, {_ROWS}, *, {_DELTA_OPTIONS}, {_FLUSHES}, {_ROUNDING}",
    "delta_materialize": f"{_DELTA_KEPT}, {_REPLAY}, int pad_slot_id, bool use_qk_l2norm",
}

_OPTIONAL = ("parents", "read_codes", "read_scales", "read_global", "state_scales", "seeds", "cursors")


@dataclass(frozen=True)
class FamilyOps:
    """The three ops of a family, all writing in place: `step`, `stepwise`, `materialize`."""

    step: Callable[..., None]
    stepwise: Callable[..., None]
    materialize: Callable[..., None]


def op_family(family: Family) -> str:
    """The ops that serve a family: GDN and KDA share theirs."""
    return "mamba2" if family == "mamba2" else "delta"


def family_ops(family: Family, backend: str, device: torch.device) -> FamilyOps:
    """The functions that `backend` runs on `device`."""
    prefix = op_family(family)
    if (backend, device.type) in (("torch", "cpu"), ("triton", "cuda")):
        source: Any = torch.ops.replayssm
    else:
        source = _Implementation(backend)
    return FamilyOps(*(getattr(source, f"{prefix}_{name}") for name in ("step", "stepwise", "materialize")))


def launch_module(family: Family) -> Any:
    """The module that launches a family's kernels: its `route` tells a plan what it chooses."""
    return importlib.import_module(f"replayssm.ops.{op_family(family)}.launch")


def read_launch_module(family: Family) -> Any:
    """The module that launches a family's kernels for read copies: its `route` tells a plan what it chooses."""
    return importlib.import_module(f"replayssm.ops.{op_family(family)}.read_launch")


def read_window_launch_module(family: Family) -> Any:
    """The module that launches a family's windows with read copies; its `window_route` tells a plan what it chooses."""
    return importlib.import_module(f"replayssm.ops.{op_family(family)}.read_window_launch")


class _Implementation:
    """The functions of one backend, by op name."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _implementation(name, self._backend)


@functools.cache
def _implementation(name: str, backend: str) -> Callable[..., None]:
    """The function of an op; a GPU step of a read copy, an fp8 checkpoint or stochastic rounding has one of its own."""
    module = {"torch": "torch_ops", "triton": "launch", "reference": "reference"}[backend]
    plain = _function(name, module, name, backend)
    if backend != "triton" or not name.endswith("_step"):
        return plain

    def step(*args: Any, **kwargs: Any) -> None:
        if any(kwargs.get(given) is not None for given in ("read_codes", "state_scales", "seeds")):
            reading = _function(name, "read_launch", name.replace("_step", "_read_step"), backend)
            reading(*args, **{"read_codes": None, "read_scales": None, "read_global": None, **kwargs})
        else:
            plain(*args, **kwargs)

    return step


@functools.cache
def _function(op: str, module: str, name: str, backend: str) -> Callable[..., None]:
    """A function of an op's module; optional arguments that it does not have are refused unless they are None.

    A function without the chunk form replays serially, which is more than `replay` asks for; one without max_committed
    flushes any number of rows.
    """
    source = importlib.import_module(f"replayssm.ops.{op.split('_')[0]}.{module}")
    function: Callable[..., None] = getattr(source, name)
    known = inspect.signature(function).parameters
    unknown = [name for name in _OPTIONAL if name not in known]
    missing = [name for name in ("replay", "max_committed") if name not in known]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> None:
        for name in unknown:
            if kwargs.pop(name, None) is not None:
                what, allowed = ("a tree", "None (chains)") if name == "parents" else ("given", "None")
                raise fail(name, what, f"{allowed} with the {backend} backend of {op}")
        if "seeds" in unknown:
            kwargs.pop("stream", None)
        for name in missing:
            kwargs.pop(name, None)
        function(*args, **kwargs)

    return checked if unknown or missing else function


def _on_device(name: str, backend: str) -> Callable[..., None]:
    def run(*args: Any, **kwargs: Any) -> None:
        _implementation(name, backend)(*args, **kwargs)

    return run


register(SCHEMAS, lambda name: _on_device(name, "torch"), lambda name: _on_device(name, "triton"))
