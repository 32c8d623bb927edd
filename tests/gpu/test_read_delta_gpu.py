"""GDN and KDA steps with read copies on a GPU: bytes of checkpoints and copies, outputs against float64, graphs."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from delta_case import NAN, RINGS, Dims, commit_one, new_tokens
from read_case import copied, same_bytes
from read_delta_case import check_read_steps, new_read_layer, run_read_step

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
READS = ("bf16", "int8", "fp8", "nvfp4")
L16: dict[str, Any] = {"buffer_len": 16, "ring_len": 17, "act": BF16}
QWEN = Dims(2, 8, 128, 128, **L16)
KIMI = Dims(3, 3, 128, 128, kda=True, **L16)
SHAPES = {
    "qwen": QWEN,
    "qwen, two v-heads a k-head": replace(QWEN, num_v_heads=4),
    "qwen, fp16 state and inputs": replace(QWEN, act=FP16, checkpoint=FP16),
    "qwen, bf16 state": replace(QWEN, checkpoint=BF16),
    "qwen, pages of others between": replace(QWEN, page=96),
    "qwen, ring of 24, processed gates, no norm": replace(QWEN, ring_len=24, buffer_len=20, raw=False, l2norm=False),
    "qwen, fp32 inputs (portable)": replace(QWEN, act=FP32),
    "three v-heads a k-head": Dims(1, 3, 128, 128, **L16),
    "odd sizes (portable)": Dims(2, 2, 96, 48, buffer_len=5, ring_len=7, act=BF16),
    "kimi": KIMI,
    "kimi, fp16 state": replace(KIMI, checkpoint=FP16),
    "kimi, lower bound": replace(KIMI, lower_bound=-5.0, bias=False),
}
# An output is rounded once to its dtype, and reads u rounded likewise.
OUT = {BF16: 5e-3, FP16: 6e-4, FP32: 5e-6}


def launch() -> Any:
    from replayssm.ops.delta import launch, read_launch

    return launch.delta_step, read_launch.delta_read_step


def some_layer(dims: Dims, read: str, batch: int, seed: int, fp8: bool = False) -> tuple[dict[str, Any], Any, Any]:
    """A layer with shuffled slots whose windows have different lengths; every fifth row is a pad."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(batch + 3, generator=generator)[:batch].to(torch.int32)
    slots[4::5] = torch.tensor([-1, batch + 3], dtype=torch.int32).repeat(batch)[: len(slots[4::5])]
    owned = [int(slot) for slot in slots if 0 <= slot < batch + 3]
    return new_read_layer(dims, read, batch + 3, owned, generator, "cuda", fp8), slots.cuda(), generator


def check(dims: Dims, read: str, batch: int, steps: int, fp8: bool = False, **more: Any) -> None:
    layer, slots, generator = some_layer(dims, read, batch, 0, fp8)
    plain, step = launch()
    check_read_steps(dims, layer, read, slots, generator, steps, step, plain, OUT[dims.act], **more)


@pytest.mark.parametrize(("name", "read"), [*product(("qwen", "kimi"), READS), *zip(SHAPES, cycle(READS[::-1]))])
def test_steps(name: str, read: str) -> None:
    check(SHAPES[name], read, 9, 18, same_kernel="portable" not in name)


@pytest.mark.parametrize(("dims", "read"), [(QWEN, "none"), (QWEN, "nvfp4"), (KIMI, "fp8")], ids=str)
def test_an_fp8_checkpoint(dims: Dims, read: str) -> None:
    check(dims, read, 9, 18, True)


def all_configs() -> list[Any]:
    from replayssm.ops.delta import read_configs

    return [(key, config) for key, table in read_configs.STEP.items() for _, config in table]


@pytest.mark.parametrize(("key", "config"), all_configs(), ids=str)
def test_every_configuration(key: tuple[bool, str], config: Any) -> None:
    kda, read = key
    dims = KIMI if kda else Dims(1, 4, 128, 128, **L16)
    check(dims, read, 17, 17, config=config)


@pytest.mark.parametrize("read", READS)
def test_flushes_in_lockstep_and_a_large_batch(read: str) -> None:
    """More rows flush at once than there are programs for."""
    dims = Dims(1, 2, 128, 128, **L16)
    generator = torch.Generator().manual_seed(7)
    slots = torch.arange(300, dtype=torch.int32).cuda()
    layer = new_read_layer(dims, read, 300, slots.tolist(), generator, "cuda")
    layer["cursors"][:, 2] = 4
    plain, step = launch()
    check_read_steps(dims, layer, read, slots, generator, 5, step, plain, OUT[BF16])


@pytest.mark.parametrize("dims", [QWEN, KIMI], ids=["qwen", "kimi"])
def test_a_graph_follows_slots_and_cursors(dims: Dims) -> None:
    layer, slots, generator = some_layer(dims, "nvfp4", 6, 5)
    _, step = launch()
    tokens = new_tokens(dims, 6, generator, "cuda")
    eager = copied(layer)
    run_read_step(step, dims, copied(layer), tokens, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_read_step(step, dims, layer, tokens, slots)
    for _ in range(18):
        slots.copy_(slots[torch.randperm(6, generator=generator).cuda()].clone())
        for name, value in new_tokens(dims, 6, generator, "cuda").items():
            tokens[name].copy_(value)
        out.fill_(NAN)
        graph.replay()
        assert torch.equal(out, run_read_step(step, dims, eager, tokens, slots))
        for pool in (layer, eager):
            commit_one(dims, pool, slots)
    for name in (*RINGS, "state", "read_codes", "read_scales", "read_global_scale"):
        assert same_bytes(layer[name], eager[name])
