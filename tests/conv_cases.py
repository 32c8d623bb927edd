"""The convolution kernels against plain torch; run in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import pytest
import torch

from replayssm.ops.conv_launch import conv_step, conv_window

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("block", [32, 64])
def test_convolution(bias: bool, silu: bool, block: int) -> None:
    rng = torch.Generator().manual_seed(0)
    channels, num_blocks = 72, 7

    def noise(*shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(generator=rng).half().to(DEVICE)

    blocks = torch.tensor([3, 0, 6, 1, 99, 5], dtype=torch.int32, device=DEVICE)  # with pads of both kinds
    x, weight, offset = noise(len(blocks), channels + 8)[:, 8:], noise(channels, 4), noise(channels)
    pages = noise(num_blocks, 3 * channels + 40)
    states = pages[:, 16 : 16 + 3 * channels].view(num_blocks, 3, channels)
    pages[0], x[1], x[4] = float("nan"), float("nan"), float("nan")
    out, before = torch.full((len(blocks), channels), float("nan"), dtype=torch.float16, device=DEVICE), pages.clone()
    expected = pages.clone()
    conv_step(x, weight, offset if bias else None, states, blocks, out, silu=silu, pad_slot_id=0, block=block)
    view = expected[:, 16 : 16 + 3 * channels].view(num_blocks, 3, channels)
    for row, at in enumerate(blocks.tolist()):
        if not 0 < at < num_blocks:
            assert out[row].isnan().all()
            continue
        window = torch.cat([view[at], x[row : row + 1]])
        y = (window.double() * weight.double().T).sum(0) + (offset.double() if bias else 0)
        y = torch.nn.functional.silu(y) if silu else y
        torch.testing.assert_close(out[row].double(), y, rtol=2**-10, atol=2**-14)
        view[at] = window[1:]
    assert torch.equal(pages.view(torch.int16), expected.view(torch.int16))
    assert not torch.equal(pages.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("bias", [False, True])
def test_windows(bias: bool) -> None:
    """Three steps of windows, of which random prefixes count: tokens see the inputs that counted before them."""
    rng = torch.Generator().manual_seed(1)
    channels, num_blocks, longest = 72, 7, 4

    def noise(*shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(generator=rng).half().to(DEVICE)

    blocks = torch.tensor([3, 0, 6, 1, 99, 5], dtype=torch.int32, device=DEVICE)
    weight, offset = noise(channels, 4), noise(channels)
    pages = noise(num_blocks, (longest + 3) * channels)
    states = pages[:, channels:].view(num_blocks, longest + 2, channels)
    history = {at: states[at, :3].clone() for at in (3, 6, 1, 5)}  # what a prefill leaves
    accepted = torch.ones(len(blocks), dtype=torch.int32, device=DEVICE)
    for _ in range(3):
        lens = torch.tensor([4, 2, 1, 3, 2, 0])[torch.randperm(6, generator=rng)]
        starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int().to(DEVICE)
        x = noise(int(lens.sum()) + 2, channels + 8)[:, 8:]
        pages[0] = x[-2:] = float("nan")  # tokens of no row pad a captured batch
        out = torch.full((len(x), channels), float("nan"), dtype=torch.float16, device=DEVICE)
        rows, cleared = (blocks, starts, accepted), torch.full((len(x), 5, 16), 7.0, device=DEVICE)
        options = {"max_window_len": longest, "silu": True, "pad_slot_id": 0, "block": 64, "cleared": cleared}
        conv_window(x, weight, offset if bias else None, states, *rows, out, **options)
        assert (cleared[-2:] == 0).all() and (cleared[:-2] == 7).all()
        counts = [int(torch.randint(1, max(n, 1) + 1, (1,), generator=rng)) for n in lens.tolist()]
        for row, at in enumerate(blocks.tolist()):
            mine = slice(int(starts[row]), int(starts[row + 1]))
            if at not in history or not lens[row]:
                assert out[mine].isnan().all()
                continue
            inputs = torch.cat([history[at], x[mine]])
            y = (inputs.double().unfold(0, 4, 1) * weight.double()).sum(-1) + (offset.double() if bias else 0)
            expected = torch.nn.functional.silu(y)
            torch.testing.assert_close(out[mine].double(), expected, rtol=2**-10, atol=2**-14)
            history[at] = inputs[counts[row] : counts[row] + 3]
            accepted[row] = counts[row]
        assert out[-2:].isnan().all()
