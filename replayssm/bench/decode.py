"""Times one layer's decode step: ordinary decoding, whole flush cycles (spread and in lockstep), and flushes alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from replayssm.bench.timing import Ceilings, time_graph
from replayssm.cursors import NO_LIMIT
from replayssm.layer import LayerCache, allocate_layer
from replayssm.plan import Plan
from replayssm.seeds import first_seeds
from replayssm.traffic import CURSOR_BYTES, LayerTraffic, replay_bytes, stepwise_bytes
from replayssm.workload import op_options, positional, random_inputs, random_parameters

POOL_BYTES = 400 * 2**20  # what steps read rotates over this much, so that no cache holds it
FILL_ELEMENTS = 2**26  # of random states that are rounded to a low-precision format at a time
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
    """Pools of one layer's states, filled with random requests at every position of the ring.

    Ordinary decoding is timed in the checkpoint's format, for fp8 (which it does not have on a GPU) in fp32.
    """

    def __init__(self, plan: Plan, batch: int, seed: int = 0) -> None:
        self.plan, self.batch, self.spec = plan, batch, plan.layers[0]
        self.device = torch.device(plan.device)
        self.generator = torch.Generator().manual_seed(seed)
        plain = {"checkpoint": "fp32", "read": "none", "rounding": "nearest"}
        self.plain_plan = plan.with_options(**plain) if plan.checkpoint == "fp8" else plan
        self.traffic = plan.layer_traffic(self.spec)
        pools = max(2, -(-POOL_BYTES // (batch * (self.traffic.read_copy or self.traffic.state))))
        cursors = torch.zeros(batch, 4, dtype=torch.int32, device=self.device)
        seeds = first_seeds(plan.seed, batch, self.device) if plan.rounding == "stochastic" else None
        self.layers = [allocate_layer(self.spec, plan, batch, cursors, seeds) for _ in range(pools)]
        self.slots = [torch.randperm(batch, generator=self.generator).int().to(self.device) for _ in range(pools)]
        inputs = random_inputs(self.spec, batch, plan.activation, self.generator)
        every = inputs | random_parameters(self.spec, self.generator)
        self.inputs = positional(self.spec, {name: value.to(self.device) for name, value in every.items()})
        self.out = torch.empty(batch, *self.spec.state_shape[:2], dtype=plan.activation, device=self.device)
        for layer in self.layers:
            self._fill(layer)

    def _fill(self, layer: LayerCache) -> None:
        """Random states, and ring rows like those that steps append (the first step of a bench appends real ones)."""
        std = self.spec.state_shape[2] ** -0.5
        slots = torch.arange(self.batch, device=self.device)
        for some in slots.split(max(1, FILL_ELEMENTS // layer.state[0].numel())):
            layer.load(some, torch.empty(len(some), *self.spec.state_shape, device=self.device).normal_(std=std))
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
        """Launches that take every step equally often and every pool; neighbours in time use different pools."""
        if phase == "stepwise":
            return self._stepwise()
        schedule = self.schedule(phase)
        pools, steps = len(self.layers), len(schedule)
        count = steps * -(-pools // steps)
        return [self._step(i % pools, schedule[i % steps]) for i in range(count)]

    def _step(self, pool: int, cursors: torch.Tensor) -> Callable[[], None]:
        layer, slots = replace(self.layers[pool], cursors=cursors), self.slots[pool]
        return lambda: layer.ops.step(
            *(*self.inputs, layer.state, *layer.ring.values(), cursors, slots, None, self.out),
            buffer_len=self.plan.buffer_len,
            pad_slot_id=-1,
            max_window_len=1,
            **layer.op_formats(),
            **op_options(self.spec),
        )

    def _stepwise(self) -> list[Callable[[], None]]:
        """A launch for every pool, of states of their own where ordinary decoding does not have the format."""
        states = [layer.state for layer in self.layers]
        if self.plain_plan is not self.plan:
            pools = max(2, -(-POOL_BYTES // states[0].numel() // 4))
            states = [torch.randn(states[0].shape, device=self.device) / self.spec.state_shape[2] for _ in range(pools)]
        return [
            self._stepwise_launch(state, slots)
            for state, slots in zip(states, itertools.cycle(self.slots), strict=False)
        ]

    def _stepwise_launch(self, state: torch.Tensor, slots: torch.Tensor) -> Callable[[], None]:
        options = {"pad_slot_id": -1, "max_window_len": 1, **op_options(self.spec)}
        return lambda: self.layers[0].ops.stepwise(*self.inputs, state, slots, None, self.out, **options)

    def time(self, phase: str, ceilings: Ceilings) -> Timing:
        """Median time of one step of `phase`."""
        us = time_graph(self.launches(phase))
        if not bool(torch.isfinite(self.out).all()):
            raise RuntimeError(f"{phase} at batch {self.batch} gave outputs that are not finite")
        traffic = self.plain_plan.layer_traffic(self.spec) if phase == "stepwise" else self.traffic
        nbytes = phase_bytes(traffic, phase, self.batch, self.plan.buffer_len)
        gbps = nbytes / us / 1000
        return Timing(self.batch, phase, us, nbytes, gbps / ceilings.read_gbps, gbps / ceilings.update_gbps)
