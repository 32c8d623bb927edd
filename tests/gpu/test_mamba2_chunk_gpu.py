"""Flushes that take their rows together on the tensor cores, beside 16-bit checkpoints of Mamba-2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
from test_mamba2_gpu import OUT, SHAPES, STATE, check_step, some_layer

from replayssm.ops.mamba2 import reference

pytestmark = pytest.mark.gpu
launch = pytest.importorskip("replayssm.ops.mamba2.launch")
configs = pytest.importorskip("replayssm.ops.mamba2.configs")
BF16, FP16 = torch.bfloat16, torch.float16
SMALL = {
    name: replace(SHAPES[name], num_heads=heads, n_groups=2)
    for name, heads in {"super": 32, "nano": 24, "falcon": 16, "granite": 16}.items()
}


def window_step(**arguments: Any) -> None:
    """A step of one token a row by the kernels for windows."""
    rows = arguments["slot_indices"].shape[0]
    loc = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    launch.mamba2_step(**arguments | {"query_start_loc": loc})


STEPS = {"one token": launch.mamba2_step, "window": window_step}


@pytest.mark.parametrize("batch", [1, 3, 8, 21, 40, 70])
@pytest.mark.parametrize("checkpoint", [BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", SMALL)
def test_against_float64(shape: str, checkpoint: torch.dtype, batch: int) -> None:
    check_step(replace(SMALL[shape], checkpoint=checkpoint), batch, steps=2, replay="chunk")


@pytest.mark.parametrize("act", [BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", ["super", "nano", "granite"])
def test_every_configuration(shape: str, act: torch.dtype) -> None:
    dims = replace(SMALL[shape], checkpoint=act, act=act)
    layer = configs.Shape(dims.num_heads, dims.n_groups, dims.head_dim, dims.d_state, 2, True, "sm90")
    chosen = [configs.step_config(batch, layer, True) for batch in (1, 3, 8, 16, 32, 64, 128, 512)]
    together = [config for config in dict.fromkeys(chosen) if config.chunked]
    assert together
    for config in together:
        check_step(dims, 21, config=config)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("act", [BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", SMALL)
def test_states_are_rounded_like_those_of_serial_flushes(shape: str, act: torch.dtype, step: str) -> None:
    """Sums that are accurate to fp32 fall on the wrong side of a rounding boundary as rarely as serial ones (x 2)."""
    dims = replace(SMALL[shape], checkpoint=BF16, act=act)
    wrong = {"serial": 0, "chunk": 0}
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        layer = new_layer(dims, 8, generator, "cuda")
        own(dims, layer, [6, 1, 0, 4, 2, 7], [16] * 6, generator)
        layer["state"] *= 10.0 ** (seed - 2)
        slots = torch.tensor([6, 1, 0, 4, 2, 7], dtype=torch.int32, device="cuda")
        tokens = new_tokens(dims, 6, generator, "cuda")
        _, exact = reference_step(dims, layer, tokens, slots)
        want = exact["state"][slots.long()].to(BF16)
        for replay in wrong:
            mine = copy_of(layer)
            run_step(STEPS[step], dims, mine, tokens, slots, replay=replay)
            wrong[replay] += int((mine["state"][slots.long()] != want).sum())
    assert wrong["chunk"] <= 2 * wrong["serial"] + 6 * wrong["serial"] ** 0.5 + 10, wrong


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", ["super", "nano"])
def test_64_windows_err_no_more_than_serial_ones(shape: str, step: str) -> None:
    dims = replace(SMALL[shape], num_heads=SMALL[shape].num_heads // 2, checkpoint=BF16)
    generator = torch.Generator().manual_seed(2)
    layer = new_layer(dims, 3, generator, "cuda")
    own(dims, layer, [2, 0], [0, 0], generator)
    layers = {"serial": layer, "chunk": copy_of(layer)}
    exact, slots = copy_of(layer, torch.float64), torch.tensor([2, 0], dtype=torch.int32, device="cuda")
    for t in range(64 * 16 + 1):
        tokens = new_tokens(dims, 2, generator, "cuda")
        if t == 64 * 16:
            want = exact["state"][slots.long()].clone()
        for replay, mine in layers.items():
            run_step(STEPS[step], dims, mine, tokens, slots, replay=replay)
            commit_one(dims, mine, slots)
        double = {n: None if x is None else x.double() for n, x in tokens.items()}
        run_stepwise(reference.mamba2_stepwise, exact, double, slots)
    errors = {replay: error(mine["state"][slots.long()], want) for replay, mine in layers.items()}
    # Both are roundings to bf16 once a window, at the same places up to rare boundary cases.
    assert errors["chunk"] <= 1.01 * errors["serial"], errors


@pytest.mark.parametrize("replay", ["serial", "chunk"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("checkpoint", [torch.float32, BF16], ids=str)
def test_a_lowered_limit_flushes_more_rows_than_it_allows(checkpoint: torch.dtype, step: str, replay: str) -> None:
    dims = Dims(8, 64, 128, 2, buffer_len=8, ring_len=33, act=BF16, checkpoint=checkpoint)
    generator = torch.Generator().manual_seed(5)
    layer = new_layer(dims, 5, generator, "cuda")
    own(dims, layer, [4, 2, 0, 1], [30, 17, 8, 32], generator)
    slots = torch.tensor([4, 2, -1, 0, 1], dtype=torch.int32, device="cuda")
    tokens = new_tokens(dims, 5, generator, "cuda")
    want, exact = reference_step(dims, layer, tokens, slots)
    got = run_step(STEPS[step], dims, layer, tokens, slots, replay=replay, max_committed=32)
    assert error(got, want) < OUT[BF16] + 1e-4
    assert same_nans(layer["state"], exact["state"])
    assert error(layer["state"].nan_to_num(), exact["state"].nan_to_num()) <= STATE[checkpoint]


def test_identical_launches_give_identical_bits() -> None:
    dims = replace(SMALL["nano"], checkpoint=BF16)
    layer, slots, generator = some_layer(dims, 21)
    tokens = new_tokens(dims, 21, generator, "cuda")
    for step in STEPS.values():
        runs = []
        for _ in range(4):
            mine = copy_of(layer)
            out = run_step(step, dims, mine, tokens, slots, replay="chunk")
            runs.append((out, mine["state"].nan_to_num()))
        assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


def test_an_unknown_replay_is_refused() -> None:
    dims = SMALL["super"]
    layer, slots, generator = some_layer(dims, 2)
    with pytest.raises(ValueError, match="replay"):
        run_step(launch.mamba2_step, dims, layer, new_tokens(dims, 2, generator, "cuda"), slots, replay="both")
