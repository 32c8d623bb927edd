"""The Mamba-2 step with read copies and fp8 checkpoints on a GPU: bytes of states and copies, outputs, bit equality."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mamba2_case import Dims, new_layer, new_tokens, own
from read_case import check_steps, check_window, copied, run_read_step, with_copy

from replayssm import ReplayError

pytestmark = pytest.mark.gpu
launch = pytest.importorskip("replayssm.ops.mamba2.launch")
read_launch = pytest.importorskip("replayssm.ops.mamba2.read_launch")
read_configs = pytest.importorskip("replayssm.ops.mamba2.read_configs")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
L16 = {"buffer_len": 16, "ring_len": 17}
SHAPES = {
    "super": Dims(32, 64, 128, 2, **L16, act=BF16),
    "nano": Dims(24, 80, 128, 2, **L16, act=BF16),
    "granite": Dims(16, 64, 128, 1, **L16, act=BF16, extras=False, page=48),
    "falcon": Dims(16, 128, 256, 2, 16, 20, act=BF16),
    "narrow": Dims(12, 48, 64, 3, 8, 9, act=BF16),
    "long": Dims(16, 64, 128, 1, 32, 33, act=BF16),
    "odd": Dims(6, 20, 96, 2, 5, 7, act=BF16),
}
READS = ("bf16", "int8", "fp8", "nvfp4")
CHECKPOINTS = {"fp32": FP32, "fp16": FP16, "bf16": BF16, "fp8": FP32}
# An output is rounded once to its dtype (half a unit in the last place, twice that in norm); fp32 sums ~250 terms.
OUT = {BF16: 4e-3, FP16: 5e-4, FP32: 2e-6}


def some_layer(
    dims: Dims, read: str, checkpoint: str, batch: int, seed: int = 0
) -> tuple[dict, torch.Tensor, torch.Generator]:
    """A layer with `batch` shuffled slots at all phases of their windows, one row in five a pad."""
    generator = torch.Generator().manual_seed(seed)
    dims = replace(dims, checkpoint=CHECKPOINTS[checkpoint])
    layer = new_layer(dims, batch + 3, generator, "cuda")
    order = torch.randperm(batch + 3, generator=generator)[:batch].tolist()
    counts = [(5 * i + dims.buffer_len) % (dims.buffer_len + 1) for i in range(batch)]
    own(dims, layer, order, counts, generator)
    layer = with_copy(layer, dims, read, order, checkpoint == "fp8")
    slots = [slot if i % 5 != 4 else (-1, batch + 3)[i % 2] for i, slot in enumerate(order)]
    return layer, torch.tensor(slots, dtype=torch.int32, device="cuda"), generator


def check(dims: Dims, read: str, checkpoint: str, batch: int, steps: int = 1, **config: object) -> None:
    layer, slots, generator = some_layer(dims, read, checkpoint, batch)
    check_steps(
        dims,
        layer,
        read,
        slots,
        generator,
        steps,
        read_launch.mamba2_read_step,
        launch.mamba2_step,
        OUT[dims.act],
        **config,
    )


EVERY = [(read, checkpoint) for read in READS for checkpoint in CHECKPOINTS] + [("none", "fp8")]
SOME = [(read, "fp32") for read in READS] + [("nvfp4", "fp8"), ("none", "fp8")]
STEPS = [(shape, *formats) for shape in SHAPES for formats in (EVERY if shape == "super" else SOME)]


@pytest.mark.parametrize(("shape", "read", "checkpoint"), STEPS)
def test_step(shape: str, read: str, checkpoint: str) -> None:
    check(SHAPES[shape], read, checkpoint, 21)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("act", [FP16, FP32], ids=str)
def test_other_activations(act: torch.dtype, read: str) -> None:
    check(replace(SHAPES["super"], act=act), read, "fp32", 21)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("shape", ["super", "nano"])
def test_every_entry_of_the_tables(shape: str, read: str) -> None:
    dims = SHAPES[shape]
    layer = (dims.num_heads, dims.n_groups, dims.head_dim, dims.d_state)
    for batch in (1, 8, 32, 256):
        config = read_configs.read_config(batch, read_configs.ReadShape(*layer, read, "fp32", "sm90"))
        check(dims, read, "fp32", 21, steps=2, config=config)


@pytest.mark.parametrize("lens", [[2, 1, 3, 0, 4, 1, 2], [1, 1, 0, 1, 1, 1, 1]], ids=["windows", "one token or none"])
@pytest.mark.parametrize("read", ["int8", "nvfp4"])
def test_windows(read: str, lens: list[int]) -> None:
    dims, generator = replace(SHAPES["super"], ring_len=20), torch.Generator().manual_seed(5)
    layer = new_layer(dims, 9, generator, "cuda")
    owned = [5, 0, 7, 3, 1]
    own(dims, layer, owned, [16, 0, 15, 8, 13], generator)
    layer = with_copy(layer, dims, read, owned, False)
    slots = torch.tensor([5, -1, 0, 7, 99, 3, 1], dtype=torch.int32, device="cuda")
    check_window(dims, layer, read, lens, slots, generator, read_launch.mamba2_read_step, False, OUT[BF16])


@pytest.mark.parametrize("read", READS)
def test_the_portable_kernel_too(read: str) -> None:
    check(SHAPES["nano"], read, "fp32", 5, config=read_configs.ReadConfig("triton", 16))


@pytest.mark.parametrize("read", ["int8", "nvfp4"])
@pytest.mark.parametrize("shape", ["super", "nano"])
def test_identical_launches_and_any_company_give_identical_bits(shape: str, read: str) -> None:
    dims = SHAPES[shape]
    layer, slots, generator = some_layer(dims, read, "fp32", 40)
    tokens = new_tokens(dims, 40, generator, "cuda")
    runs = []
    for _ in range(3):
        mine = copied(layer)
        runs.append((run_read_step(read_launch.mamba2_read_step, dims, mine, tokens, slots), mine))
    for out, mine in runs[1:]:
        assert torch.equal(out, runs[0][0])
        assert torch.equal(mine["read_codes"].view(torch.uint8), runs[0][1]["read_codes"].view(torch.uint8))
    one = {n: None if t is None else t[2:3] for n, t in tokens.items()}
    config = read_configs.read_config(
        40, read_launch.layer_shape(layer["state"], dims.n_groups, BF16, layer["read_codes"])
    )
    out = run_read_step(read_launch.mamba2_read_step, dims, copied(layer), one, slots[2:3], config=config)
    assert torch.equal(out[0], runs[0][0][2])


def test_every_tie_is_rounded_as_the_format_says() -> None:
    """Quarters: many blocks for which both scales of nvfp4 err alike; and flushes that change nothing (dt = 0)."""
    dims, generator = SHAPES["super"], torch.Generator().manual_seed(3)
    layer = new_layer(dims, 8, generator, "cuda")
    own(dims, layer, list(range(8)), [16] * 8, generator)
    layer["state"].copy_(torch.randint(-24, 25, layer["state"].shape, generator=generator) / 4)
    layer["state"][1] = 0
    layer["ring_dt"][:6] = 0
    layer = with_copy(layer, dims, "nvfp4", list(range(8)), False)
    slots = torch.arange(8, dtype=torch.int32, device="cuda")
    steps = (read_launch.mamba2_read_step, launch.mamba2_step, OUT[BF16])
    check_steps(dims, layer, "nvfp4", slots, generator, 1, *steps)


@pytest.mark.parametrize("checkpoint", ["fp32", "fp16", "fp8"])
def test_blocks_far_below_their_heads_largest(checkpoint: str) -> None:
    """V-rows down to 2^-24 of the head's largest: subnormal block scales, codes that saturate, blocks of zero."""
    dims = replace(SHAPES["super"], checkpoint=CHECKPOINTS[checkpoint])
    generator = torch.Generator().manual_seed(13)
    layer = new_layer(dims, 4, generator, "cuda")
    own(dims, layer, list(range(4)), [16] * 4, generator)
    steps = torch.arange(dims.head_dim, device="cuda") % 25
    sizes = torch.exp2(-steps.float())[:, None]
    layer["state"].copy_(torch.randn(layer["state"].shape, generator=generator).cuda() * sizes)
    layer["ring_dt"].zero_()
    layer = with_copy(layer, dims, "nvfp4", list(range(4)), checkpoint == "fp8")
    slots = torch.arange(4, dtype=torch.int32, device="cuda")
    more = {} if checkpoint == "fp32" else {"replay": "chunk"}
    check_steps(
        dims, layer, "nvfp4", slots, generator, 1, read_launch.mamba2_read_step, launch.mamba2_step, OUT[BF16], **more
    )


