"""Launches that are no layer's, on tensors that end, or begin, where memory does: commits and convolutions.

Run in a process of its own, as `guarded_steps.py`. As a program: reads one element of a tensor of 96.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parent))
from guarded import DEVICE, INTERPRETED, Place, check, guarded

from replayssm.cursors import NO_LIMIT
from replayssm.ops import commit_launch
from replayssm.ops.conv_launch import conv_step, conv_window

WINDOW = 4


@pytest.mark.parametrize("batch", [1, 8, 130])
def test_pending_commits(batch: int) -> None:
    pick, num_slots = random.Random(0), batch + 1
    cursors = torch.tensor([[slot % 20, slot % 17, NO_LIMIT, 0] for slot in range(num_slots)], dtype=torch.int32)
    lens = [pick.randint(0, 4) for _ in range(batch)]
    rows = {
        "slots": torch.tensor([[slot, 7] for slot in [*range(2, num_slots), -1]], dtype=torch.int32),
        "starts": torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        "counts": torch.tensor(lens, dtype=torch.int32),
    }

    def run(place: Place) -> list[torch.Tensor]:
        mine, pending = place(cursors.to(DEVICE)), place(torch.zeros(num_slots, dtype=torch.int32, device=DEVICE))
        table, starts, counts = (place(tensor.to(DEVICE)) for tensor in rows.values())
        options = {"buffer_len": 16, "ring_len": 20, "pad_slot_id": -1}
        for given in ((starts, counts), (None, None), (starts, counts)):
            commit_launch.follow_windows(mine, pending, table[:, 0], *given, **options)
        return [mine, pending]

    check(run)


@pytest.mark.parametrize("batch", [1, 5] if INTERPRETED else [1, 5, 66])
@pytest.mark.parametrize("channels", [1000, 6])
def test_convolution(channels: int, batch: int) -> None:
    def noise(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
        return values.to(DEVICE, torch.bfloat16)

    lens = [3 * i % (WINDOW + 1) for i in range(batch)] if batch > 1 else [WINDOW]
    blocks = torch.tensor([*range(1, batch), 0] if batch > 1 else [1], dtype=torch.int32)
    starts = torch.tensor([0, *lens]).cumsum(0).int()

    def run(place: Place) -> list[torch.Tensor]:
        weight, bias, slots = place(noise(channels, 4)), place(noise(channels)), place(blocks.to(DEVICE))
        one, states = place(noise(batch, channels)), place(noise(len(blocks) + 1, 3, channels))
        many, windows = place(noise(sum(lens) + 2, channels)), place(noise(len(blocks) + 1, WINDOW + 2, channels))
        cleared = place(noise(sum(lens) + 2, 2, 300))
        outs = [place(torch.zeros_like(x)) for x in (one, many)]
        conv_step(one, weight, bias, states, slots, outs[0], silu=True, pad_slot_id=0)
        rows = (slots, place(starts.to(DEVICE)), place(torch.tensor(lens, dtype=torch.int32, device=DEVICE)))
        options: dict[str, Any] = {"max_window_len": WINDOW, "silu": True, "pad_slot_id": 0, "cleared": cleared}
        conv_window(many, weight, bias, windows, *rows, outs[1], **options)
        return [states, windows, cleared, *outs]

    check(run)


@triton.jit
def _read_one(ptr, out_ptr, place):
    tl.store(out_ptr, tl.load(ptr + place))


if __name__ == "__main__":
    out = torch.zeros(1, device=DEVICE)
    _read_one[(1,)](guarded(torch.ones(96, device=DEVICE), sys.argv[1]), out, int(sys.argv[2]))
    print(float(out))
