"""The flush rule and commit against a plain Python model, wrapped rings and staggered first windows included."""

from __future__ import annotations

import random

import pytest
import torch

from replayssm import cursors as cursor_ops
from replayssm.cursors import NO_LIMIT, Step, flush_mask, must_flush


def make_step(slots: list[int], lens: list[int] | None, buffer_len: int, pad: int = -1) -> Step:
    starts = None if lens is None else torch.tensor([0, *lens]).cumsum(0).int()
    longest = 1 if lens is None else max([1, *lens])
    return Step(torch.tensor(slots, dtype=torch.int32), starts, longest, -1, buffer_len, pad, 0)


def test_flush_rule_in_python_and_on_tensors_agree() -> None:
    rows = [(p, t, limit) for p in range(9) for t in range(9) for limit in (1, 5, NO_LIMIT)]
    cursors = torch.tensor([[0, p, limit, 0] for p, _, limit in rows], dtype=torch.int32)
    lens = torch.tensor([t for _, t, _ in rows], dtype=torch.int32)
    for buffer_len in (1, 4, 8):
        expected = [must_flush(p, t, buffer_len, limit) for p, t, limit in rows]
        assert flush_mask(cursors, lens, buffer_len).tolist() == expected


@pytest.mark.parametrize(
    ("committed", "window", "buffer_len", "limit", "flushes"),
    [
        (15, 1, 16, NO_LIMIT, False),
        (16, 1, 16, NO_LIMIT, True),
        (13, 4, 16, NO_LIMIT, True),
        (12, 4, 16, NO_LIMIT, False),
        (0, 16, 16, NO_LIMIT, False),
        (0, 4, 16, 1, False),
        (1, 1, 16, 1, True),
        (5, 0, 16, 3, True),
        (7, 1, 4, NO_LIMIT, True),
    ],
)
def test_flush_rule_table(committed: int, window: int, buffer_len: int, limit: int, flushes: bool) -> None:
    assert must_flush(committed, window, buffer_len, limit) is flushes


def test_wrapped_rings_advance_without_touching_live_rows() -> None:
    ring_len, cursors = 32, torch.tensor([[28, 13], [0, 13], [30, 14], [12, 16]], dtype=torch.int32)
    cursors = torch.cat([cursors, torch.tensor([[NO_LIMIT, 0]] * 4, dtype=torch.int32)], 1)
    step = make_step([0, 1, 2, 3], [4, 4, 4, 4], 16)
    cursor_ops.commit(cursors, step, torch.tensor([4, 0, 1, 3]), ring_len)
    assert cursors.tolist() == [
        [(28 + 13) % 32, 4, NO_LIMIT, 1],
        [13, 0, NO_LIMIT, 1],
        [(30 + 14) % 32, 1, NO_LIMIT, 1],
        [28, 3, NO_LIMIT, 1],
    ]


@pytest.mark.parametrize("seed", range(4))
def test_commit_against_a_plain_model(seed: int) -> None:
    pick, num_slots, buffer_len, most = random.Random(seed), 6, 8, 3
    ring_len = buffer_len + most
    pad = pick.choice([-1, 0])
    cursors = torch.zeros(num_slots, 4, dtype=torch.int32)
    cursor_ops.reset(cursors, torch.arange(num_slots), buffer_len, spread=True)
    model = cursors.tolist()
    for _ in range(300):
        slots = [*pick.sample([s for s in range(num_slots) if s != pad], pick.randint(0, 4)), pad, 77, -9]
        pick.shuffle(slots)
        lens = [pick.randint(0, most) for _ in slots]
        accepted = [pick.randint(0, n) for n in lens]
        cursor_ops.commit(cursors, make_step(slots, lens, buffer_len, pad), torch.tensor(accepted), ring_len)
        for slot, n, a in zip(slots, lens, accepted, strict=True):
            if slot == pad or not 0 <= slot < num_slots:
                continue
            start, committed, limit, flushes = model[slot]
            if committed > 0 and committed + n > min(buffer_len, limit):
                model[slot] = [(start + committed) % ring_len, a, NO_LIMIT, flushes + 1]
            else:
                model[slot] = [start, committed + a, limit, flushes]
        assert cursors.tolist() == model
        assert cursors[:, 1].max() <= buffer_len


def test_counts_beyond_the_window_are_held_to_it() -> None:
    cursors = torch.tensor([[0, 2, NO_LIMIT, 0], [0, 2, NO_LIMIT, 0]], dtype=torch.int32)
    cursor_ops.commit(cursors, make_step([0, 1], [2, 2], 8), torch.tensor([9, -3]), 10)
    assert cursors[:, 1].tolist() == [4, 2]


@pytest.mark.parametrize("spread", [True, False])
def test_requests_that_start_together_flush_at_different_steps(spread: bool) -> None:
    buffer_len, num_slots = 8, 32
    cursors = torch.zeros(num_slots, 4, dtype=torch.int32)
    cursor_ops.reset(cursors, torch.arange(num_slots), buffer_len, spread=spread)
    step = make_step(list(range(num_slots)), None, buffer_len)
    per_step = []
    for _ in range(5 * buffer_len):
        per_step.append(int(flush_mask(cursors, step.window_lens, buffer_len).sum()))
        cursor_ops.commit(cursors, step, None, buffer_len + 1)
    steady = per_step[2 * buffer_len :]
    assert sum(steady) == 3 * num_slots
    assert max(steady) == (num_slots // buffer_len if spread else num_slots)


def test_commit_takes_no_data_dependent_path() -> None:
    """The whole of commit traces with symbolic values: nothing is read back to the host."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        cursors = torch.zeros(4, 4, dtype=torch.int32)
        step = Step(torch.zeros(3, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), 2, -1, 8, -1, 0)
        cursor_ops.commit(cursors, step, torch.zeros(3, dtype=torch.int32), 10)


@pytest.mark.parametrize("kind", ["all", "counts", "paths"])
def test_the_ops_are_registered_with_what_they_write(kind: str) -> None:
    import replayssm.ops.commits  # noqa: F401

    cursors = torch.tensor([[0, 2, NO_LIMIT, 0], [3, 8, 4, 1], [0, 0, 1, 0]], dtype=torch.int32)
    slots, starts = torch.tensor([2, -1, 1], dtype=torch.int32), torch.tensor([0, 2, 3, 4], dtype=torch.int32)
    counts = torch.tensor([1, 1, 0], dtype=torch.int32) if kind == "counts" else None
    paths = torch.tensor([[1, -1], [-1, -1], [0, -1]], dtype=torch.int32) if kind == "paths" else None
    options = {"buffer_len": 8, "ring_len": 10, "pad_slot_id": -1}
    torch.library.opcheck(torch.ops.replayssm.commit.default, (cursors, slots, starts, counts, paths), options)
    torch.library.opcheck(torch.ops.replayssm.take_back.default, (cursors, torch.tensor([1, 0]), starts[1:3]))


def test_paths_count_as_many_tokens_as_they_have() -> None:
    cursors = torch.tensor([[0, 2, NO_LIMIT, 0]] * 3, dtype=torch.int32)
    slots, starts = torch.arange(3, dtype=torch.int32), torch.tensor([0, 4, 8, 12], dtype=torch.int32)
    paths = torch.tensor([[0, 2, 3], [1, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    cursor_ops.commit_rows(cursors, slots, starts, None, paths, buffer_len=8, ring_len=12, pad_slot_id=-1)
    assert cursors[:, 1].tolist() == [5, 3, 2]
