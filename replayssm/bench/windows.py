"""Times one layer's window steps: rows at random positions of which a fifth flushes, and all rows half way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from replayssm.bench.decode import LayerBench, Timing
from replayssm.bench.timing import Ceilings, time_graph
from replayssm.plan import Plan
from replayssm.traffic import CURSOR_BYTES
from replayssm.workload import op_options, positional, random_inputs, random_parameters

FLUSHING = 0.2  # of the rows; fewer than three rows have none
DRAWS = 8  # different cursors of a phase
WINDOW_PHASES = ("token_half", "token_mixed", "window_half", "window_mixed")


class WindowBench(LayerBench):
    """Windows of `plan.max_window_len` tokens a row, and one token a row, over the same pools and positions.

    `half`: half the ring committed and no flush; `mixed`: rows at random positions, a fifth of them flushing.
    """

    def __init__(self, plan: Plan, batch: int, seed: int = 0) -> None:
        super().__init__(plan, batch, seed)
        self.window = plan.max_window_len
        tokens = batch * self.window
        every = random_inputs(self.spec, tokens, plan.activation, self.generator)
        every |= random_parameters(self.spec, self.generator)
        self.window_inputs = positional(self.spec, {name: value.to(self.device) for name, value in every.items()})
        self.starts = torch.arange(0, tokens + 1, self.window, dtype=torch.int32, device=self.device)
        self.window_out = torch.empty(tokens, *self.spec.state_shape[:2], dtype=plan.activation, device=self.device)
        self._committed: dict[str, list[torch.Tensor]] = {}

    def committed(self, phase: str) -> list[torch.Tensor]:
        """Committed rows of every row of the batch, one tensor a draw."""
        if phase not in self._committed:
            tokens, most = self._tokens(phase), self.plan.buffer_len
            if phase.endswith("half"):
                self._committed[phase] = [torch.full((self.batch,), min(most // 2, most - tokens))]
            else:
                self._committed[phase] = [self._mixed(tokens, most) for _ in range(DRAWS)]
        return self._committed[phase]

    def _mixed(self, tokens: int, most: int) -> torch.Tensor:
        flushing = torch.randperm(self.batch, generator=self.generator) < round(FLUSHING * self.batch)
        late = torch.randint(most - tokens + 1, most + 1, (self.batch,), generator=self.generator)
        early = torch.randint(1, max(2, most - tokens + 1), (self.batch,), generator=self.generator)
        return torch.where(flushing, late, early.clamp(max=most - tokens))

    def _tokens(self, phase: str) -> int:
        return self.window if phase.startswith("window") else 1

    def launches(self, phase: str) -> list[Callable[[], None]]:
        """Launches that take every draw and every pool; neighbours in time use different pools."""
        if phase not in WINDOW_PHASES:
            return super().launches(phase)
        make = self._window if self._tokens(phase) > 1 else self._step
        schedule = [self.cursors(committed) for committed in self.committed(phase)]
        pools, draws = len(self.layers), len(schedule)
        return [make(i % pools, schedule[i % draws]) for i in range(max(pools, draws))]

    def _window(self, pool: int, cursors: torch.Tensor) -> Callable[[], None]:
        layer, slots = replace(self.layers[pool], cursors=cursors), self.slots[pool]
        rows = (cursors, slots, self.starts, self.window_out)
        return lambda: layer.ops.step(
            *(*self.window_inputs, layer.state, *layer.ring.values(), *rows),
            buffer_len=self.plan.buffer_len,
            pad_slot_id=-1,
            max_window_len=self.window,
            **layer.op_formats(),
            **op_options(self.spec),
        )

    def nbytes(self, phase: str) -> int:
        """The fewest bytes of a step of the phase, mean over its draws."""
        moved, tokens, t = 0, self._tokens(phase), self.traffic
        for committed in self.committed(phase):
            for rows in committed.tolist():
                if rows and rows + tokens > self.plan.buffer_len:
                    moved += 2 * t.state + t.read_copy + rows * t.row_replay
                else:
                    moved += (t.read_copy or t.state) + rows * t.row_read
        fixed = tokens * (t.row_append + t.token_io) + CURSOR_BYTES
        return t.params + self.batch * fixed + round(moved / len(self.committed(phase)))

    def time(self, phase: str, ceilings: Ceilings) -> Timing:
        """Median time of one step of `phase`."""
        if phase not in WINDOW_PHASES:
            return super().time(phase, ceilings)
        us, out = time_graph(self.launches(phase)), self.window_out if self._tokens(phase) > 1 else self.out
        if not bool(torch.isfinite(out).all()):
            raise RuntimeError(f"{phase} at batch {self.batch} gave outputs that are not finite")
        nbytes = self.nbytes(phase)
        gbps = nbytes / us / 1000
        return Timing(self.batch, phase, us, nbytes, gbps / ceilings.read_gbps, gbps / ceilings.update_gbps)
