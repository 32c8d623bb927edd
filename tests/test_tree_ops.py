"""Trees as ops: moving ring rows, what torch.library asks of an op, torch.compile, backends that know chains only."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import cast, random_tokens
from requests_model import LAYERS, Requests, small_plan

from replayssm import ReplayCache, ReplayError, delta_decode, mamba2_decode
from replayssm.cursors import NO_LIMIT
from replayssm.ops import registry
from replayssm.ops.moves import move_rows


def test_moving_rows_against_a_plain_loop() -> None:
    pick, num_slots, ring_len, depth = random.Random(0), 5, 9, 4
    for trial in range(40):
        rings = [torch.randn(num_slots, 2, ring_len, 3), torch.randn(num_slots, 3, ring_len + 2)[:, :, :ring_len]]
        rings[0][:, :, pick.randrange(ring_len)] = torch.nan
        cursors = torch.tensor([[pick.randrange(ring_len), pick.randint(0, 5), 0, 0] for _ in range(num_slots)]).int()
        slots = [*pick.sample(range(num_slots), 3), -1, 77] if trial else [-1, 77]
        pick.shuffle(slots)
        paths = [sorted(pick.sample(range(depth), pick.randint(0, depth))) for _ in slots]
        expected = [ring.clone() for ring in rings]
        for slot, path in zip(slots, paths, strict=True):
            for to, row in enumerate(path if 0 <= slot < num_slots else []):
                first = int(cursors[slot, 0] + cursors[slot, 1])
                for ring in expected:
                    ring[slot, :, (first + to) % ring_len] = ring[slot, :, (first + row) % ring_len]
        padded = torch.tensor([[*path, *[-1] * (depth - len(path))] for path in paths], dtype=torch.int32)
        move_rows(rings, cursors, torch.tensor(slots, dtype=torch.int32), padded, pad_slot_id=-1)
        for ring, wanted in zip(rings, expected, strict=True):
            assert torch.equal(ring.nan_to_num(1e9), wanted.nan_to_num(1e9))


def test_committing_a_tree_takes_no_data_dependent_path() -> None:
    """Moving rows traces with symbolic values: nothing is read back to the host."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        slots, paths = torch.zeros(3, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32)
        move_rows([torch.zeros(5, 2, 9, 3)], torch.zeros(5, 4, dtype=torch.int32), slots, paths, pad_slot_id=-1)


def test_the_op_that_moves_rows_keeps_torchs_rules() -> None:
    cursors = torch.tensor([[8, 3, NO_LIMIT, 0]] * 4, dtype=torch.int32)
    slots, paths = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([[0, 2], [1, -1]], dtype=torch.int32)
    rings = [torch.randn(4, 2, 9, 3), torch.randn(4, 2, 9)]
    torch.library.opcheck(torch.ops.replayssm.move_rows.default, (rings, cursors, slots, paths), {"pad_slot_id": -1})


def verify_all(cache: ReplayCache, rows: tuple[torch.Tensor, ...], inputs: list[dict[str, Any]]) -> list[torch.Tensor]:
    slots, starts, parents, paths = rows
    step = cache.begin_step(slots, query_start_loc=starts, max_window_len=4, parents=parents)
    outputs = []
    for case, one in zip(LAYERS, inputs, strict=True):
        decode = mamba2_decode if case.prefix == "mamba2" else delta_decode
        outputs.append(decode(cache.layer(case.spec.layer_idx), step, **one))
    cache.commit(step, accepted_paths=paths)
    return outputs


def test_verifying_trees_compiles_without_graph_breaks() -> None:
    eager, compiled = (Requests(ReplayCache(small_plan(), 3), seed=7) for _ in range(2))
    for requests in (eager, compiled):
        requests.load([0, 2])
    fast = torch.compile(verify_all, fullgraph=True, backend="aot_eager")
    parents = torch.tensor([-1, 0, 0, -1, 0, 0, 2], dtype=torch.int32)
    paths = torch.tensor([[0, 2, -1], [0, 2, 3]], dtype=torch.int32)
    rows = (torch.tensor([2, 0]), torch.tensor([0, 3, 7], dtype=torch.int32), parents, paths)
    for _ in range(4):
        inputs = [
            cast(random_tokens(case, 7, eager.generator) | params, torch.float32)
            for case, params in zip(LAYERS, eager.params, strict=True)
        ]
        for a, b in zip(verify_all(eager.cache, rows, inputs), fast(compiled.cache, rows, inputs), strict=True):
            assert torch.equal(a, b)
    assert torch.equal(eager.cache.cursors, compiled.cache.cursors)
    for case in LAYERS:
        idx = case.spec.layer_idx
        assert torch.equal(eager.cache.materialize(idx, [0, 2]), compiled.cache.materialize(idx, [0, 2]))


def test_a_backend_that_knows_chains_only_refuses_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def mamba2_step(*args: Any, max_window_len: int) -> None:
        calls.append({"max_window_len": max_window_len})

    module = SimpleNamespace(mamba2_step=mamba2_step)
    monkeypatch.setattr(registry, "importlib", SimpleNamespace(import_module=lambda name: module))
    step = registry._implementation.__wrapped__("mamba2_step", "triton")
    step(max_window_len=3, parents=None)
    with pytest.raises(ReplayError, match=r"parents is 'a tree'; allowed: None \(chains\) with the triton backend"):
        step(max_window_len=3, parents=torch.zeros(3, dtype=torch.int32))
    assert calls == [{"max_window_len": 3}]
