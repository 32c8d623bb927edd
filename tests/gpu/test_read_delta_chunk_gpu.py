"""Flushes in chunk form beside a read copy: copies right to the bit, outputs, and states as accurate as in fp32."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from delta_case import Dims, Tensors, copy_of, error, run_stepwise
from read_case import checkpoint, copied, with_copy
from read_delta_case import run_read_step
from test_delta_chunk_gpu import DECAYS, Windows
from test_delta_gpu import launch as plain_launch
from test_read_delta_gpu import BF16, FP16, KIMI, QWEN, READS, SHAPES, check, launch

from replayssm.ops.delta import read_configs

pytestmark = pytest.mark.gpu
CHUNK: dict[str, Any] = {"same_kernel": False, "replay": "chunk"}
GLUON = [name for name in SHAPES if "portable" not in name]
# Flushes are in a launch of their own.
CONFIG = replace(read_configs.STEP[False, "nvfp4"][-1][1], crew=7)


@pytest.mark.parametrize(("name", "read"), [*((name, "nvfp4") for name in GLUON), *zip(GLUON, cycle(READS[:3]))])
def test_steps(name: str, read: str) -> None:
    check(SHAPES[name], read, 9, 18, config=fitting(SHAPES[name]), **CHUNK)


@pytest.mark.parametrize(("dims", "read"), [*((QWEN, read) for read in ("none", *READS)), (KIMI, "fp8")], ids=str)
def test_an_fp8_checkpoint(dims: Dims, read: str) -> None:
    check(dims, read, 9, 18, True, config=fitting(dims), **CHUNK)


@pytest.mark.parametrize("act", [BF16, FP16], ids=str)
@pytest.mark.parametrize("checkpoint", read_configs.KEPT)
def test_heads_kept_in_shared_memory(checkpoint: str, act: torch.dtype) -> None:
    """The tables' largest entries, with several v-heads and items a program."""
    dims = replace(QWEN, checkpoint={"fp16": FP16, "bf16": BF16}.get(checkpoint, torch.float32), act=act)
    check(dims, "nvfp4", 33, 18, config=replace(read_configs.KEPT[checkpoint][-1][1], crew=7), **CHUNK)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("dims", [QWEN, KIMI], ids=["qwen", "kimi"])
def test_flushes_token_by_token(dims: Dims, read: str) -> None:
    """The readers of one warp, with states that are `delta_step`'s to the bit."""
    check(dims, read, 17, 17, config=fitting(dims))


def fitting(dims: Dims) -> Any:
    """The configuration with as many v-heads a program as the layer's k-heads have."""
    heads = 2 - dims.num_v_heads // dims.num_k_heads % 2
    return replace(CONFIG, heads=heads, flush_heads=heads)


class ReadWindows(Windows):
    """`Windows` of slots with a read copy."""

    def __init__(self, dims: Dims, decays: str, read: str, fp8: bool = False) -> None:
        super().__init__(dims, decays)
        self.layer = with_copy(self.layer, self.dims, read, self.slots.tolist(), fp8)

    def step(self, layer: Tensors, token: Tensors, replay: str) -> None:
        config = fitting(self.dims)
        run_read_step(launch()[1], self.dims, layer, token, self.slots, replay=replay, config=config)


@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize(
    ("dims", "read"), [(QWEN, "nvfp4"), (QWEN, "int8"), (KIMI, "nvfp4")], ids=["nvfp4", "int8", "kimi"]
)
def test_states_are_as_accurate_as_stepwise_in_fp32(dims: Dims, read: str, decays: str) -> None:
    """After 64 windows the error against float64 is at most twice that of stepwise decoding with an fp32 state."""
    windows = ReadWindows(dims, decays, read)
    layer, count = windows.layer, torch.full((6,), dims.buffer_len, device="cuda")
    stepwise = copy_of({name: tensor for name, tensor in layer.items() if not name.startswith("read_")})
    exact = layer["state"][windows.rows].double()
    for _ in range(64):
        tokens = windows.tokens()
        windows.flush(layer, tokens, count, "chunk")
        for token in tokens:
            run_stepwise(plain_launch().delta_stepwise, windows.dims, stepwise, token, windows.slots)
        exact = windows.exact(exact, tokens, count)
    assert error(layer["state"][windows.rows], exact) <= 2 * error(stepwise["state"][windows.rows], exact)


@pytest.mark.parametrize(("state", "fp8"), [(FP16, False), (BF16, False), (torch.float32, True)], ids=str)
def test_low_precision_states_stray_no_further_than_token_by_token(state: torch.dtype, fp8: bool) -> None:
    """After 64 windows, each rounded once either way, the error is the same to a tenth."""
    windows = ReadWindows(replace(QWEN, checkpoint=state), "mild", "nvfp4", fp8)
    layer, count = windows.layer, torch.full((6,), QWEN.buffer_len, device="cuda")
    serial = copied(layer)
    exact = checkpoint(layer)[windows.rows].double()
    for _ in range(64):
        tokens = windows.tokens()
        windows.flush(layer, tokens, count, "chunk")
        windows.flush(serial, tokens, count, "serial")
        exact = windows.exact(exact, tokens, count)
    chunk, by_token = (error(checkpoint(x)[windows.rows], exact) for x in (layer, serial))
    assert chunk <= 1.1 * by_token
