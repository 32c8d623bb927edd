"""Read copies: the recurrence does not notice them, and outputs are those of the bytes that they hold."""

from __future__ import annotations

import random

import pytest
import torch
from families import cast, random_tokens
from formats_model import CHECKPOINTS, LAYERS, MIXED, READS, Pair, decode, formats_plan
from requests_model import tree_path


def drive(pair: Pair, steps: int, seed: int = 3) -> None:
    """Ragged windows and trees with random acceptance, padding rows, and steps of one token."""
    pick = random.Random(seed)
    for i in range(steps):
        slots = pick.sample(pair.owned, pick.randint(1, len(pair.owned)))
        slots.insert(pick.randrange(len(slots) + 1), pair.pad)
        lens = [pick.randint(0, 4) for _ in slots]
        if i % 3 == 0:
            pair.step(slots, None, None)
        elif i % 3 == 1:
            pair.step(slots, lens, [pick.randint(0, n) for n in lens])
        else:
            parents = [[pick.randint(-1, j - 1) for j in range(n)] for n in lens]
            paths = [tree_path(p, pick.randint(-1, len(p) - 1)) for p in parents]
            pair.step(slots, lens, None, parents=parents, paths=paths)
        if i % 7 == 0:
            pair.check()
    pair.check()


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("read", [*READS, MIXED], ids=lambda r: r if isinstance(r, str) else "mixed")
def test_checkpoints_do_not_notice_read_copies(read: object, checkpoint: str) -> None:
    pair = Pair(formats_plan(read=read, checkpoint=checkpoint))
    pair.load([4, 1, 3])
    pair.check()
    drive(pair, 40)
    assert int(pair.cache.cursors[[4, 1, 3], 3].min()) >= 3


@pytest.mark.parametrize("checkpoint", ["bf16", "fp16", "fp8"])
def test_stochastic_rounding_with_read_copies(checkpoint: str) -> None:
    pair = Pair(formats_plan(read="int8", checkpoint=checkpoint, rounding="stochastic", seed=5))
    pair.load([4, 1, 3])
    drive(pair, 30)


@pytest.mark.parametrize("checkpoint", ["fp32", "fp8"])
@pytest.mark.parametrize("read", [*READS, "none"])
def test_the_reference_backend(read: str, checkpoint: str) -> None:
    pair = Pair(formats_plan(read=read, checkpoint=checkpoint, backend="reference"))
    pair.load([4, 1])
    drive(pair, 9)


@pytest.mark.parametrize("checkpoint", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("read", READS)
def test_backends_agree_from_the_same_bytes(read: str, checkpoint: str) -> None:
    """Steps without a flush read the same copies, so nothing but the order of sums differs."""
    pair = Pair(formats_plan(read=read, checkpoint=checkpoint, spread_flushes=False))
    pair.load([2, 0, 3])
    drive(pair, 12)
    pair.both("flush")
    reference = Pair(formats_plan(read=read, checkpoint=checkpoint, spread_flushes=False, backend="reference"))
    for case in LAYERS:
        layers = (p.cache.layer(case.spec.layer_idx) for p in (reference, pair))
        for mine, theirs in zip(*(layer.tensors() for layer in layers), strict=True):
            mine.copy_(theirs)
    reference.cache.cursors.copy_(pair.cache.cursors)
    for _ in range(3):
        lens = [2, 0, 1]
        steps = [p.cache.begin_step([3, 2, 0], lens) for p in (pair, reference)]
        for i, case in enumerate(LAYERS):
            inputs = cast(random_tokens(case, sum(lens), pair.generator) | pair.params[i], torch.float32)
            idx = case.spec.layer_idx
            outputs = [
                decode(case, p.cache.layer(idx), step, inputs) for p, step in zip((pair, reference), steps, strict=True)
            ]
            torch.testing.assert_close(*outputs)
        for p, step in zip((pair, reference), steps, strict=True):
            p.cache.commit(step)
