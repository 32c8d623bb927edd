"""The ops as torch sees them: schemas, fake implementations, opcheck, and torch.compile without graph breaks."""

from __future__ import annotations

import pytest
import torch
from families import (
    CASES,
    REPLAYED,
    RINGS,
    Case,
    cast,
    new_output,
    op_options,
    ordered_inputs,
    poisoned_ring,
    random_params,
    random_tokens,
)
from requests_model import LAYERS, Requests, small_plan

from replayssm import ReplayCache, delta_decode, mamba2_decode
from replayssm.cursors import NO_LIMIT


@pytest.mark.parametrize("name", ["step", "stepwise", "materialize"])
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[5]], ids=str)
def test_opcheck(case: Case, name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = cast(random_tokens(case, 3, generator) | random_params(case, generator), torch.float32)
    state = torch.randn(4, *case.spec.state_shape, generator=generator)
    ring = poisoned_ring(case, 4, 9, torch.float32, 0.5)
    cursors = torch.tensor([[8, 3, NO_LIMIT, 0]] * 4, dtype=torch.int32)
    slots, loc = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([0, 2, 3], dtype=torch.int32)
    rows = (slots, loc, new_output(case, 3, torch.float32).zero_())
    options = {"pad_slot_id": -1, "max_window_len": 2, **op_options(case)}
    if name == "step":
        args = (*ordered_inputs(case, inputs), state, *(ring[n] for n in RINGS[case.prefix]), cursors, *rows)
        options["buffer_len"] = 7
    elif name == "stepwise":
        args = (*ordered_inputs(case, inputs), state, *rows)
    else:
        head = (inputs["A"],) if case.prefix == "mamba2" else ()
        dst, kept = torch.zeros(2, *case.spec.state_shape), (ring[n] for n in REPLAYED[case.prefix])
        args = (*head, state, *kept, cursors, slots, None, dst, torch.arange(2, dtype=torch.int32))
        options = {"pad_slot_id": -1} | ({} if case.prefix == "mamba2" else {"use_qk_l2norm": True})
    torch.library.opcheck(getattr(torch.ops.replayssm, f"{case.prefix}_{name}").default, args, options)


def decode_all(cache: ReplayCache, slots: torch.Tensor, inputs: list[dict]) -> list[torch.Tensor]:
    step = cache.begin_step(slots)
    outputs = []
    for case, one in zip(LAYERS, inputs, strict=True):
        decode = mamba2_decode if case.prefix == "mamba2" else delta_decode
        outputs.append(decode(cache.layer(case.spec.layer_idx), step, **one))
    cache.commit(step)
    return outputs


def test_a_decode_loop_compiles_without_graph_breaks() -> None:
    eager, compiled = (Requests(ReplayCache(small_plan(), 3), seed=7) for _ in range(2))
    for requests in (eager, compiled):
        requests.load([0, 2])
    fast = torch.compile(decode_all, fullgraph=True, backend="aot_eager")
    slots = torch.tensor([2, 0])
    for _ in range(15):
        inputs = [
            cast(random_tokens(case, 2, eager.generator) | params, torch.float32)
            for case, params in zip(LAYERS, eager.params, strict=True)
        ]
        for a, b in zip(decode_all(eager.cache, slots, inputs), fast(compiled.cache, slots, inputs), strict=True):
            assert torch.equal(a, b)
    assert torch.equal(eager.cache.cursors, compiled.cache.cursors)
    for case in LAYERS:
        idx = case.spec.layer_idx
        assert torch.equal(eager.cache.layer(idx).state, compiled.cache.layer(idx).state)
