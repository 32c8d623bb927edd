"""Times a layer at several batches, and puts the times beside ceilings that were measured before and after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from replayssm.bench.decode import PHASES, LayerBench, Timing
from replayssm.bench.timing import Ceilings
from replayssm.bench.windows import WINDOW_PHASES, WindowBench
from replayssm.plan import Plan


def time_layer(
    plan: Plan, batches: Sequence[int], ceilings: Ceilings, on_batch: Callable[[int], object] = lambda batch: None
) -> list[Timing]:
    """All phases of the plan's first layer at each batch: those of windows if the plan has drafts, else of decoding."""
    timings = []
    for batch in batches:
        on_batch(batch)
        bench = WindowBench(plan, batch) if plan.num_draft_tokens else LayerBench(plan, batch)
        phases = WINDOW_PHASES if plan.num_draft_tokens else PHASES
        timings += [bench.time(phase, ceilings) for phase in phases]
        del bench
        torch.cuda.empty_cache()
    return timings


def against(timings: Sequence[Timing], ceilings: Ceilings) -> list[Timing]:
    """The same times as fractions of other ceilings."""
    return [
        replace(t, read_fraction=t.gbps / ceilings.read_gbps, update_fraction=t.gbps / ceilings.update_gbps)
        for t in timings
    ]


def by_batch(timings: Sequence[Timing]) -> dict[int, dict[str, Timing]]:
    """Batch -> phase -> timing."""
    table: dict[int, dict[str, Timing]] = {}
    for timing in timings:
        table.setdefault(timing.batch, {})[timing.phase] = timing
    return table
