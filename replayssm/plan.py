"""Plan: everything that is decided before the first token, validated once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from replayssm import routes, traffic
from replayssm.checks import ReplayError, check_choice, check_int
from replayssm.config import LayerSpec
from replayssm.cursors import SPREAD_FROM
from replayssm.formats import CHECKPOINT_FORMATS, READ_FORMATS
from replayssm.plan_checks import check_device, check_layers, check_read, check_replay, choose_backend

ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)
ROUTES = ("replay", "stepwise")
ROUNDINGS = ("nearest", "stochastic")
MAX_BUFFER_LEN = 256
MAX_DRAFT_TOKENS = 63


@dataclass(frozen=True)
class Plan:
    """How one model's SSM layers are decoded.

    layers: one LayerSpec a layer (after tensor-parallel sharding). buffer_len: committed rows a slot may hold.
    num_draft_tokens: most drafts a step verifies (window_len is at most one more). checkpoint, read: formats by name;
    read may be a mapping from every layer_idx to one. rounding: "nearest", or "stochastic" for checkpoints of 16 and 8
    bits; seed: what the slots' random words start from, where a request brings no seed of its own.
    activation: dtype of the layers' inputs and outputs. backend: "auto" takes torch on a CPU and triton on a GPU.
    spread_flushes: shorten first windows so that requests which start together flush at different steps; None: in
    caches of at least 64 slots, since in small batches a flush has too few other rows' reads to hide under.
    route: "replay" takes every step through the ring, "stepwise" none, as ordinary decoding does.
    replay: how flushes run the recurrence over the ring. "serial" does it token by token, bit for bit as stepwise
    decoding does; "chunk" lets GPU kernels take all rows together, by products that are accurate to fp32; "auto" takes
    serial where bit equality is promised (`replay_form`).
    """

    layers: tuple[LayerSpec, ...]
    buffer_len: int = 16
    num_draft_tokens: int = 0
    checkpoint: str = "fp32"
    read: str | Mapping[int, str] | tuple[tuple[int, str], ...] = "none"
    activation: torch.dtype = torch.bfloat16
    device: torch.device | str = "cpu"
    backend: str = "auto"
    spread_flushes: bool | None = None
    route: str = "replay"
    rounding: str = "nearest"
    seed: int = 0
    replay: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", check_layers(self.layers))
        check_int("buffer_len", self.buffer_len, 1, MAX_BUFFER_LEN)
        check_int("num_draft_tokens", self.num_draft_tokens, 0, MAX_DRAFT_TOKENS)
        if self.max_window_len > self.buffer_len:
            raise ReplayError(
                f"num_draft_tokens is {self.num_draft_tokens}; allowed: at most buffer_len - 1 "
                f"({self.buffer_len - 1}), since a window must fit in an empty ring"
            )
        check_choice("checkpoint", self.checkpoint, CHECKPOINT_FORMATS)
        object.__setattr__(self, "read", check_read(self.read, self.layers))
        check_choice("activation", self.activation, ACTIVATIONS)
        check_choice("route", self.route, ROUTES)
        if self.route == "stepwise" and self.num_draft_tokens:
            raise ReplayError(
                f"route is 'stepwise' with num_draft_tokens {self.num_draft_tokens}; allowed with drafts: replay"
            )
        check_choice("spread_flushes", self.spread_flushes, (None, True, False))
        self._check_rounding()
        if self.route == "stepwise" and self.read != "none":
            raise ReplayError(f"route is 'stepwise' with read {self.read_name!r}; allowed with it: read 'none'")
        object.__setattr__(self, "device", check_device(self.device))
        object.__setattr__(self, "backend", choose_backend(self.backend, torch.device(self.device)))
        check_replay(self.replay, self.backend, self.activation)

    def _check_rounding(self) -> None:
        check_choice("rounding", self.rounding, ROUNDINGS)
        check_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.rounding == "nearest":
            return
        if self.checkpoint == "fp32":
            raise ReplayError("rounding is 'stochastic' with checkpoint 'fp32'; allowed: checkpoint fp16, bf16, fp8")
        if self.route == "stepwise":
            raise ReplayError("rounding is 'stochastic' with route 'stepwise'; allowed: route replay")

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

    def read_format(self, layer_idx: int) -> str:
        """The read format of a layer."""
        self._spec(layer_idx)
        return self.read if isinstance(self.read, str) else dict(self.read)[layer_idx]

    def replay_form(self, layer_idx: int) -> str:
        """Whether a layer's flushes replay "serial" or may use the "chunk" form; see `replay`."""
        return routes.replay_form(self, self._spec(layer_idx))

    def _spec(self, layer_idx: int) -> LayerSpec:
        specs = {spec.layer_idx: spec for spec in self.layers}
        check_choice("layer_idx", layer_idx, specs)
        return specs[layer_idx]

    @property
    def read_name(self) -> str:
        """The read format, or how many layers have each."""
        if isinstance(self.read, str):
            return self.read
        counts = Counter(self.read_format(spec.layer_idx) for spec in self.layers)
        return ", ".join(f"{name} in {n}" for name, n in sorted(counts.items())) + " layers"

    @property
    def family_counts(self) -> dict[str, int]:
        """Number of layers of each family."""
        return dict(Counter(spec.family for spec in self.layers))

    def _traffic(self) -> list[traffic.LayerTraffic]:
        return [self.layer_traffic(spec) for spec in self.layers]

    def layer_traffic(self, spec: LayerSpec) -> traffic.LayerTraffic:
        """Bytes of one of the plan's layers."""
        formats = CHECKPOINT_FORMATS[self.checkpoint], READ_FORMATS[self.read_format(spec.layer_idx)]
        return traffic.layer_traffic(spec, *formats, self.activation)

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
        """Bytes of one request: checkpoints, rings, read copies, cursors and, for stochastic rounding, a seed."""
        own = 24 if self.rounding == "stochastic" else 16
        return self.state_bytes_per_request + self.ring_bytes_per_request + self.read_copy_bytes_per_request + own

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

    def kernels(self, batch: int) -> dict[str, str]:
        """What a step of `batch` rows runs, by layer family, state shape and read format; one line each."""
        check_int("batch", batch, 1)
        return routes.kernels(self, batch)

    def check_runnable(self) -> None:
        """Raise if this plan can be counted but not run: a GPU does not have kernels for every pair of formats."""
        routes.check_runnable(self)

    def with_options(self, **options: Any) -> Plan:
        """The same plan with other options, validated again."""
        return replace(self, **options)
