"""Whole lifecycles of requests with read copies and low-precision checkpoints, in memory of our own and in pages."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from formats_model import CHECKPOINTS, LAYERS, MIXED, READS, Pair, formats_plan
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from lifecycle_rules import LifecycleRules

from replayssm import GDNSpec, Plan, ReplayCache, ReplayError
from replayssm.cursors import NUM_COMMITTED
from replayssm.layer import layer_shapes

NUM_SLOTS, NUM_BLOCKS = 5, 6
ROUNDED = st.sampled_from([("fp32", "nearest"), ("fp16", "stochastic"), ("bf16", "nearest"), ("fp8", "stochastic")])


class FormatMachine(LifecycleRules):
    """After any operation every read copy is that of its checkpoint, and checkpoints are those of a cache without."""

    num_slots = NUM_SLOTS
    model: Pair

    @initialize(
        seed=st.integers(0, 2**16),
        pad=st.sampled_from([-1, 0]),
        spread=st.booleans(),
        read=st.sampled_from([*READS, tuple(MIXED.items())]),
        rounded=ROUNDED,
    )
    def start(self, seed: int, pad: int, spread: bool, read: Any, rounded: tuple[str, str]) -> None:
        checkpoint, rounding = rounded
        plan = formats_plan(read=read, checkpoint=checkpoint, rounding=rounding, spread_flushes=spread, seed=seed)
        self.pad, self.model = pad, Pair(plan, NUM_SLOTS, seed, pad)

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        slot = self.one(data)
        committed = int(self.model.cache.cursors[slot, NUM_COMMITTED])
        self.model.both("take_back", [slot], [data.draw(st.integers(0, committed))])

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data())
    def empty_the_ring(self, data: st.DataObject) -> None:
        self.model.both("reset", [self.one(data)])


FormatMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=20)
test_lifecycles = FormatMachine.TestCase


def byte_pages(plan: Plan) -> tuple[dict[int, dict[str, torch.Tensor]], list[torch.Tensor]]:
    """A page of bytes a block and layer, all ones (NaN in every float format), which holds every tensor and a gap."""
    layers, pages = {}, []
    for spec in plan.layers:
        shapes = layer_shapes(spec, plan)
        sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, (shape, dtype) in shapes.items()}
        page = torch.full((NUM_BLOCKS, sum(size + 32 & ~15 for size in sizes.values()) + 48), 255, dtype=torch.uint8)
        at, tensors = 0, {}
        for name, (shape, dtype) in shapes.items():
            tensors[name] = page[:, at : at + sizes[name]].view(dtype).view(NUM_BLOCKS, *shape)
            at += sizes[name] + 32 & ~15
        layers[spec.layer_idx] = tensors
        pages.append(page)
    return layers, pages


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("read", READS)
def test_engine_owned_pages(read: str, checkpoint: str) -> None:
    plan = formats_plan(read=read, checkpoint=checkpoint)
    layers, pages = byte_pages(plan)
    cursors = torch.full((NUM_BLOCKS, 4), 2**30, dtype=torch.int32)
    pair = Pair(plan, NUM_BLOCKS, pad=0)
    pair.cache = ReplayCache(plan, NUM_BLOCKS, layers=layers, cursors=cursors, pad_slot_id=0)
    for case, params in zip(LAYERS, pair.params, strict=True):
        if case.prefix == "mamba2":
            pair.cache.bind(case.spec.layer_idx, params["A"].float())
    before = [page.clone() for page in pages]
    pair.load([5, 2])
    for _ in range(9):
        pair.step([2, 0, 5], [2, 1, 3], [1, 1, 2])
    for cache in (pair.cache, pair.plain):
        cache.cursors[[0, 1, 3, 4]] = 7
    pair.check()
    pair.both("flush", [5, 2])
    pair.check()
    for page, old in zip(pages, before, strict=True):
        assert torch.equal(page[[0, 1, 3, 4]], old[[0, 1, 3, 4]])
        assert torch.equal(page[:, -48:], old[:, -48:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("read_scales"), "layers[2] is ['beta', 'g', 'k', 'read_codes', 'state'"),
        (lambda t: t.update(state_scales=t["read_scales"]), "allowed: the names ['beta', 'g', 'k', 'read_codes',"),
        (
            lambda t: t.update(read_codes=t["read_codes"].view(torch.uint8)),
            "layers[2]['read_codes'].dtype is torch.uint8",
        ),
        (lambda t: t.update(read_scales=t["read_scales"].float()), "layers[2]['read_scales'].dtype is torch.float32"),
        (lambda t: t.update(read_scales=t["read_scales"][:, :, :1]), "layers[2]['read_scales'].shape is [5, 2, 1, 1]"),
        (lambda t: t.update(read_codes=t["read_codes"].mT.contiguous().mT), "layers[2]['read_codes'].stride()"),
    ],
)
def test_wrong_pages_are_refused(change: Any, message: str) -> None:
    plan = formats_plan(read="int8")
    made = ReplayCache(plan, NUM_SLOTS)
    layers = {}
    for case in LAYERS:
        layer = made.layer(case.spec.layer_idx)
        copy = {"read_codes": layer.read_copy.codes, "read_scales": layer.read_copy.scales}
        layers[case.spec.layer_idx] = {"state": layer.state, **layer.ring, **copy}
    change(layers[2])
    with pytest.raises(ReplayError) as error:
        ReplayCache(plan, NUM_SLOTS, layers=layers)
    assert message in str(error.value)


@pytest.mark.parametrize("K", [8, 16, 24, 48])
@pytest.mark.parametrize(("read", "block"), [("int8", 32), ("nvfp4", 16)])
def test_columns_that_cannot_be_cut_into_blocks(read: str, block: int, K: int) -> None:
    layers = (GDNSpec(1, 1, K, 4),)
    if K % block == 0:
        ReplayCache(Plan(layers, read=read), 1)
        return
    with pytest.raises(ReplayError, match=f"read is '{read}' with K = {K}; allowed: K divisible by {block}"):
        Plan(layers, read=read)


def test_states_with_nan_stay_in_their_blocks() -> None:
    """A NaN that is loaded reads as NaN in its block, and another request does not notice."""
    pair = Pair(formats_plan(read="nvfp4"))
    states = {c.spec.layer_idx: torch.randn(2, *c.spec.state_shape, generator=pair.generator) for c in LAYERS}
    for state in states.values():
        state[0, 0, 0, 0] = torch.nan
    pair.cache.load([4, 1], states)
    for case in LAYERS:
        read = pair.cache.layer(case.spec.layer_idx).stored.for_reads(torch.tensor([4, 1]))
        assert read[0, 0, 0, :16].isnan().all() and int(read.isnan().sum()) == 16


def test_bytes_are_what_the_plan_says() -> None:
    pick = random.Random(1)
    for _ in range(12):
        read = {case.spec.layer_idx: pick.choice([*READS, "none"]) for case in LAYERS}
        checkpoint = pick.choice(CHECKPOINTS)
        rounding = "nearest" if checkpoint == "fp32" else pick.choice(["nearest", "stochastic"])
        plan = formats_plan(read=read, checkpoint=checkpoint, rounding=rounding)
        assert ReplayCache(plan, 7).nbytes == 7 * plan.memory_per_request
