"""Plan: everything that is decided before the first token, validated once."""

from __future__ import annotations

import functools
import os
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch

from replayssm import traffic
from replayssm.checks import ReplayError, check_choice, check_int
from replayssm.config import GDNSpec, LayerSpec, Mamba2Spec
from replayssm.formats import CHECKPOINT_FORMATS, READ_FORMATS
from replayssm.ops.registry import launch_module

ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)
BACKENDS = ("auto", "torch", "triton", "reference")
SPREAD_FROM = 64
ROUTES = ("auto", "replay", "stepwise")
MAX_BUFFER_LEN = 256
MAX_DRAFT_TOKENS = 63


@dataclass(frozen=True)
class Plan:
    """How one model's SSM layers are decoded.

    layers: one LayerSpec a layer (after tensor-parallel sharding). buffer_len: committed rows a slot may hold.
    num_draft_tokens: most drafts a step verifies (window_len is at most one more). checkpoint, read: formats by name.
    activation: dtype of the layers' inputs and outputs. backend: "auto" takes torch on a CPU and triton on a GPU.
    spread_flushes: shorten first windows so that requests which start together flush at different steps; None: in
    caches of at least 64 slots, since in small batches a flush has too few other rows' reads to hide under.
    route: "replay" takes every step through the ring, "stepwise" none; "auto" lets batches of up to `stepwise_batch`
    rows decode stepwise, where the kernels' tables say that this is faster.
    """

    layers: tuple[LayerSpec, ...]
    buffer_len: int = 16
    num_draft_tokens: int = 0
    checkpoint: str = "fp32"
    read: str = "none"
    activation: torch.dtype = torch.bfloat16
    device: torch.device | str = "cpu"
    backend: str = "auto"
    spread_flushes: bool | None = None
    route: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _check_layers(self.layers))
        check_int("buffer_len", self.buffer_len, 1, MAX_BUFFER_LEN)
        check_int("num_draft_tokens", self.num_draft_tokens, 0, MAX_DRAFT_TOKENS)
        if self.max_window_len > self.buffer_len:
            raise ReplayError(
                f"num_draft_tokens is {self.num_draft_tokens}; allowed: at most buffer_len - 1 "
                f"({self.buffer_len - 1}), since a window must fit in an empty ring"
            )
        check_choice("checkpoint", self.checkpoint, CHECKPOINT_FORMATS)
        check_choice("read", self.read, READ_FORMATS)
        check_choice("activation", self.activation, ACTIVATIONS)
        check_choice("route", self.route, ROUTES)
        if self.route == "stepwise" and self.num_draft_tokens:
            raise ReplayError(
                f"route is 'stepwise' with num_draft_tokens {self.num_draft_tokens}; allowed with drafts: auto, replay"
            )
        check_choice("spread_flushes", self.spread_flushes, (None, True, False))
        for spec in self.layers:
            READ_FORMATS[self.read].check_dims("read", spec.state_shape[2])
        object.__setattr__(self, "device", _check_device(self.device))
        object.__setattr__(self, "backend", _choose_backend(self.backend, torch.device(self.device)))

    @classmethod
    def from_config(cls, config: Any, *, tp: int = 1, **options: Any) -> Plan:
        """Plan for a transformers config, a config.json or a model folder, on one of `tp` tensor-parallel ranks."""
        from replayssm.hf_config import layer_specs

        return cls(layers=tuple(spec.shard(tp) for spec in layer_specs(config)), **options)

    @property
    def max_window_len(self) -> int:
        """Most tokens a row may have in one step."""
        return 1 + self.num_draft_tokens

    @property
    def ring_len(self) -> int:
        """Physical rows of the ring: committed rows plus one window."""
        return self.buffer_len + self.max_window_len

    @property
    def checkpoint_dtype(self) -> torch.dtype:
        """torch dtype of the checkpoint, for formats that are one."""
        dtype = CHECKPOINT_FORMATS[self.checkpoint].dtype
        if dtype is None:
            raise ReplayError(f"checkpoint is {self.checkpoint!r}; allowed for this: formats that are a torch dtype")
        return dtype

    @property
    def family_counts(self) -> dict[str, int]:
        """Number of layers of each family."""
        return dict(Counter(spec.family for spec in self.layers))

    def _traffic(self) -> list[traffic.LayerTraffic]:
        formats = CHECKPOINT_FORMATS[self.checkpoint], READ_FORMATS[self.read]
        return [traffic.layer_traffic(spec, *formats, self.activation) for spec in self.layers]

    @property
    def state_bytes_per_request(self) -> int:
        """Bytes of one request's checkpoints, all layers."""
        return sum(t.state for t in self._traffic())

    @property
    def ring_bytes_per_request(self) -> int:
        """Bytes of one request's rings, all layers."""
        return self.ring_len * sum(t.row_append for t in self._traffic())

    @property
    def read_copy_bytes_per_request(self) -> int:
        """Bytes of one request's read copies, all layers (0 if reads use the checkpoint)."""
        return sum(t.read_copy for t in self._traffic())

    @property
    def memory_per_request(self) -> int:
        """Bytes of one request: checkpoints, rings, read copies and cursors."""
        return self.state_bytes_per_request + self.ring_bytes_per_request + self.read_copy_bytes_per_request + 16

    @property
    def snapshot_bytes_per_request(self) -> int:
        """Bytes that one state a draft token, and one for the request, would take in the checkpoint's format."""
        return self.max_window_len * self.state_bytes_per_request

    def step_bytes(self, batch: int, accepted: int | None = None) -> traffic.StepBytes:
        """Mean bytes of a step at `batch`, if every step accepts `accepted` tokens (None: the whole window)."""
        check_int("batch", batch, 1)
        window = self.max_window_len
        accepted = window if accepted is None else check_int("accepted", accepted, 1, window)
        layers = self._traffic()
        stepwise = sum(traffic.stepwise_bytes(t, batch, window) for t in layers)
        replay = sum(traffic.replay_bytes(t, batch, self.buffer_len, window, accepted) for t in layers)
        return traffic.StepBytes(stepwise, round(replay))

    def traffic_ratio(self, batch: int) -> float:
        """How many times fewer bytes a step moves than ordinary decoding in the checkpoint's format."""
        step = self.step_bytes(batch)
        return step.stepwise / step.replay

    def spreads(self, num_slots: int) -> bool:
        """Whether requests of a cache of this size flush at different steps."""
        return num_slots >= SPREAD_FROM if self.spread_flushes is None else self.spread_flushes

    @property
    def stepwise_batch(self) -> int:
        """Largest batch that decodes stepwise; drafts need the ring, and a 16-bit state is rounded less often by it."""
        if self.route != "auto":
            return 2**31 if self.route == "stepwise" else 0
        on_gpu = self.backend == "triton" and torch.device(self.device).type == "cuda" and torch.cuda.is_available()
        if not on_gpu or self.num_draft_tokens or self.checkpoint != "fp32":
            return 0
        return _largest_stepwise_batch(self)

    def kernels(self, batch: int) -> dict[str, str]:
        """What a step of `batch` rows runs, by layer family and state shape; one line each."""
        check_int("batch", batch, 1)
        chosen = {}
        for spec in self.layers:
            name = f"{spec.family} {'x'.join(map(str, spec.state_shape))}"
            if batch <= self.stepwise_batch:
                chosen[name] = "stepwise"
            elif self.backend != "triton":
                chosen[name] = self.backend
            else:
                launch = launch_module(spec.family)
                device = torch.device(self.device)
                chosen[name] = launch.route(self.checkpoint_dtype, batch, spec, device, self.ring_len)
        return chosen

    def check_runnable(self) -> None:
        """Raise if this plan can be counted but not run yet."""
        if CHECKPOINT_FORMATS[self.checkpoint].dtype is None:
            raise ReplayError(f"checkpoint is {self.checkpoint!r}; allowed for running so far: fp32, fp16, bf16")
        if self.read != "none":
            raise ReplayError(f"read is {self.read!r}; allowed for running so far: none")

    def with_options(self, **options: Any) -> Plan:
        """The same plan with other options, validated again."""
        return replace(self, **options)


