"""Times one layer's decode step: ordinary decoding, whole flush cycles (spread and in lockstep), and flushes alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from replayssm.bench.timing import Ceilings, time_graph
from replayssm.cursors import NO_LIMIT
from replayssm.formats import CHECKPOINT_FORMATS, READ_FORMATS
from replayssm.layer import LayerCache, allocate_layer
from replayssm.plan import Plan
from replayssm.traffic import CURSOR_BYTES, LayerTraffic, layer_traffic, replay_bytes, stepwise_bytes
from replayssm.workload import op_options, positional, random_inputs, random_parameters

POOL_BYTES = 400 * 2**20  # states rotate over this much, so that no cache holds them
PHASES = ("stepwise", "cycle", "cycle_lockstep", "flush", "middle")


@dataclass(frozen=True)
class Timing:
    """One phase at one batch: median time, the bytes it must move, and those bytes over time against the ceilings."""

    batch: int
    phase: str
    us: float
    nbytes: int
    read_fraction: float
    update_fraction: float

    @property
    def gbps(self) -> float:
        """Useful bytes a second."""
        return self.nbytes / self.us / 1000


def phase_bytes(traffic: LayerTraffic, phase: str, batch: int, buffer_len: int) -> int:
    """The fewest bytes of a phase; `middle` is a step with half the ring committed."""
    if phase == "stepwise":
        return stepwise_bytes(traffic, batch, 1)
    if phase.startswith("cycle"):
        return round(replay_bytes(traffic, batch, buffer_len, 1, 1))
    fixed = traffic.row_append + traffic.token_io + CURSOR_BYTES
    if phase == "flush":
        moved = 2 * traffic.state + traffic.read_copy + buffer_len * traffic.row_replay
    else:
        moved = (traffic.read_copy or traffic.state) + buffer_len // 2 * traffic.row_read
    return traffic.params + batch * (moved + fixed)


class LayerBench:
    """Pools of one layer's states, filled with random requests at every position of the ring."""

    def __init__(self, plan: Plan, batch: int, seed: int = 0) -> None:
        self.plan, self.batch, self.spec = plan, batch, plan.layers[0]
        self.device = torch.device(plan.device)
        self.generator = torch.Generator().manual_seed(seed)
        formats = CHECKPOINT_FORMATS[plan.checkpoint], READ_FORMATS[plan.read]
        self.traffic = layer_traffic(self.spec, *formats, plan.activation)
        pools = max(2, -(-POOL_BYTES // (batch * self.traffic.state)))
        cursors = torch.zeros(batch, 4, dtype=torch.int32, device=self.device)
        self.layers = [allocate_layer(self.spec, plan, batch, cursors) for _ in range(pools)]
        self.slots = [torch.randperm(batch, generator=self.generator).int().to(self.device) for _ in range(pools)]
        inputs = random_inputs(self.spec, batch, plan.activation, self.generator)
        every = inputs | random_parameters(self.spec, self.generator)
        self.inputs = positional(self.spec, {name: value.to(self.device) for name, value in every.items()})
        self.out = torch.empty(batch, *self.spec.state_shape[:2], dtype=plan.activation, device=self.device)
        for layer in self.layers:
            self._fill(layer)

    def _fill(self, layer: LayerCache) -> None:
        """Random states, and ring rows like those that steps append (the first step of a bench appends real ones)."""
        layer.state.normal_(std=self.spec.state_shape[2] ** -0.5)
        for name, ring in layer.ring.items():
            if name in ("dt", "beta"):
                ring.uniform_(0.001, 0.1)
            elif name == "g":
                ring.uniform_(-0.5, -0.001)
            else:
                ring.normal_()

    def cursors(self, committed: torch.Tensor) -> torch.Tensor:
        """Cursors of every slot with random ring starts."""
        start = torch.randint(0, self.plan.ring_len, (self.batch,), generator=self.generator)
        rows = [start, committed, torch.full_like(start, NO_LIMIT), torch.zeros_like(start)]
        return torch.stack(rows, 1).int().to(self.device)

    def schedule(self, phase: str) -> list[torch.Tensor]:
        """Cursors of the steps of a phase. Spread rows flush one in buffer_len a step, as in steady serving."""
        rows, L = torch.arange(self.batch), self.plan.buffer_len
        if phase == "cycle":
            return [self.cursors(1 + (rows + step) % L) for step in range(L)]
        if phase == "cycle_lockstep":
            return [self.cursors(torch.full_like(rows, 1 + step)) for step in range(L)]
        return [self.cursors(torch.full_like(rows, L if phase == "flush" else L // 2))]

    def launches(self, phase: str) -> list[Callable[[], None]]:
        """One launch for every step and pool; neighbours in time use different pools."""
        if phase == "stepwise":
            return [self._stepwise(pool) for pool in range(len(self.layers))]
        schedule = self.schedule(phase)
        return [self._step(pool, cursors) for cursors in schedule for pool in range(len(self.layers))]

    def _step(self, pool: int, cursors: torch.Tensor) -> Callable[[], None]:
        layer, slots = replace(self.layers[pool], cursors=cursors), self.slots[pool]
        return lambda: layer.ops.step(
            *(*self.inputs, layer.state, *layer.ring.values(), cursors, slots, None, self.out),
            buffer_len=self.plan.buffer_len,
            pad_slot_id=-1,
            max_window_len=1,
            **op_options(self.spec),
        )

    def _stepwise(self, pool: int) -> Callable[[], None]:
        layer, slots = self.layers[pool], self.slots[pool]
        return lambda: layer.ops.stepwise(
            *(*self.inputs, layer.state, slots, None, self.out),
            pad_slot_id=-1,
            max_window_len=1,
            **op_options(self.spec),
        )

    def time(self, phase: str, ceilings: Ceilings) -> Timing:
        """Median time of one step of `phase`."""
        us = time_graph(self.launches(phase))
        if not bool(torch.isfinite(self.out).all()):
            raise RuntimeError(f"{phase} at batch {self.batch} gave outputs that are not finite")
        nbytes = phase_bytes(self.traffic, phase, self.batch, self.plan.buffer_len)
        gbps = nbytes / us / 1000
        return Timing(self.batch, phase, us, nbytes, gbps / ceilings.read_gbps, gbps / ceilings.update_gbps)
