"""The portable GDN and KDA kernel with read copies in Triton's interpreter (run by test_read_triton_delta.py)."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "gpu"))
from delta_case import PAD, Dims
from read_delta_case import check_read_steps, new_read_layer
from read_window_case import check as check_window

from replayssm import GDNSpec, KDASpec
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


SMALL = GDNSpec(num_k_heads=1, num_v_heads=2, head_k_dim=32, head_v_dim=10)
WINDOWS = [
    (SMALL, "none", "fp8", True),
    (SMALL, "nvfp4", "fp32", False),
    (SMALL, "int8", "fp16", True),
    (KDASpec(num_k_heads=1, num_v_heads=1, head_k_dim=32, head_v_dim=8), "fp8", "fp32", True),
]


@pytest.mark.parametrize(("spec", "read", "stored", "tree"), WINDOWS, ids=str)
def test_windows(spec: GDNSpec, read: str, stored: str, tree: bool) -> None:
    check_window(spec, 3, read, stored, tree, torch.float32, "cpu")
