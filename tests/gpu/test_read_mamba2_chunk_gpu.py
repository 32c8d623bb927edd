"""The chunk form of a flush on a GPU: accurate to fp32, and with everything else to the bit as the serial form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mamba2_case import commit_one, copy_of, error, in_float64, new_layer, new_tokens, own, run_step
from read_case import copied, run_read_step, with_copy
from test_read_mamba2_gpu import FP16, READS, SHAPES, check

from replayssm.ops.mamba2 import reference

pytestmark = pytest.mark.gpu
launch = pytest.importorskip("replayssm.ops.mamba2.launch")
read_launch = pytest.importorskip("replayssm.ops.mamba2.read_launch")
EVERY = [(read, checkpoint) for read in READS for checkpoint in ("fp16", "fp8")]
EVERY += [("none", "fp8"), ("nvfp4", "bf16"), ("int8", "fp32")]
SOME = [("nvfp4", "fp16"), ("int8", "fp8")]
STEPS = [(shape, *formats) for shape in SHAPES if shape != "odd" for formats in (EVERY if shape == "super" else SOME)]


@pytest.mark.parametrize(("shape", "read", "checkpoint"), STEPS)
def test_step(shape: str, read: str, checkpoint: str) -> None:
    check(SHAPES[shape], read, checkpoint, 21, replay="chunk")


@pytest.mark.parametrize("batch", [8, 256])
@pytest.mark.parametrize("checkpoint", ["fp16", "fp8"])
def test_batches(batch: int, checkpoint: str) -> None:
    check(SHAPES["nano"], "nvfp4", checkpoint, batch, steps=2, replay="chunk")


def test_fp16_inputs() -> None:
    check(replace(SHAPES["super"], act=FP16), "nvfp4", "fp16", 21, replay="chunk")


def test_a_ring_that_is_longer_than_the_steps_window() -> None:
    """`buffer_len` lowered for a step: more rows to replay than a chunk has."""
    dims = replace(SHAPES["super"], buffer_len=40, ring_len=41)
    generator = torch.Generator().manual_seed(7)
    layer = new_layer(dims, 6, generator, "cuda")
    own(dims, layer, [4, 0, 2], [40, 17, 33], generator)
    layer = with_copy(layer, dims, "nvfp4", [4, 0, 2], False)
    slots = torch.tensor([4, 0, 2], dtype=torch.int32, device="cuda")
    tokens = new_tokens(dims, 3, generator, "cuda")
    states = []
    for replay in ("serial", "chunk"):
        mine = copied(layer)
        run_read_step(read_launch.mamba2_read_step, replace(dims, buffer_len=16), mine, tokens, slots, replay=replay)
        states.append(mine["state"][slots.long()])
    assert not torch.equal(*states) and error(states[1], states[0]) < 1e-6


@pytest.mark.parametrize("strength", [0.0, 3.0], ids=["slow decay", "fast decay"])
@pytest.mark.parametrize("size", [1e-3, 1e3], ids=str)
def test_states_after_64_windows(strength: float, size: float) -> None:
    """At most twice the error of the serial form (stepwise fp32's, bit for bit) against float64."""
    dims, generator = replace(SHAPES["super"], buffer_len=8, ring_len=9), torch.Generator().manual_seed(11)
    layer = new_layer(dims, 4, generator, "cuda")
    own(dims, layer, [3, 1], [0, 0], generator)
    layer["state"][[3, 1]] *= size
    slots = torch.tensor([3, 1], dtype=torch.int32, device="cuda")
    serial, exact = copied(layer), copy_of(layer, torch.float64)
    layer = with_copy(layer, dims, "nvfp4", [3, 1], False)
    for _ in range(64 * 8):
        tokens = new_tokens(dims, 2, generator, "cuda")
        tokens["dt"] = tokens["dt"] + strength
        run_read_step(read_launch.mamba2_read_step, dims, layer, tokens, slots, replay="chunk")
        run_step(launch.mamba2_step, dims, serial, tokens, slots)
        run_step(reference.mamba2_step, dims, exact, in_float64(tokens), slots)
        for one in (layer, serial, exact):
            commit_one(dims, one, slots)
    want = exact["state"][[3, 1]]
    assert error(layer["state"][[3, 1]], want) <= 2 * error(serial["state"][[3, 1]], want)
