"""Steps on tensors that end where memory ends. Run in a process of its own: a failure ends all use of the GPU in it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[1]))
import delta_case
import mamba2_case
import read_case
import read_delta_case
from guarded import all_guarded, guarded

from replayssm.ops.delta import launch as delta_launch
from replayssm.ops.delta import read_launch as delta_read_launch
from replayssm.ops.mamba2 import launch, read_configs, read_launch

pytestmark = pytest.mark.gpu
BATCH, OWNED = 8, list(range(8))
L16: dict[str, Any] = {"buffer_len": 16, "ring_len": 17, "act": torch.bfloat16}
MAMBA2 = {"super": mamba2_case.Dims(32, 64, 128, 2, **L16), "nano": mamba2_case.Dims(24, 80, 128, 2, **L16)}
DELTA = {"qwen": delta_case.Dims(2, 8, 128, 128, **L16), "kimi": delta_case.Dims(3, 3, 128, 128, kda=True, **L16)}


def check(run: Any, layer: dict[str, Any], tokens: dict[str, Any]) -> None:
    """`run` (layer, tokens, slots) gives the same where memory ends."""
    slots = torch.arange(BATCH, dtype=torch.int32, device="cuda")
    want = run(read_case.copied(layer), tokens, slots)
    got = run(all_guarded(layer), all_guarded(tokens), guarded(slots))
    torch.cuda.synchronize()
    assert torch.equal(got, want)


@pytest.mark.parametrize("read", ["none", "bf16", "int8", "fp8", "nvfp4"])
@pytest.mark.parametrize("shape", MAMBA2)
def test_mamba2(shape: str, read: str) -> None:
    dims, generator = MAMBA2[shape], torch.Generator().manual_seed(0)
    layer = mamba2_case.new_layer(dims, BATCH, generator, "cuda")
    mamba2_case.own(dims, layer, OWNED, [16, 0, 15, 8, 13, 1, 7, 16], generator)
    tokens = mamba2_case.new_tokens(dims, BATCH, generator, "cuda")
    if read == "none":
        check(lambda *step: mamba2_case.run_step(launch.mamba2_step, dims, *step), layer, tokens)
        return
    layer = read_case.with_copy(layer, dims, read, OWNED, False)
    sizes = (dims.num_heads, dims.n_groups, dims.head_dim, dims.d_state)
    for batch in (1, 8, 32, 256):
        config = read_configs.read_config(batch, read_configs.ReadShape(*sizes, read, "fp32", "sm90"))
        more = {"config": config}
        check(lambda *s, m=more: read_case.run_read_step(read_launch.mamba2_read_step, dims, *s, **m), layer, tokens)


@pytest.mark.parametrize("read", ["none", "int8", "nvfp4"])
@pytest.mark.parametrize("shape", DELTA)
def test_delta(shape: str, read: str) -> None:
    dims, generator = DELTA[shape], torch.Generator().manual_seed(0)
    layer = read_delta_case.new_read_layer(dims, read, BATCH, OWNED, generator, "cuda")
    tokens = delta_case.new_tokens(dims, BATCH, generator, "cuda")
    if read == "none":
        check(lambda *step: delta_case.run_step(delta_launch.delta_step, dims, *step), layer, tokens)
    else:
        step = delta_read_launch.delta_read_step
        check(lambda *s: read_delta_case.run_read_step(step, dims, *s), layer, tokens)


@triton.jit
def _read_one(ptr, out_ptr, place):
    tl.store(out_ptr, tl.load(ptr + place))


if __name__ == "__main__":
    _read_one[(1,)](guarded(torch.ones(96, device="cuda")), torch.zeros(1, device="cuda"), int(sys.argv[1]))
    torch.cuda.synchronize()
