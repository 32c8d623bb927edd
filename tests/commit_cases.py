"""The kernels that end a step against the torch functions, to the last bit: on a GPU, or with TRITON_INTERPRET=1."""

from __future__ import annotations

import copy
import os
import random

import pytest
import torch

from replayssm import GDNSpec, KDASpec, Mamba2Spec, Plan, ReplayCache
from replayssm import cursors as torch_cursors
from replayssm.cursors import NO_LIMIT
from replayssm.ops import commit_launch, moves

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
NUM_SLOTS, BUFFER_LEN, WINDOW = 7, 8, 4
RING_LEN = BUFFER_LEN + WINDOW
OPTIONS = {"buffer_len": BUFFER_LEN, "ring_len": RING_LEN}


def placed(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Copies where the kernels run."""
    return [None if t is None else t.to(DEVICE, copy=True) for t in tensors]


def some_cursors(pick: random.Random) -> torch.Tensor:
    """Any phase of any slot: wrapped rings, empty and full ones, first windows that are shortened."""
    rows = [
        (pick.randrange(RING_LEN), pick.randint(0, BUFFER_LEN), pick.choice([1, 4, NO_LIMIT]), pick.randint(0, 9))
        for _ in range(NUM_SLOTS)
    ]
    return torch.tensor(rows, dtype=torch.int32)


def some_rows(pick: random.Random, pad: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Shuffled slots with padding of every kind; window starts; window lengths, zero included."""
    slots = [*pick.sample([s for s in range(NUM_SLOTS) if s != pad], pick.randint(0, 5)), pad, NUM_SLOTS, -9, pad]
    pick.shuffle(slots)
    lens = [pick.randint(0, WINDOW) for _ in slots]
    return torch.tensor(slots, dtype=torch.int32), torch.tensor([0, *lens]).cumsum(0).int(), lens


def some_path(pick: random.Random, length: int) -> list[int]:
    """An increasing path of up to `length` tokens, then -1."""
    path = sorted(pick.sample(range(length), pick.randint(0, length)))
    return [*path, *[-1] * (WINDOW - len(path))]


@pytest.mark.parametrize("pad", [-1, 0])
@pytest.mark.parametrize("kind", ["all", "counts", "paths", "one token"])
def test_commits(kind: str, pad: int) -> None:
    pick = random.Random(pad)
    for _ in range(12):
        slots, starts, lens = some_rows(pick, pad)
        cursors = some_cursors(pick)
        options = OPTIONS | {"pad_slot_id": pad, "buffer_len": pick.choice([3, BUFFER_LEN])}
        counts = torch.tensor([pick.randint(-1, n + 1) for n in lens], dtype=torch.int32) if kind == "counts" else None
        paths = [some_path(pick, n) for n in lens]
        given = torch.tensor(paths, dtype=torch.int32) if kind == "paths" else None
        rows = (slots, None if kind == "one token" else starts, counts, given)
        mine, *on_device = placed(cursors, *rows)
        torch_cursors.commit_rows(cursors, *rows, **options)
        commit_launch.commit(mine, *on_device, **options)
        assert torch.equal(mine.cpu(), cursors)


@pytest.mark.parametrize("pad", [-1, 0])
@pytest.mark.parametrize("kind", ["all", "counts", "one length"])
def test_windows_are_followed(kind: str, pad: int) -> None:
    """Windows are committed with the next ones, whose slots need not lie together; a third time shows `pending`."""
    pick = random.Random(pad)
    for _ in range(12):
        cursors, pending = some_cursors(pick), torch.zeros(NUM_SLOTS, dtype=torch.int32)
        mine, my_pending = placed(cursors, pending)
        options = OPTIONS | {"pad_slot_id": pad, "window_len": pick.choice([0, 1])}
        for _ in range(3):
            slots, starts, lens = some_rows(pick, pad)
            table = torch.stack([slots, torch.full_like(slots, 3)], 1)
            counts = torch.tensor([pick.randint(-1, n + 1) for n in lens], dtype=torch.int32)
            rows = (None if kind == "one length" else starts, counts if kind == "counts" else None)
            on_device = placed(table, *rows)
            given = torch_cursors.follow_windows(cursors, pending, table[:, 0], *rows, **options)
            found = commit_launch.follow_windows(mine, my_pending, on_device[0][:, 0], *on_device[1:], **options)
            assert torch.equal(found.cpu(), slots) and torch.equal(given, slots) and found.is_contiguous()
            assert torch.equal(mine.cpu(), cursors)
            assert torch.equal(my_pending.cpu(), pending)


def test_commits_of_many_rows_and_of_none() -> None:
    num_slots = 300
    cursors = torch.stack([torch.arange(num_slots) % RING_LEN, torch.arange(num_slots) % 9], 1)
    cursors = torch.cat([cursors, torch.full((num_slots, 1), NO_LIMIT), torch.zeros(num_slots, 1)], 1).int()
    slots = torch.randperm(num_slots).int()
    mine, on_device = placed(cursors, slots)
    torch_cursors.commit_rows(cursors, slots, None, None, **OPTIONS, pad_slot_id=-1)
    commit_launch.commit(mine, on_device, None, None, **OPTIONS, pad_slot_id=-1)
    commit_launch.commit(mine, on_device[:0], None, None, **OPTIONS, pad_slot_id=-1)
    assert torch.equal(mine.cpu(), cursors)


def test_taking_back() -> None:
    cursors = some_cursors(random.Random(2))
    slots = torch.tensor([4, 0, 6, 2])
    mine, on_device = placed(cursors, slots)
    for counts in (torch.tensor([0, 1, 99, -3], dtype=torch.int32), torch.tensor([2, 2, 2, 2], dtype=torch.int32)):
        torch_cursors.take_back(cursors, slots, counts)
        commit_launch.take_back(mine, on_device, counts.to(DEVICE))
        assert torch.equal(mine.cpu(), cursors)


def some_rings(dtype: torch.dtype, dim: int, padding: int, device: str = "cpu") -> list[torch.Tensor]:
    """Rings as views of one page a slot, dead rows and whatever lies between them NaN; one of more than one entry."""
    shapes = [(2, RING_LEN, dim), (3, RING_LEN), (1, RING_LEN, 2 * moves.SPAN + dim)]
    dtypes = [dtype, torch.float32, dtype]
    generator, rings = torch.Generator().manual_seed(dim), []
    for shape, kind in zip(shapes, dtypes, strict=True):
        size = torch.Size(shape).numel()
        pages = torch.full((NUM_SLOTS, size + padding), float("nan")).to(device, kind)
        ring = pages[:, :size].unflatten(1, shape)
        ring.copy_(torch.randn(NUM_SLOTS, *shape, generator=generator))
        ring[:, :, 5] = float("nan")
        rings.append(ring)
    return rings


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The storage, what lies between slots included."""
    size = tensor.element_size()
    whole = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // size,), (1,), 0)
    return whole.view({2: torch.int16, 4: torch.int32}[size]).cpu()


@pytest.mark.parametrize(
    ("dtype", "dim", "padding"),
    [(torch.bfloat16, 8, 0), (torch.bfloat16, 5, 3), (torch.float32, 6, 2), (torch.float16, 4, 2)],
    ids=str,
)
def test_moves(dtype: torch.dtype, dim: int, padding: int) -> None:
    pick = random.Random(dim)
    table = moves.ring_table(some_rings(dtype, dim, padding))
    assert table.word_bytes == (2 if dim == 5 else 4)
    for depth in (WINDOW, 3, 1):
        slots, _, lens = some_rows(pick, -1)
        paths = torch.tensor([some_path(pick, max(n, 2)) for n in lens], dtype=torch.int32)[:, :depth]
        cursors, want, got = some_cursors(pick), *(some_rings(dtype, dim, padding, d) for d in ("cpu", DEVICE))
        mine = moves.ring_table(got)
        moves.move_rows(want, cursors, slots, paths, pad_slot_id=-1)
        rows = placed(cursors, slots, paths)
        commit_launch.move_rows(got, *rows, mine.entries, mine.word_bytes, pad_slot_id=-1)
        for a, b in zip(want, got, strict=True):
            assert torch.equal(bits(a), bits(b))


def test_a_cache_of_all_families_commits_paths_with_kernels() -> None:
    layers = (
        Mamba2Spec(num_heads=2, head_dim=4, d_state=8, n_groups=1, layer_idx=0),
        GDNSpec(num_k_heads=1, num_v_heads=2, head_k_dim=8, head_v_dim=4, layer_idx=1),
        KDASpec(num_k_heads=1, num_v_heads=1, head_k_dim=8, head_v_dim=4, layer_idx=2),
    )
    caches = []
    for backend, device in (("torch", "cpu"), ("triton", DEVICE)):
        cache = ReplayCache(Plan(layers, num_draft_tokens=4, buffer_len=8, backend=backend, device=device), 3)
        for i, tensor in enumerate(cache._tensors()[:-1]):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(i)))
        cache.cursors.copy_(torch.tensor([[11, 3, NO_LIMIT, 0], [0, 8, NO_LIMIT, 2], [5, 0, 4, 0]]))
        parents = torch.tensor([-1, 0, 0, 2, 2] * 3, dtype=torch.int32)
        for paths in ([[0, 2, 4], [], [0, 1]], [[0], [0, 2, 3], [0, 2, 4]]):
            cache = copy.deepcopy(cache)  # the copy's rings lie elsewhere
            cache.commit(cache.begin_step([2, 1, 0], 5, parents=parents), accepted_paths=paths)
        cache.commit(cache.begin_step([1, 0], [3, 2]), [2, 0])
        cache.take_back([1], [1])
        caches.append(cache)
    for a, b in zip(caches[0]._tensors(), caches[1]._tensors(), strict=True):
        assert torch.equal(a, b.cpu())
