"""The portable GDN and KDA kernels in Triton's interpreter, at tiny shapes (run by test_delta_triton.py)."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from delta_case import (
    PAD,
    RINGS,
    Dims,
    commit_one,
    copy_of,
    error,
    new_layer,
    new_tokens,
    options,
    own,
    run_materialize,
    run_step,
    run_stepwise,
)

from replayssm.checks import ReplayError
from replayssm.ops.delta import launch, reference

CASES = {
    "gdn grouped": Dims(),
    "gdn odd sizes, processed gates": Dims(2, 2, 12, 10, raw=False),
    "gdn padded pages": Dims(page=48),
    "kda softplus": Dims(2, 2, kda=True),
    "kda lower bound, no bias": Dims(2, 2, kda=True, lower_bound=-5.0, bias=False),
    "kda processed gates, no norm": Dims(2, 2, kda=True, raw=False, l2norm=False, ring_len=7),
    "gdn fp16": Dims(act=torch.float16, checkpoint=torch.float16),
    "window of one": Dims(buffer_len=1, ring_len=2),
}
# Outputs are rounded once; fp32 sums of some 50 terms; a flush of fp16 rounds the state once a window.
OUT = {torch.float32: 2e-6, torch.float16: 1e-3}


@pytest.mark.parametrize("dims", CASES.values(), ids=CASES.keys())
def test_steps_follow_the_reference(dims: Dims) -> None:
    generator = torch.Generator().manual_seed(1)
    layer = new_layer(dims, 5, generator, "cpu")
    owned = [3, 0, 1]
    own(layer, dims, owned, generator, [dims.buffer_len, 2, dims.buffer_len])
    slots = torch.tensor([3, PAD, 0, 1], dtype=torch.int32)
    exact, plain = copy_of(layer, torch.float64), copy_of(layer)
    for _ in range(6):
        tokens = new_tokens(dims, 4, generator, "cpu")
        expected = run_step(reference.delta_step, dims, exact, tokens, slots)
        for out in (
            run_step(launch.delta_step, dims, layer, tokens, slots),
            run_stepwise(launch.delta_stepwise, dims, plain, tokens, slots),
        ):
            assert out[1].abs().max() == 0
            assert error(out[[0, 2, 3]], expected[[0, 2, 3]]) < OUT[dims.act]
        assert error(layer["state"][owned], exact["state"][owned]) < OUT[dims.checkpoint]
        for pool in (layer, exact):
            commit_one(dims, pool, slots)
    for name in (*RINGS, "state"):
        assert layer[name][[2, 4]].isnan().all(), name
    state = run_materialize(launch.delta_materialize, dims, layer, slots)
    assert state[[2, 4]].isnan().all()
    if dims.checkpoint == torch.float32:
        assert torch.equal(state[owned], plain["state"][owned])


def test_a_lowered_buffer_flushes_more_rows_than_it_may_hold() -> None:
    dims, generator = Dims(), torch.Generator().manual_seed(2)
    layer = new_layer(dims, 2, generator, "cpu")
    own(layer, dims, [1], generator)
    slots = torch.tensor([1], dtype=torch.int32)
    exact = copy_of(layer, torch.float64)
    for buffer_len in (4, 4, 4, 1, 1):
        tokens = new_tokens(dims, 1, generator, "cpu")
        expected = run_step(reference.delta_step, dims, exact, tokens, slots, buffer_len)
        assert error(run_step(launch.delta_step, dims, layer, tokens, slots, buffer_len), expected) < 2e-6
        assert error(layer["state"][1:], exact["state"][1:]) < 2e-6
        for pool in (layer, exact):
            commit_one(dims, pool, slots, buffer_len)


def test_materialize_stops_at_a_token() -> None:
    dims, generator = Dims(2, 2, kda=True), torch.Generator().manual_seed(3)
    layer = new_layer(dims, 3, generator, "cpu")
    own(layer, dims, [2, 0], generator)
    slots = torch.tensor([2, 0, PAD], dtype=torch.int32)
    for _ in range(3):
        run_step(launch.delta_step, dims, layer, new_tokens(dims, 3, generator, "cpu"), slots)
        commit_one(dims, layer, slots)
    counts = torch.tensor([1, 0, 3], dtype=torch.int32)
    expected = run_materialize(reference.delta_materialize, dims, copy_of(layer, torch.float64), slots, counts)
    state = run_materialize(launch.delta_materialize, dims, layer, slots, counts)
    assert error(state[[2, 0]], expected[[2, 0]]) < 2e-6
    assert torch.equal(state[0], layer["state"][0])


def test_a_destination_may_have_the_index_of_the_pad_slot() -> None:
    dims, generator = Dims(), torch.Generator().manual_seed(6)
    layer = new_layer(dims, 3, generator, "cpu")
    own(layer, dims, [1, 2], generator)
    slots, rows = torch.tensor([0, 2, 1], dtype=torch.int32), torch.tensor([2, 0, 1], dtype=torch.int32)
    dst = torch.full_like(layer["state"], float("nan"))
    rings = (layer[name] for name in RINGS if name != "ring_u")
    launch.delta_materialize(
        *(layer["state"], *rings, layer["cursors"], slots, None, dst, rows), pad_slot_id=0, use_qk_l2norm=dims.l2norm
    )
    assert torch.equal(dst[:2], layer["state"][[2, 1]]) and dst[2].isnan().all()


@pytest.mark.parametrize("scale", [6.0, -30.0])
def test_strong_and_vanishing_gates(scale: float) -> None:
    """exp(A_log) of 400 and of 1e-13: decays that underflow, and decays of one."""
    dims, generator = Dims(2, 2, kda=True), torch.Generator().manual_seed(4)
    layer = new_layer(dims, 1, generator, "cpu")
    layer["A_log"][:] = scale
    own(layer, dims, [0], generator)
    slots = torch.zeros(1, dtype=torch.int32)
    exact = copy_of(layer, torch.float64)
    for _ in range(6):
        tokens = new_tokens(dims, 1, generator, "cpu")
        expected = run_step(reference.delta_step, dims, exact, tokens, slots)
        # An exponent of some hundreds is itself good to 1e-7 of its value.
        assert error(run_step(launch.delta_step, dims, layer, tokens, slots), expected) < 1e-4
        for pool in (layer, exact):
            commit_one(dims, pool, slots)


def test_windows_without_query_start_loc_are_refused() -> None:
    dims, generator = Dims(), torch.Generator().manual_seed(5)
    layer = new_layer(dims, 1, generator, "cpu")
    own(layer, dims, [0], generator)
    before = copy_of(layer)
    tokens, slots = new_tokens(dims, 1, generator, "cpu"), torch.zeros(1, dtype=torch.int32)
    arguments = (tokens["q"], tokens["k"], tokens["v"], tokens["g"], tokens["beta"], layer["A_log"], layer["dt_bias"])
    rings, out = (layer[name] for name in RINGS), torch.zeros(1, 2, 8)
    with pytest.raises(ReplayError, match="max_window_len"):
        launch.delta_step(
            *(*arguments, layer["state"], *rings, layer["cursors"], slots, None, out),
            buffer_len=4,
            **{**options(dims), "max_window_len": 2},
        )
    assert torch.equal(layer["state"], before["state"])
    wide = replace(dims, checkpoint=torch.float64)
    with pytest.raises(ReplayError, match=r"state\.dtype"):
        run_stepwise(launch.delta_stepwise, wide, copy_of(layer, torch.float64), tokens, slots)
