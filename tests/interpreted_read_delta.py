"""The portable GDN and KDA kernel with read copies in Triton's interpreter (run by test_read_triton_delta.py)."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from delta_case import PAD, Dims, new_tokens
from read_delta_case import check_read_steps, new_read_layer, run_read_step

from replayssm.checks import ReplayError
from replayssm.ops.delta import launch, read_launch

GDN = Dims(1, 2, head_k_dim=32, head_v_dim=16)
KDA = Dims(1, 1, head_k_dim=32, head_v_dim=8, kda=True)
CASES = {
    "gdn": GDN,
    "gdn padded pages": replace(GDN, page=48),
    "gdn odd rows, processed gates": replace(GDN, head_v_dim=10, raw=False, ring_len=7),
    "gdn fp16": replace(GDN, act=torch.float16, checkpoint=torch.float16),
    "kda": KDA,
    "kda lower bound": replace(KDA, lower_bound=-5.0, bias=False, l2norm=False),
}
# Outputs are rounded once; fp32 sums of some 50 terms.
OUT = {torch.float32: 2e-6, torch.float16: 1e-3}
# bf16 copies: the interpreter truncates casts to bf16.
READS = ("int8", "fp8", "nvfp4")


def run(dims: Dims, read: str, fp8: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    layer = new_read_layer(dims, read, 5, [3, 0, 1], generator, "cpu", fp8)
    slots = torch.tensor([3, PAD, 0, 1], dtype=torch.int32)
    check_read_steps(dims, layer, read, slots, generator, 5, read_launch.delta_read_step, launch.delta_step,
                     OUT[dims.act])  # fmt: skip


@pytest.mark.parametrize(("name", "read"), [*product(("gdn",), READS), *zip(list(CASES)[1:], cycle(READS))])
def test_copies_over_a_float_checkpoint(name: str, read: str) -> None:
    run(CASES[name], read, False)


@pytest.mark.parametrize(("dims", "read"), [(GDN, "none"), (KDA, "nvfp4")], ids=["gdn none", "kda nvfp4"])
def test_an_fp8_checkpoint(dims: Dims, read: str) -> None:
    run(dims, read, True)


def test_windows_are_refused() -> None:
    generator = torch.Generator().manual_seed(2)
    layer = new_read_layer(GDN, "int8", 1, [0], generator, "cpu")
    tokens, slots = new_tokens(GDN, 1, generator, "cpu"), torch.zeros(1, dtype=torch.int32)

    def window(*args: Any, **more: Any) -> None:
        read_launch.delta_read_step(*args, **more | {"max_window_len": 2})

    with pytest.raises(ReplayError, match="max_window_len"):
        run_read_step(window, GDN, layer, tokens, slots)
