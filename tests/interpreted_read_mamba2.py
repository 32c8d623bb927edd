"""The portable Mamba-2 step with read copies and fp8 checkpoints, in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import pytest
import torch
from mamba2_case import Dims, new_layer, own
from read_case import check_steps, check_window, with_copy

from replayssm.ops.mamba2.launch import mamba2_step
from replayssm.ops.mamba2.read_launch import mamba2_read_step

DIMS = [
    Dims(d_state=32, page=16),
    Dims(d_state=64, head_dim=20, act=torch.float16, checkpoint=torch.float16, page=48),
    Dims(num_heads=3, head_dim=5, d_state=96, n_groups=1, ring_len=8, extras=False),
]
OUT = {torch.float32: 1e-6, torch.float16: 1e-3}


CASES = [(DIMS[0], read, fp8) for read in ("none", "int8", "fp8", "nvfp4") for fp8 in (False, True)][1:]
CASES += [(DIMS[1], "nvfp4", False), (DIMS[1], "int8", False), (DIMS[2], "nvfp4", True), (DIMS[2], "fp8", False)]


@pytest.mark.parametrize(("dims", "read", "fp8"), CASES, ids=str)
def test_three_steps_of_rows_at_all_phases(dims: Dims, read: str, fp8: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    layer = new_layer(dims, 8, generator, "cpu")
    owned = [5, 0, 7, 3]
    own(dims, layer, owned, [dims.buffer_len, 0, 2, 1], generator)
    layer = with_copy(layer, dims, read, owned, fp8)
    slots = torch.tensor([5, -1, 0, 7, 99, 3], dtype=torch.int32)
    check_steps(dims, layer, read, slots, generator, 3, mamba2_read_step, mamba2_step, OUT[dims.act])


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize(("read", "fp8"), [("none", True), ("int8", False), ("nvfp4", False), ("nvfp4", True)], ids=str)
def test_windows(read: str, fp8: bool, tree: bool) -> None:
    dims, generator = Dims(d_state=32, ring_len=8, page=16), torch.Generator().manual_seed(2)
    layer = new_layer(dims, 8, generator, "cpu")
    owned = [5, 0, 7, 3, 1]
    own(dims, layer, owned, [dims.buffer_len, 0, 2, 1, 3], generator)
    layer = with_copy(layer, dims, read, owned, fp8)
    slots = torch.tensor([5, -1, 0, 7, 99, 3, 1], dtype=torch.int32)
    check_window(dims, layer, read, [2, 1, 3, 1, 2, 0, 3], slots, generator, mamba2_read_step, tree, 1e-6)