@functools.cache
def _largest_stepwise_batch(plan: Plan) -> int:
    """Up to which batch every layer decodes faster stepwise."""
    device, largest = torch.device(plan.device), 0
    while largest < 1024 and all(
        launch_module(spec.family).stepwise_wins(plan.checkpoint_dtype, largest + 1, spec, device, plan.ring_len)
        for spec in plan.layers
    ):
        largest += 1
    return largest


def _check_layers(layers: object) -> tuple[LayerSpec, ...]:
    if not isinstance(layers, (tuple, list)) or not layers:
        raise ReplayError(f"layers is {layers!r}; allowed: a tuple of at least one LayerSpec")
    for spec in layers:
        if not isinstance(spec, (Mamba2Spec, GDNSpec)):
            raise ReplayError(f"layers holds {spec!r}; allowed: Mamba2Spec, GDNSpec, KDASpec")
    repeated = [i for i, n in Counter(spec.layer_idx for spec in layers).items() if n > 1]
    if repeated:
        raise ReplayError(f"layers has layer_idx {repeated[0]} more than once; allowed: one spec a layer")
    return tuple(layers)


def _check_device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ReplayError(f"device is {device!r}; allowed: a torch device such as cpu or cuda:0") from error


def _choose_backend(backend: str, device: torch.device) -> str:
    check_choice("backend", backend, BACKENDS)
    if backend == "auto":
        return "triton" if device.type == "cuda" else "torch"
    if backend == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ReplayError(f"backend is 'triton' on {device}; allowed: a cuda device, or TRITON_INTERPRET=1")
    return backend
