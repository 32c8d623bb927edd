"""The portable Mamba-2 Triton kernels at tiny shapes against the float64 reference; run with TRITON_INTERPRET=1."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from mamba2_case import (
    Dims,
    commit_one,
    copy_of,
    error,
    new_layer,
    new_tokens,
    own,
    reference_step,
    run_step,
    run_stepwise,
    same_nans,
)

from replayssm.checks import ReplayError
from replayssm.ops.mamba2 import reference
from replayssm.ops.mamba2.configs import LaunchConfig
from replayssm.ops.mamba2.launch import mamba2_materialize, mamba2_step, mamba2_stepwise

# One rounding of a sum of ~10 terms for outputs; a state is one fma a row.
OUT = {torch.float32: 1e-6, torch.float16: 1e-3}
STATE = {torch.float32: 5e-7, torch.float16: 6e-4}
DIMS = [
    Dims(),
    Dims(act=torch.float16),
    Dims(act=torch.float16, checkpoint=torch.float16, page=48),
    Dims(head_dim=20, d_state=24, n_groups=4, extras=False, page=16),
    Dims(num_heads=3, head_dim=5, d_state=8, n_groups=1, ring_len=8),
]


def config(block_v: int = 16) -> dict[str, object]:
    return {"config": LaunchConfig("triton", block_v, 4)}


@pytest.mark.parametrize(("dims", "block_v"), list(product(DIMS, (8, 32))), ids=str)
def test_five_steps_of_rows_at_all_phases(dims: Dims, block_v: int) -> None:
    generator = torch.Generator().manual_seed(1)
    layer = new_layer(dims, 8, generator, "cpu")
    own(dims, layer, [5, 0, 7, 3], [dims.buffer_len, 0, 2, 1], generator)
    slots = torch.tensor([5, -1, 0, 7, 99, 3], dtype=torch.int32)
    for _ in range(5):
        tokens = new_tokens(dims, len(slots), generator, "cpu")
        want, exact = reference_step(dims, layer, tokens, slots)
        got = run_step(mamba2_step, dims, layer, tokens, slots, **config(block_v))
        assert error(got, want) < OUT[dims.act] * (1 if dims.checkpoint == torch.float32 else 2)
        assert (got[[1, 4]] == 0).all()
        for name, tolerance in (("state", STATE[dims.checkpoint]), ("ring_x", 0), ("ring_B", 0), ("ring_dt", 1e-6)):
            assert same_nans(layer[name], exact[name]), name
            assert error(layer[name].nan_to_num(), exact[name].nan_to_num()) <= tolerance, name
        commit_one(dims, layer, slots)


def test_a_flush_holds_what_stepwise_decoding_holds() -> None:
    dims, generator = Dims(num_heads=2, n_groups=1), torch.Generator().manual_seed(2)
    layer = new_layer(dims, 3, generator, "cpu")
    own(dims, layer, [2, 0], [0, 0], generator)
    slots = torch.tensor([2, 0], dtype=torch.int32)
    plain = copy_of(layer)
    for step in range(13):
        tokens = new_tokens(dims, 2, generator, "cpu")
        before = plain["state"].clone()
        got = run_step(mamba2_step, dims, layer, tokens, slots, **config())
        want = run_stepwise(mamba2_stepwise, plain, tokens, slots, **config(8))
        assert error(got, want) < 1e-6
        if step and step % dims.buffer_len == 0:
            assert torch.equal(layer["state"][[2, 0]], before[[2, 0]])
        commit_one(dims, layer, slots)


@pytest.mark.parametrize("dims", [Dims(), Dims(act=torch.float16, checkpoint=torch.float16)], ids=str)
def test_stepwise_against_float64(dims: Dims) -> None:
    generator = torch.Generator().manual_seed(3)
    layer = new_layer(dims, 4, generator, "cpu")
    own(dims, layer, [3, 1], [0, 0], generator)
    slots = torch.tensor([3, -1, 1], dtype=torch.int32)
    tokens = new_tokens(dims, 3, generator, "cpu")
    exact = copy_of(layer, torch.float64)
    exact_tokens = {n: None if t is None else t.double() for n, t in tokens.items()}
    want = run_stepwise(reference.mamba2_stepwise, exact, exact_tokens, slots)
    got = run_stepwise(mamba2_stepwise, layer, tokens, slots, **config(8))
    assert error(got, want) < OUT[dims.act]
    assert (got[1] == 0).all()
    assert same_nans(layer["state"], exact["state"])
    assert error(layer["state"].nan_to_num(), exact["state"].nan_to_num()) < STATE[dims.checkpoint]


@pytest.mark.parametrize("some", [True, False], ids=["first rows", "all rows"])
def test_materialize_elsewhere_and_in_place(some: bool) -> None:
    dims, generator = Dims(page=16), torch.Generator().manual_seed(4)
    layer = new_layer(dims, 6, generator, "cpu")
    own(dims, layer, [4, 0, 2], [4, 1, 3], generator)
    slots = torch.tensor([4, 0, -1, 2], dtype=torch.int32)
    count = torch.tensor([2, 0, 1, 9], dtype=torch.int32) if some else None
    names = ("A", "state", "ring_x", "ring_B", "ring_dt", "cursors")
    for in_place in (False, True):
        mine, exact = copy_of(layer), copy_of(layer, torch.float64)
        to = slots if in_place else torch.tensor([1, 0, 2, 99], dtype=torch.int32)
        results = []
        for values, run in ((mine, mamba2_materialize), (exact, reference.mamba2_materialize)):
            dst = (
                values["state"] if in_place else torch.full((3, *mine["state"].shape[1:]), float("nan")).to(values["A"])
            )
            rows = slice(None) if in_place or run is mamba2_materialize else slice(3)
            run(
                *(values[n] for n in names), slots[rows], None if count is None else count[rows], dst, to[rows],
                pad_slot_id=-1,
            )  # fmt: skip
            results.append(dst)
        assert same_nans(*results)
        assert error(results[0].nan_to_num(), results[1].nan_to_num()) < STATE[torch.float32]


def test_windows_without_query_start_loc_are_refused() -> None:
    dims, generator = Dims(), torch.Generator().manual_seed(5)
    layer = new_layer(dims, 2, generator, "cpu")
    own(dims, layer, [1], [1], generator)
    before = copy_of(layer)
    tokens, slots = new_tokens(dims, 1, generator, "cpu"), torch.tensor([1], dtype=torch.int32)
    with pytest.raises(ReplayError, match="max_window_len is 2"):
        run_step(mamba2_step, dims, layer, tokens, slots, max_window_len=2)
    assert all(torch.equal(layer[n].nan_to_num(), before[n].nan_to_num()) for n in ("state", "ring_x", "ring_B"))


def test_buffer_len_may_be_lowered_at_run_time() -> None:
    dims, generator = Dims(num_heads=2, n_groups=1), torch.Generator().manual_seed(6)
    layer = new_layer(dims, 2, generator, "cpu")
    own(dims, layer, [1, 0], [3, 4], generator)
    slots, lowered = torch.tensor([1, 0], dtype=torch.int32), replace(dims, buffer_len=1)
    for _ in range(3):
        tokens = new_tokens(dims, 2, generator, "cpu")
        want, exact = reference_step(lowered, layer, tokens, slots)
        got = run_step(mamba2_step, lowered, layer, tokens, slots, **config())
        assert error(got, want) < 1e-6
        assert error(layer["state"], exact["state"]) < STATE[torch.float32]
        commit_one(lowered, layer, slots)
