"""The convolution kernel against plain torch; run in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import pytest
import torch

from replayssm.ops.conv_launch import conv_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("block", "rows"), [(64, 1), (32, 4)])
def test_convolution(bias: bool, silu: bool, block: int, rows: int) -> None:
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
    sizes = {"block": block, "rows": rows}
    conv_step(x, weight, offset if bias else None, states, blocks, out, silu=silu, pad_slot_id=0, **sizes)
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
