"""Wrong trees and paths: each gives one clear error and leaves the cache as it was, and usable."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from requests_model import LAYERS, Requests, small_plan

from replayssm import ReplayCache, ReplayError

TREE = [-1, 0, 0, 2]


def begin(parents: Any, lens: Any = (1, 3)) -> Any:
    return lambda cache: cache.begin_step([0, 2], list(lens), parents=parents)


def accept(paths: Any, parents: Any = (-1, *TREE), **options: Any) -> Any:
    def call(cache: ReplayCache) -> None:
        step = cache.begin_step([0, 2], [1, 4], parents=None if parents is None else list(parents))
        cache.commit(step, accepted_paths=paths, **options)

    return call


WRONG = {
    "parent of itself": (begin([-1, -1, 1, 1]), "parents[2] is 1; allowed: -1 to 0 (token 1 of its window)"),
    "parent in another row": (begin([-1, 0, 0, 1]), "parents[1] is 0; allowed: -1 to -1 (token 0 of its window)"),
    "parent below the root": (begin([-2, -1, 0, 1]), "parents[0] is -2"),
    "too few parents": (begin([-1, -1, 0]), "parents.shape is [3]; allowed: [4]"),
    "parents of int64": (begin(torch.zeros(4, dtype=torch.int64)), "parents.dtype is torch.int64; allowed"),
    "parents of floats": (begin([-1.0, -1, 0, 0]), "parents is [-1.0, -1, 0, 0]; allowed: integers"),
    "parents of 40 bits": (begin([-1, 0, 2**40, 0]), "parents is [-1, 0, 1099511627776, 0]; allowed: integers"),
    "path of 40 bits": (accept([[0], [2**40]]), "accepted_paths[1] is [1099511627776]; allowed: integers"),
    "parents as a matrix": (begin(torch.zeros(2, 2, dtype=torch.int32)), "parents.shape is [2, 2]; allowed: [4]"),
    "parents on another device": (begin(torch.zeros(4, dtype=torch.int32, device="meta")), "parents.device is 'meta'"),
    "path that skips a token": (accept([[0], [0, 3]]), "accepted_paths[1][1] is 3, whose parent is 2; allowed: a"),
    "path that does not start at the root": (accept([[], [2]]), "accepted_paths[1][0] is 2, whose parent is 0"),
    "path through a sibling": (accept([[0], [0, 1, 2]]), "accepted_paths[1][2] is 2, whose parent is 0"),
    "path beyond the window": (accept([[0, 1], []]), "accepted_paths[0][1] is 1; allowed: 0 to 0, or -1"),
    "path that goes on after its end": (accept([[0, -1, 1], [0, 1, -1]]), "accepted_paths[0][1] is -1"),
    "path too deep": (accept([[0], [0, 2, 3, -1, -1]]), "accepted_paths.shape is [2, 5]; allowed: at most 4 tokens"),
    "path for too few rows": (accept([[0]]), "accepted_paths.shape is [1, 1]; allowed: [2, any]"),
    "path of floats": (accept(torch.zeros(2, 1)), "accepted_paths.dtype is torch.float32"),
    "path as one list": (accept([0, 1]), "accepted_paths is [0, 1]; allowed: a sequence of integers for every row"),
    "path not along a chain": (accept([[0], [0, 2]], parents=None), "accepted_paths[1][1] is 2, whose parent is 1"),
    "tree without a path": (accept(None), "accepted_paths is None; allowed: the accepted path of every row"),
    "counts for a tree": (accept(None, num_accepted_tokens=[1, 1]), "accepted_paths is None; allowed: the"),
    "counts and paths": (accept([[0], [0]], num_accepted_tokens=[1, 1]), "'given with accepted_paths'"),
    "take back more than is committed": (lambda c: c.take_back([0], [4]), "num_tokens is [4]; allowed: 0 to"),
    "take back twice from a slot": (lambda c: c.take_back([0, 0], [1, 1]), "every slot once"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_wrong_trees_change_nothing(call: Any, message: str) -> None:
    requests = Requests(ReplayCache(small_plan(), 4), 1)
    requests.load([0, 2])
    for _ in range(3):
        requests.step([0, 2], None, None)
    tensors = [t for case in LAYERS for t in requests.cache.layer(case.spec.layer_idx).tensors()]
    before = [t.clone() for t in (*tensors, requests.cache.cursors)]
    with pytest.raises(ReplayError) as error:
        call(requests.cache)
    assert message in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip(before, (*tensors, requests.cache.cursors), strict=True))
    requests.step([2, 0], [4, 1], None, parents=[TREE, [-1]], paths=[[0, 2, 3], []])
    requests.check()
