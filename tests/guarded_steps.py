"""All launches of layers on tensors that end, or begin, where memory does; with TRITON_INTERPRET=1 the portable ones.

Run in a process of its own: a failure ends it, or all use of the GPU in it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from guarded import DEVICE, INTERPRETED, Place, check

from replayssm import GDNSpec, KDASpec, LayerSpec, Mamba2Spec, Plan, ReplayCache, delta_decode, mamba2_decode
from replayssm.cursors import NO_LIMIT
from replayssm.layer import LayerCache, layer_shapes
from replayssm.presets import preset
from replayssm.workload import random_inputs, random_parameters

NOT_A_SLOT = -1 if INTERPRETED else 1 << 20  # a cache on the CPU refuses others
WINDOW = 4
MODELS = {
    "nano": "nemotron-3-nano-4b",
    "super": "nemotron-3-super-120b-a12b",
    "gdn32": "qwen3.5-4b",
    "gdn64": "qwen3.5-122b-a10b",
    "kda": "kimi-linear-48b",
}
TINY: dict[str, LayerSpec] = {
    "nano": Mamba2Spec(num_heads=2, head_dim=5, d_state=48, n_groups=1, layer_idx=0),
    "gdn32": GDNSpec(num_k_heads=1, num_v_heads=2, head_k_dim=48, head_v_dim=5, layer_idx=0),
    "kda": KDASpec(num_k_heads=1, num_v_heads=1, head_k_dim=32, head_v_dim=5, layer_idx=0),
}
SPECS = {name: preset(model)[0] for name, model in MODELS.items()} | {f"tiny_{name}": TINY[name] for name in TINY}
FORMATS = (("fp32", "none"), ("fp32", "nvfp4"), ("bf16", "none"))
MORE_FORMATS = (("fp32", "int8"), ("fp32", "fp8"), ("bf16", "bf16"), ("fp8", "none"))
SOME, LARGE = 8, 260  # rows; kernels of their own serve batches so large
PORTABLE = [f"tiny_{name}" for name in TINY]  # shapes that no other kernels serve
if INTERPRETED:
    SOME = 4
CASES = [(name, *pair, SOME) for name in PORTABLE for pair in (("fp32", "none"), ("fp8", "nvfp4"))]
TREES, STEPWISE = CASES, [(name, "fp32", SOME) for name in PORTABLE]
if not INTERPRETED:
    # What a tree reads more is the same in most formats.
    TREES = [(name, *pair, SOME) for name in MODELS for pair in FORMATS[:2]]
    STEPWISE += [(name, checkpoint, batch) for name in TINY for checkpoint in ("fp32", "bf16") for batch in (1, 8, 64)]
    CASES += [(name, *pair, batch) for name in MODELS for pair in FORMATS for batch in (1, SOME, 64)]
    CASES += [(name, *pair, LARGE) for name in TINY for pair in FORMATS]
    CASES += [(name, *pair, batch) for name in TINY for pair in MORE_FORMATS for batch in (SOME, 64, LARGE)]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Rows:
    """A batch: slots, window lengths, and how many slots there are."""

    slots: list[int]
    lens: list[int]
    num_slots: int


def some_rows(batch: int, kind: str) -> Rows:
    """ "whole": the last row has the last slot and a whole window. "ragged": padding, more rows than slots; no token

    in the last rows, so that theirs would lie past the inputs."""
    if kind == "whole":
        return Rows([*range(1, batch + 1)], [WINDOW] * batch, batch + 1)
    count = batch - 2
    lens = [3 * i % (WINDOW + 1) for i in range(count - 1)]
    slots = [*reversed(range(count))]
    return Rows([slots[0], -1, *slots[1:], NOT_A_SLOT], [*lens, 2, 0, 0], count)


def kinds(batch: int) -> list[str]:
    return ["whole"] if batch == 1 else ["ragged"] if batch > 8 else ["whole", "ragged"]


def some_memory(plan: Plan, num_slots: int) -> Tensors:
    """The tensors of a layer with random states, their copies, and rings at all phases; and its cursors."""
    (spec,), generator = plan.layers, torch.Generator(DEVICE).manual_seed(0)
    cache = ReplayCache(plan, num_slots)
    cache.load(range(num_slots), {0: torch.randn(num_slots, *spec.state_shape, generator=generator, device=DEVICE)})
    layer = cache.layer(0)
    for name, ring in layer.ring.items():
        values = torch.randn(ring.shape, generator=generator, device=DEVICE)
        ring.copy_({"dt": values.abs() / 20, "g": -values.abs() / 10, "beta": values.sigmoid()}.get(name, values))
    for slot in range(num_slots):
        back = num_slots - 1 - slot  # the last slot's ring is full, and wraps
        count = (16, 0, 15, 8, 13, 1, 7)[back % 7]
        cache.cursors[slot] = torch.tensor([(-1 - 5 * back) % plan.ring_len, count, NO_LIMIT, 0])
    tensors = {"state": layer.state, **layer.ring, **layer.op_formats()}
    return {name: tensors[name] for name in layer_shapes(spec, plan)} | {"cursors": cache.cursors}


def some_inputs(plan: Plan, tokens: int) -> Tensors:
    (spec,), generator = plan.layers, torch.Generator().manual_seed(1)
    inputs = random_inputs(spec, tokens, plan.activation, generator)
    if isinstance(spec, Mamba2Spec):
        inputs["z"] = torch.randn(inputs["x"].shape, generator=generator).to(plan.activation)
    return {n: t.to(DEVICE) for n, t in (inputs | random_parameters(spec, generator)).items()}


def decode(layer: LayerCache, step: Any, inputs: Tensors, place: Place) -> torch.Tensor:
    mamba2 = isinstance(layer.spec, Mamba2Spec)
    out = place(torch.full_like(inputs["x" if mamba2 else "v"], float("nan")))
    return (mamba2_decode if mamba2 else delta_decode)(layer, step, **inputs, out=out)


def two_steps(plan: Plan, rows: Rows, tree: bool, place: Place) -> list[torch.Tensor]:
    """Two steps, what ends them, and what reads the result: outputs, and all that memory holds then."""
    memory = {name: place(tensor) for name, tensor in some_memory(plan, rows.num_slots).items()}
    cursors = memory.pop("cursors")
    cache = ReplayCache(plan, rows.num_slots, layers={0: memory}, cursors=cursors)
    layer, ends, ring = cache.layer(0), cache._commits, plan.route == "replay"
    if ends._table is not None:
        ends._table = replace(ends._table, entries=place(ends._table.entries))
    if layer.seeds is not None:
        layer.seeds = place(layer.seeds)

    def numbers(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return place(torch.tensor(values, dtype=dtype, device=DEVICE))

    lens = rows.lens if plan.num_draft_tokens else [1] * len(rows.slots)
    windows: dict[str, Any] = {}
    if plan.num_draft_tokens:
        starts = torch.tensor([0, *lens]).cumsum(0).tolist()
        windows = {"query_start_loc": numbers(starts), "max_window_len": WINDOW}
    if tree:
        windows["parents"] = numbers([i // 2 - (i < 2) for n in lens for i in range(n)])
    slots, inputs = numbers(rows.slots), {n: place(t) for n, t in some_inputs(plan, sum(lens)).items()}
    results = []
    for _ in range(2):
        step = cache.begin_step(slots, **windows)
        results.append(decode(layer, step, inputs, place))
        if tree:
            paths = [([[-1] * 3, [0, -1, -1], [1, -1, -1]][n] if n < 3 else [1, n - 1, -1]) for n in lens]
            cache.commit(step, accepted_paths=numbers(paths))
        else:
            cache.commit(step, numbers([(n + 1) // 2 for n in lens]) if ring else None)
    owned = [slot for slot in rows.slots if 0 <= slot < rows.num_slots]
    if ring:
        ends.take_back(numbers(owned, torch.int64), numbers([1] * len(owned)))
    dst, count = place(torch.zeros(len(slots), *layer.spec.state_shape, device=DEVICE)), numbers([1] * len(slots))
    for num_tokens in (None, count):
        layer.replay(slots, num_tokens, dst, numbers([*range(len(slots))]), -1)
    return [*results, dst, *cache._tensors()]


def plan_of(shape: str, checkpoint: str, read: str, **options: Any) -> Plan:
    """Interpreted kernels are the portable ones, which serve whatever the others do not."""
    options |= {"activation": torch.float32 if INTERPRETED else torch.bfloat16, "device": DEVICE, "backend": "triton"}
    return Plan((SPECS[shape],), checkpoint=checkpoint, read=read, **options)


@pytest.mark.parametrize(("shape", "checkpoint", "read", "batch"), CASES)
def test_tokens(shape: str, checkpoint: str, read: str, batch: int) -> None:
    plan = plan_of(shape, checkpoint, read)
    for kind in kinds(batch):
        check(lambda place, kind=kind: two_steps(plan, some_rows(batch, kind), False, place))


@pytest.mark.parametrize(("shape", "checkpoint", "read", "batch"), CASES)
def test_windows(shape: str, checkpoint: str, read: str, batch: int) -> None:
    plan = plan_of(shape, checkpoint, read, num_draft_tokens=WINDOW - 1)
    for kind in kinds(batch):
        check(lambda place, kind=kind: two_steps(plan, some_rows(batch, kind), False, place))


@pytest.mark.parametrize(("shape", "checkpoint", "read", "batch"), TREES)
def test_trees(shape: str, checkpoint: str, read: str, batch: int) -> None:
    plan = plan_of(shape, checkpoint, read, num_draft_tokens=WINDOW - 1)
    for kind in kinds(batch):
        check(lambda place, kind=kind: two_steps(plan, some_rows(batch, kind), True, place))


@pytest.mark.parametrize(("shape", "checkpoint", "batch"), STEPWISE)
def test_stepwise(shape: str, checkpoint: str, batch: int) -> None:
    plan = plan_of(shape, checkpoint, "none", route="stepwise")
    for kind in kinds(batch):
        check(lambda place, kind=kind: two_steps(plan, some_rows(batch, kind), False, place))


@pytest.mark.parametrize("drafts", [0, WINDOW - 1])
@pytest.mark.parametrize("shape", PORTABLE)
def test_stochastic_rounding(shape: str, drafts: int) -> None:
    plan = plan_of(shape, "fp8", "nvfp4", num_draft_tokens=drafts, rounding="stochastic")
    check(lambda place: two_steps(plan, some_rows(SOME, "ragged"), drafts > 0, place))