def test_unknown_forms_of_a_flush_are_refused() -> None:
    with pytest.raises(ReplayError, match="replay"):
        check(SHAPES["super"], "nvfp4", "fp32", 5, replay="chunks")


@pytest.mark.parametrize("batch", [5, 40])
@pytest.mark.parametrize(("every", "flush_rows"), [(2, 1), (2, 16), (3, 4), (5, 2)])
def test_flushes_among_the_readers(every: int, flush_rows: int, batch: int) -> None:
    for shape, tiles in (("super", 4), ("nano", 5)):
        config = read_configs.ReadConfig("gluon", 4, tiles, 1, 0, flush_rows, 4, every, batch < 20, 128)
        check(SHAPES[shape], "nvfp4", "fp32", batch, config=config)


@pytest.mark.parametrize("buffer_len", [6, 16, 24, 32])
@pytest.mark.parametrize(("tiles", "group", "depth"), [(4, 2, 0), (8, 1, 3), (8, 2, 2), (8, 4, 1)])
def test_stages_and_rings(tiles: int, group: int, depth: int, buffer_len: int) -> None:
    """Rings of one to four times eight rows, tiles in registers and in stages."""
    dims = replace(SHAPES["super"], buffer_len=buffer_len, ring_len=buffer_len + 1)
    for read in ("nvfp4", "int8", "fp8"):
        for ahead, hint in ((False, False), (True, False), (True, True)):
            config = read_configs.ReadConfig("gluon", 4, tiles, group, depth, 4, 4, 2, ahead, 128, hint)
            check(dims, read, "fp32", 33, config=config)
