"""The GDN and KDA kernels on a GPU: every configuration against float64, bit equality, graphs, large pools."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from delta_case import (
    NAN,
    RINGS,
    Dims,
    commit_one,
    copy_of,
    error,
    new_layer,
    new_tokens,
    own,
    run_materialize,
    run_step,
    run_stepwise,
)

from replayssm.ops.delta import configs, reference, torch_ops

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
L16: dict[str, Any] = {"buffer_len": 16, "ring_len": 17, "act": BF16}
QWEN = Dims(2, 8, 128, 128, **L16)
KIMI = Dims(3, 3, 128, 128, kda=True, **L16)
SHAPES = {
    "qwen": QWEN,
    "qwen, fp32 inputs": replace(QWEN, act=FP32),
    "qwen, fp16 state and inputs": replace(QWEN, act=FP16, checkpoint=FP16),
    "qwen, bf16 state": replace(QWEN, checkpoint=BF16),
    "qwen, pages of others between": replace(QWEN, page=96),
    "qwen, ring of 20, processed gates": replace(QWEN, ring_len=20, raw=False),
    "small heads, no norm": Dims(2, 4, 64, 64, l2norm=False, **L16),
    "three v-heads a k-head": Dims(1, 3, 128, 128, **L16),
    "odd sizes (portable)": Dims(2, 2, 80, 48, buffer_len=5, ring_len=7, act=BF16),
    "kimi": KIMI,
    "kimi, lower bound": replace(KIMI, lower_bound=-5.0, bias=False),
    "kimi, bf16 state": replace(KIMI, checkpoint=BF16),
}
# An output is rounded once to its dtype, and reads u rounded likewise; fp32 sums some 300 terms.
OUT = {BF16: 5e-3, FP16: 6e-4, FP32: 5e-6}
# Errors of an fp32 checkpoint stay at a few units in the last place. Those of a coarser one are its roundings, once a
# window, which the reference in the same format makes too; no kernel may be further off than by a tenth.
STATE = 5e-6
SAME_FORMAT = 1.1
TILES = [(key[0], key[1], config) for key, table in configs.STEP.items() for _, config in table]


def launch() -> Any:
    from replayssm.ops.delta import launch

    return launch


def some_layer(
    dims: Dims, batch: int, seed: int = 0
) -> tuple[dict[str, Any], torch.Tensor, list[int], torch.Generator]:
    """A layer with `batch` shuffled slots whose windows have different lengths; every fifth row is a pad."""
    generator = torch.Generator().manual_seed(seed)
    layer = new_layer(dims, batch + 3, generator, "cuda")
    slots = torch.randperm(batch + 3, generator=generator)[:batch].to(torch.int32)
    slots[4::5] = torch.tensor([-1, batch + 3], dtype=torch.int32).repeat(batch)[: len(slots[4::5])]
    owned = [int(slot) for slot in slots if 0 <= slot < batch + 3]
    own(layer, dims, owned, generator, [dims.buffer_len, 3, dims.buffer_len - 1, 1])
    return layer, slots.cuda(), owned, generator


def check_steps(dims: Dims, batch: int, steps: int, **more: Any) -> None:
    layer, slots, owned, generator = some_layer(dims, batch)
    exact, rounded = copy_of(layer, torch.float64), copy_of(layer)
    real = (slots >= 0) & (slots < batch + 3)
    for _ in range(steps):
        tokens = new_tokens(dims, batch, generator, "cuda")
        out = run_step(launch().delta_step, dims, layer, tokens, slots, **more)
        expected = run_step(reference.delta_step, dims, exact, tokens, slots)
        assert out[~real].abs().sum() == 0
        tolerance = OUT[dims.act]
        if dims.checkpoint != FP32:
            same = run_step(torch_ops.delta_step, dims, rounded, tokens, slots)
            tolerance += SAME_FORMAT * error(same[real], expected[real])
        assert error(out[real], expected[real]) < tolerance
        for pool in (layer, exact, rounded):
            commit_one(dims, pool, slots)
    allowed = STATE if dims.checkpoint == FP32 else SAME_FORMAT * error(rounded["state"][owned], exact["state"][owned])
    assert error(layer["state"][owned], exact["state"][owned]) < allowed
    rest = [slot for slot in range(batch + 3) if slot not in owned]
    assert all(layer[name][rest].isnan().all() for name in (*RINGS, "state"))


@pytest.mark.parametrize("dims", SHAPES.values(), ids=SHAPES.keys())
def test_steps_follow_the_reference(dims: Dims) -> None:
    check_steps(dims, 9, 20)


@pytest.mark.parametrize(("kda", "size", "config"), TILES, ids=str)
def test_every_configuration(kda: bool, size: int, config: configs.LaunchConfig) -> None:
    dims = replace(KIMI if kda else Dims(1, 4, 128, 128, **L16), checkpoint=FP32 if size == 4 else BF16)
    tiles = 128 // config.block_v * (1 if kda else 4)
    assert tiles % config.num_tiles == 0
    check_steps(dims, 17, 18, config=config)


@pytest.mark.parametrize("dims", [QWEN, KIMI, replace(QWEN, head_k_dim=64)], ids=["qwen", "kimi", "k64"])
def test_checkpoints_equal_stepwise_bit_for_bit(dims: Dims) -> None:
    """After 64 windows, by every step configuration and whatever tile the stepwise kernel has."""
    layer, slots, owned, generator = some_layer(dims, 8, 1)
    choices = [config for kda, size, config in TILES if kda == dims.kda and size == 4]
    plain = copy_of(layer)
    inputs = [new_tokens(dims, 8, generator, "cuda") for _ in range(7)]
    for step in range(64 * 16):
        tokens = inputs[step % 7]
        shape = launch().layer_shape(layer["state"], dims.num_k_heads, tokens["g"], layer["ring_v"], layer["ring_u"])
        config = configs._with_tiles(choices[step // 16 % len(choices)], shape)
        run_step(launch().delta_step, dims, layer, tokens, slots, config=config)
        run_stepwise(launch().delta_stepwise, dims, plain, tokens, slots)
        commit_one(dims, layer, slots)
    state = run_materialize(launch().delta_materialize, dims, layer, slots)
    assert torch.equal(state[owned], plain["state"][owned])


def test_a_lowered_buffer_flushes_whatever_is_committed() -> None:
    layer, slots, owned, generator = some_layer(QWEN, 4, 2)
    own(layer, QWEN, owned, generator)
    exact = copy_of(layer, torch.float64)
    for buffer_len in (*[16] * 14, 1, 1, 16):
        tokens = new_tokens(QWEN, 4, generator, "cuda")
        out = run_step(launch().delta_step, QWEN, layer, tokens, slots, buffer_len)
        expected = run_step(reference.delta_step, QWEN, exact, tokens, slots, buffer_len)
        assert error(out, expected) < OUT[BF16]
        for pool in (layer, exact):
            commit_one(QWEN, pool, slots, buffer_len)
    assert error(layer["state"][owned], exact["state"][owned]) < STATE


@pytest.mark.parametrize("dims", [QWEN, KIMI], ids=["qwen", "kimi"])
def test_launches_repeat_and_rows_do_not_meet(dims: Dims) -> None:
    """Five identical launches agree bit for bit, and a row alone in another slot gives what it gives in a batch."""
    layer, slots, owned, generator = some_layer(dims, 12, 3)
    tokens = new_tokens(dims, 12, generator, "cuda")
    for _ in range(15):
        run_step(launch().delta_step, dims, layer, tokens, slots)
        commit_one(dims, layer, slots)
    config = launch().configs.STEP[dims.kda, 4][1][1]
    copies = [copy_of(layer) for _ in range(5)]
    outs = [run_step(launch().delta_step, dims, copy, tokens, slots, config=config) for copy in copies]
    for copy, out in zip(copies[1:], outs[1:], strict=True):
        assert torch.equal(out, outs[0]) and torch.equal(copy["state"][owned], copies[0]["state"][owned])
    free = next(slot for slot in range(15) if slot not in owned)
    for name in (*RINGS, "state", "cursors"):
        layer[name][free] = layer[name][slots[0].long()].clone()
    alone = {name: tensor[:1] for name, tensor in tokens.items()}
    at = torch.tensor([free], dtype=torch.int32, device="cuda")
    assert torch.equal(run_step(launch().delta_step, dims, layer, alone, at, config=config)[0], outs[0][0])


def test_pools_beyond_two_to_the_31_elements() -> None:
    dims = replace(KIMI, checkpoint=BF16)
    slots = torch.tensor([2**31 // (3 * 128 * 128) + 5, 1], dtype=torch.int32, device="cuda")
    generator = torch.Generator().manual_seed(4)
    layer = new_layer(dims, int(slots[0]) + 1, generator, "cuda")
    own(layer, dims, slots.tolist(), generator)
    small = {name: tensor[slots.long()].clone() if name in (*RINGS, "state", "cursors") else tensor
             for name, tensor in layer.items()}  # fmt: skip
    for _ in range(18):
        tokens = new_tokens(dims, 2, generator, "cuda")
        out = run_step(launch().delta_step, dims, layer, tokens, slots)
        near = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
        assert torch.equal(out, run_step(launch().delta_step, dims, small, tokens, near))
        commit_one(dims, layer, slots)
        commit_one(dims, small, near)
    assert torch.equal(layer["state"][slots.long()], small["state"])


@pytest.mark.parametrize("dims", [QWEN, KIMI], ids=["qwen", "kimi"])
def test_a_graph_follows_slots_and_cursors(dims: Dims) -> None:
    layer, slots, owned, generator = some_layer(dims, 6, 5)
    tokens = new_tokens(dims, 6, generator, "cuda")
    eager, out = copy_of(layer), torch.empty(0)
    run_step(launch().delta_step, dims, copy_of(layer), tokens, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_step(launch().delta_step, dims, layer, tokens, slots)
    for _ in range(34):
        slots.copy_(slots[torch.randperm(6, generator=generator).cuda()].clone())
        for name, value in new_tokens(dims, 6, generator, "cuda").items():
            tokens[name].copy_(value)
        out.fill_(NAN)
        graph.replay()
        assert torch.equal(out, run_step(launch().delta_step, dims, eager, tokens, slots))
        for pool in (layer, eager):
            commit_one(dims, pool, slots)
    assert torch.equal(layer["state"][owned], eager["state"][owned])
