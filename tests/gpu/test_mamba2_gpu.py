"""The Mamba-2 kernels on a GPU: every kernel and configuration against float64, bit equality, graphs, large pools."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mamba2_case import (
    NAN,
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

from replayssm.ops.mamba2 import reference

pytestmark = pytest.mark.gpu
launch = pytest.importorskip("replayssm.ops.mamba2.launch")
configs = pytest.importorskip("replayssm.ops.mamba2.configs")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
L16 = {"buffer_len": 16, "ring_len": 17}
SUPER = Dims(128, 64, 128, 8, **L16, act=BF16)
NANO = Dims(96, 80, 128, 8, **L16, act=BF16)
GRANITE = Dims(32, 64, 128, 1, **L16, act=BF16, extras=False)
FALCON = Dims(16, 128, 256, 2, 16, 20, act=BF16)
NARROW = Dims(12, 48, 64, 3, 8, 9, act=BF16)
ODD = Dims(6, 20, 24, 2, 5, 7, act=BF16)
SHAPES = {"super": SUPER, "nano": NANO, "granite": GRANITE, "falcon": FALCON, "narrow": NARROW, "odd": ODD}
# An output is rounded once to its dtype (half a unit in the last place, twice that in norm); fp32 sums ~250 terms.
OUT = {BF16: 4e-3, FP16: 5e-4, FP32: 2e-6}
# A state is one fma and one rounded product a row; exp and softplus are good to 2 units in the last place.
STATE = {FP32: 2e-6, BF16: 2.5e-3, FP16: 3e-4}


def some_layer(dims: Dims, batch: int, seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Generator]:
    """A layer with `batch` shuffled slots at all phases of their windows, one row in five a pad."""
    generator = torch.Generator().manual_seed(seed)
    layer = new_layer(dims, batch + 3, generator, "cuda")
    order = torch.randperm(batch + 3, generator=generator)[:batch].tolist()
    counts = [(5 * i + dims.buffer_len) % (dims.buffer_len + 1) for i in range(batch)]
    own(dims, layer, order, counts, generator)
    slots = [slot if i % 5 != 4 else (-1, batch + 3)[i % 2] for i, slot in enumerate(order)]
    return layer, torch.tensor(slots, dtype=torch.int32, device="cuda"), generator


def check_step(dims: Dims, batch: int, steps: int = 1, **config: object) -> None:
    layer, slots, generator = some_layer(dims, batch)
    for _ in range(steps):
        tokens = new_tokens(dims, batch, generator, "cuda")
        want, exact = reference_step(dims, layer, tokens, slots)
        got = run_step(launch.mamba2_step, dims, layer, tokens, slots, **config)
        assert error(got, want) < OUT[dims.act] + (0 if dims.checkpoint == FP32 else 1e-4)
        for name, tolerance in (("state", STATE[dims.checkpoint]), ("ring_x", 0), ("ring_B", 0), ("ring_dt", 2e-6)):
            assert same_nans(layer[name], exact[name]), name
            assert error(layer[name].nan_to_num(), exact[name].nan_to_num()) <= tolerance, name
        commit_one(dims, layer, slots)


@pytest.mark.parametrize("batch", [1, 3, 8, 21, 40, 70])
@pytest.mark.parametrize("checkpoint", [FP32, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_step_against_float64(shape: str, checkpoint: torch.dtype, batch: int) -> None:
    check_step(replace(SHAPES[shape], checkpoint=checkpoint), batch)


@pytest.mark.parametrize("act", [FP32, FP16], ids=str)
@pytest.mark.parametrize("batch", [2, 70])
@pytest.mark.parametrize("page", [0, 48])
def test_other_dtypes_and_padded_pages(act: torch.dtype, batch: int, page: int) -> None:
    for checkpoint in (FP32, FP16):
        check_step(replace(GRANITE, act=act, checkpoint=checkpoint, page=page, extras=True), batch)


@pytest.mark.parametrize("shape", ["super", "nano", "falcon"])
@pytest.mark.parametrize("batch", [2, 70])
def test_five_steps_in_a_row(shape: str, batch: int) -> None:
    check_step(replace(SHAPES[shape], num_heads=SHAPES[shape].num_heads // 2), batch, steps=5)


def every_config(dims: Dims) -> list[object]:
    shape = configs.Shape(dims.num_heads, dims.n_groups, dims.head_dim, dims.d_state, 4, True, "sm90")
    rows = {config for table in configs.STEP.values() for _, choices in table for config in choices}
    fitting = [replace(c, turns=c.turns or dims.head_dim // c.block_v) for c in rows if configs.fits(c, shape)]
    return [*fitting, configs.LaunchConfig("triton", 16, 4)]


@pytest.mark.parametrize("shape", ["super", "nano"])
def test_checkpoint_equals_stepwise_bit_for_bit_after_64_windows(shape: str) -> None:
    dims = replace(SHAPES[shape], num_heads=SHAPES[shape].num_heads // 4, n_groups=2)
    for config in every_config(dims):
        generator = torch.Generator().manual_seed(1)
        layer = new_layer(dims, 5, generator, "cuda")
        own(dims, layer, [3, 0, 4], [0, 0, 0], generator)
        slots = torch.tensor([3, 0, 4], dtype=torch.int32, device="cuda")
        plain, flushes = copy_of(layer), 0
        for step in range(64 * 16 + 1):
            tokens = new_tokens(dims, 3, generator, "cuda")
            before = plain["state"].clone()
            got = run_step(launch.mamba2_step, dims, layer, tokens, slots, config=config)
            want = run_stepwise(launch.mamba2_stepwise, plain, tokens, slots)
            if step and step % 16 == 0:
                flushes += 1
                assert torch.equal(layer["state"][slots.long()], before[slots.long()]), config
                assert error(got, want) < OUT[BF16], config
            commit_one(dims, layer, slots)
        assert flushes == 64


@pytest.mark.parametrize("shape", ["super", "nano"])
def test_a_16_bit_checkpoint_is_no_worse_than_stepwise(shape: str) -> None:
    dims = replace(SHAPES[shape], num_heads=SHAPES[shape].num_heads // 4, n_groups=2, checkpoint=BF16)
    generator = torch.Generator().manual_seed(2)
    layer = new_layer(dims, 3, generator, "cuda")
    own(dims, layer, [2, 0], [0, 0], generator)
    slots = torch.tensor([2, 0], dtype=torch.int32, device="cuda")
    plain, exact = copy_of(layer), copy_of(layer, torch.float64)
    for step in range(8 * 16 + 1):
        tokens = new_tokens(dims, 2, generator, "cuda")
        before = {"plain": plain["state"].double(), "exact": exact["state"].clone()}
        run_step(launch.mamba2_step, dims, layer, tokens, slots)
        run_stepwise(launch.mamba2_stepwise, plain, tokens, slots)
        exact_tokens = {n: None if t is None else t.double() for n, t in tokens.items()}
        run_stepwise(reference.mamba2_stepwise, exact, exact_tokens, slots)
        if step == 8 * 16:
            mine = error(layer["state"][slots.long()], before["exact"][slots.long()])
            theirs = error(before["plain"][slots.long()], before["exact"][slots.long()])
            assert mine <= theirs
        commit_one(dims, layer, slots)


@pytest.mark.parametrize("shape", ["super", "nano"])
def test_identical_launches_and_any_company_give_identical_bits(shape: str) -> None:
    dims = SHAPES[shape]
    layer, slots, generator = some_layer(dims, 7)
    tokens = new_tokens(dims, 7, generator, "cuda")
    for config in every_config(dims):
        runs = []
        for _ in range(5):
            mine = copy_of(layer)
            runs.append(
                (run_step(launch.mamba2_step, dims, mine, tokens, slots, config=config), mine["state"].nan_to_num())
            )
        for out, state in runs[1:]:
            assert torch.equal(out, runs[0][0])
            assert torch.equal(state, runs[0][1])
        alone = copy_of(layer)
        one = {n: None if t is None else t[2:3] for n, t in tokens.items()}
        out = run_step(launch.mamba2_step, dims, alone, one, slots[2:3], config=config)
        assert torch.equal(out[0], runs[0][0][2]), config


def test_pools_of_more_than_two_to_the_31_elements() -> None:
    num_slots = 2**31 // (128 * 64 * 128) + 30
    dims, generator = SUPER, torch.Generator().manual_seed(3)
    small = new_layer(dims, 2, generator, "cuda")
    own(dims, small, [0, 1], [16, 9], generator)
    big = new_layer(dims, 1, generator, "cuda") | {n: small[n] for n in ("A", "D", "dt_bias")}
    for name in ("state", "ring_x", "ring_B", "ring_dt", "cursors"):
        big[name] = torch.zeros(num_slots, *small[name].shape[1:], dtype=small[name].dtype, device="cuda")
        big[name][-2:] = small[name]
    tokens = new_tokens(dims, 2, generator, "cuda")
    slots = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    for config in every_config(dims):
        mine = copy_of(small)
        for name in ("state", "ring_x", "ring_B", "ring_dt"):
            big[name][-2:] = small[name]
        want = run_step(launch.mamba2_step, dims, mine, tokens, slots, config=config)
        got = run_step(launch.mamba2_step, dims, big, tokens, slots + num_slots - 2, config=config)
        assert torch.equal(got, want), config
        assert torch.equal(big["state"][-2:], mine["state"]), config
        assert torch.equal(big["ring_x"][-2:].nan_to_num(), mine["ring_x"].nan_to_num()), config


@pytest.mark.parametrize("batch", [2, 70])
def test_graph_replayed_over_two_windows_with_changing_slots(batch: int) -> None:
    dims = replace(GRANITE, extras=True)
    layer, slots, generator = some_layer(dims, batch)
    layer["state"].nan_to_num_(0.5)
    plain = copy_of(layer)
    tokens = new_tokens(dims, batch, generator, "cuda")
    options = {"buffer_len": 16, "pad_slot_id": -1, "dt_softplus": True, "max_window_len": 1}
    out, graph = torch.full_like(tokens["x"], NAN, memory_format=torch.contiguous_format), torch.cuda.CUDAGraph()
    inputs = {**tokens, **{n: layer[n] for n in layer}}
    warm = copy_of(layer)
    run_step(launch.mamba2_step, dims, warm, tokens, slots)
    with torch.cuda.graph(graph):
        launch.mamba2_step(**inputs, slot_indices=slots, query_start_loc=None, out=out, **options)
    for _ in range(34):
        for name, tensor in new_tokens(dims, batch, generator, "cuda").items():
            tokens[name].copy_(tensor)
        slots.copy_(slots[torch.randperm(batch, generator=generator).cuda()])
        graph.replay()
        want = run_step(launch.mamba2_step, dims, plain, tokens, slots)
        assert torch.equal(out, want)
        assert torch.equal(layer["state"], plain["state"])
        commit_one(dims, layer, slots)
        commit_one(dims, plain, slots)
