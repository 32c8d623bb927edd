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
# Flushes in a launch of their own, by programs of the one launch, and by its programs of one warp.
TWO = replace(read_configs.STEP[False, "nvfp4"][-1][1], crew=7)
ONE = replace(read_configs.STEP[False, "nvfp4"][-2][1], crew=7, flush_heads=2)
ONE_WARP = replace(read_configs.LARGE[False, "nvfp4", "fp32"][1], crew=7, every=2)


@pytest.mark.parametrize("config", [ONE, TWO], ids=["one launch", "two launches"])
@pytest.mark.parametrize(("name", "read"), [*zip(GLUON, cycle(READS)), *zip(GLUON, cycle(READS[::-1]))])
def test_steps(name: str, read: str, config: Any) -> None:
    check(SHAPES[name], read, 9, 18, config=fitting(config, SHAPES[name]), **CHUNK)


@pytest.mark.parametrize("config", [ONE, TWO], ids=["one launch", "two launches"])
@pytest.mark.parametrize(("dims", "read"), [*((QWEN, read) for read in ("none", *READS)), (KIMI, "fp8")], ids=str)
def test_an_fp8_checkpoint(dims: Dims, read: str, config: Any) -> None:
    check(dims, read, 9, 18, True, config=fitting(config, dims), **CHUNK)


@pytest.mark.parametrize("replay", ["chunk", "serial"])
@pytest.mark.parametrize("name", [name for name in GLUON if "kimi" not in name])
def test_programs_of_one_warp(name: str, replay: str) -> None:
    more = CHUNK if replay == "chunk" else {}
    check(SHAPES[name], "nvfp4", 9, 18, config=fitting(ONE_WARP, SHAPES[name]), **more)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("dims", [QWEN, KIMI], ids=["qwen", "kimi"])
def test_two_launches_with_flushes_token_by_token(dims: Dims, read: str) -> None:
    """The readers of one warp, with states that are `delta_step`'s to the bit."""
    check(dims, read, 17, 17, config=fitting(TWO, dims))


def fitting(config: Any, dims: Dims) -> Any:
    """The configuration with as many v-heads a program as the layer's k-heads have."""
    heads = 2 - dims.num_v_heads // dims.num_k_heads % 2
    return replace(config, heads=heads, flush_heads=min(heads, config.flush_heads))


class ReadWindows(Windows):
    """`Windows` of slots with a read copy."""

    config = TWO

    def __init__(self, dims: Dims, decays: str, read: str, fp8: bool = False) -> None:
        super().__init__(dims, decays)
        self.layer = with_copy(self.layer, self.dims, read, self.slots.tolist(), fp8)

    def step(self, layer: Tensors, token: Tensors, replay: str) -> None:
        config = fitting(self.config, self.dims)
        run_read_step(launch()[1], self.dims, layer, token, self.slots, replay=replay, config=config)


@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize(
    ("dims", "read", "config"),
    [(QWEN, "nvfp4", TWO), (QWEN, "nvfp4", ONE_WARP), (QWEN, "int8", TWO), (KIMI, "nvfp4", TWO)],
    ids=["nvfp4", "nvfp4, one warp", "int8", "kimi"],
)
def test_states_are_as_accurate_as_stepwise_in_fp32(dims: Dims, read: str, config: Any, decays: str) -> None:
    """After 64 windows the error against float64 is at most twice that of stepwise decoding with an fp32 state."""
    windows = ReadWindows(dims, decays, read)
    windows.config = config
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
