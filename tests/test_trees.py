"""Windows as draft trees: outputs of every token, and states after any accepted path, against decoding that path."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from families import (
    CASES,
    Case,
    cast,
    poisoned_ring,
    random_params,
    random_tokens,
    relative_error,
    run_step,
    run_stepwise,
)
from requests_model import LAYERS, Requests, small_plan, tree_path

from replayssm import ReplayCache
from replayssm.cursors import NO_LIMIT

BUFFER_LEN = 16
EPS = torch.finfo(torch.float32).eps
SHAPES = ("chain", "random", "bush", "broom")


def make_tree(shape: str, tokens: int, pick: random.Random) -> list[int]:
    """Parents of a window: one path, anything, all beside each other, or a path that ends in leaves."""
    parents = {
        "chain": lambda i: i - 1,
        "random": lambda i: pick.randint(-1, i - 1),
        "bush": lambda i: -1 if i == 0 else 0,
        "broom": lambda i: min(i - 1, tokens // 2),
    }
    return [parents[shape](i) for i in range(tokens)]


class Window:
    """One row with committed rows in a wrapped ring of poison, about to verify a tree."""

    def __init__(self, case: Case, tokens: int, committed: int, dtype: torch.dtype, seed: int) -> None:
        self.case, self.tokens, self.dtype = case, tokens, dtype
        self.precise = torch.promote_types(dtype, torch.float32)
        generator = torch.Generator().manual_seed(seed)
        self.params = random_params(case, generator)
        self.state = torch.randn(2, *case.spec.state_shape, generator=generator, dtype=torch.float64).to(self.precise)
        self.state[0] = torch.nan
        self.ring = poisoned_ring(case, 2, BUFFER_LEN + tokens, dtype)
        self.cursors = torch.tensor([[3, 5, NO_LIMIT, 0], [BUFFER_LEN + tokens - 2, 0, NO_LIMIT, 0]], dtype=torch.int32)
        self.slot = torch.tensor([1], dtype=torch.int32)
        self.before = random_tokens(case, committed, generator)
        self.window = random_tokens(case, tokens, generator)
        for t in range(committed):
            self.step("reference", {n: None if v is None else v[t : t + 1] for n, v in self.before.items()}, None)
            self.cursors[1, 1] += 1

    def step(self, backend: str, inputs: dict[str, Any], parents: list[int] | None) -> torch.Tensor:
        count = len(next(iter(inputs.values())))
        rows = {"slot_indices": self.slot, "query_start_loc": torch.tensor([0, count], dtype=torch.int32)}
        rows["parents"] = None if parents is None else torch.tensor(parents, dtype=torch.int32)
        limits = {"buffer_len": BUFFER_LEN, "pad_slot_id": -1, "max_window_len": max(1, count)}
        mine = cast(inputs | self.params, self.dtype, self.precise)
        return run_step(self.case, backend, mine, self.state, self.ring, cursors=self.cursors, **rows, **limits)

    def expected(self, parents: list[int], dtype: torch.dtype, state: torch.Tensor) -> torch.Tensor:
        """Outputs of decoding every token after its ancestors, one at a time."""
        first = state.to(dtype).clone()
        self._decode(self.before, list(range(len(next(iter(self.before.values()))))), dtype, first)
        states, outputs = {-1: first}, []
        for t, parent in enumerate(parents):
            states[t] = states[parent].clone()
            outputs.append(self._decode(self.window, [t], dtype, states[t]))
        return torch.cat(outputs)

    def _decode(
        self, tokens: dict[str, Any], index: list[int], dtype: torch.dtype, state: torch.Tensor
    ) -> torch.Tensor:
        taken = cast({n: None if v is None else v[index] for n, v in tokens.items()} | self.params, dtype, dtype)
        loc = torch.tensor([0, len(index)], dtype=torch.int32)
        return run_stepwise(self.case, "reference", taken, state, self.slot, loc)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_follow_ancestors_only(case: Case, backend: str, dtype: torch.dtype) -> None:
    pick, errors, stepwise = random.Random(1), 0.0, 0.0
    every = range(1, 17) if dtype == torch.float64 else (2, 5, 9)
    for tokens in every:
        # At 16 tokens or with a full ring the row flushes first.
        committed = pick.choice([0, 3, BUFFER_LEN])
        window = Window(case, tokens, committed, dtype, seed=tokens)
        start = window.state.clone()
        parents = make_tree(SHAPES[tokens % 4], tokens, pick)
        out = window.step(backend, window.window, parents)
        expected = window.expected(parents, torch.float64, start)
        errors = max(errors, relative_error(out, expected))
        if dtype == torch.float32:
            stepwise = max(stepwise, relative_error(window.expected(parents, dtype, start), expected))
    # One rounding of each output in 16 bits, and u rounded once on its way through the ring.
    allowed = {torch.float64: 1e-12, torch.float32: 4 * stepwise + 8 * EPS}
    assert errors <= allowed.get(dtype, 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_chain_given_as_a_tree_is_a_chain(case: Case) -> None:
    one, other = (Window(case, 7, 4, torch.float32, seed=0) for _ in range(2))
    assert torch.equal(one.step("torch", one.window, list(range(-1, 6))), other.step("torch", other.window, None))
    for name, ring in one.ring.items():
        assert torch.equal(ring.nan_to_num(7.0), other.ring[name].nan_to_num(7.0)), name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("committed", [0, 3, 6])
def test_every_path_of_a_tree_can_be_accepted(shape: str, committed: int) -> None:
    """Rows flush or not, rings wrap; after each path the state equals decoding it token by token, bit for bit."""
    tokens = 4
    parents = make_tree(shape, tokens, random.Random(committed))
    for end in range(-1, tokens):
        requests = Requests(ReplayCache(small_plan(spread_flushes=False), 3), seed=committed)
        poison(requests.cache)
        requests.load([2, 0])
        for _ in range(committed):
            requests.step([2], None, None)
        requests.step(
            [0, -1, 2],
            [1, 3, tokens],
            None,
            parents=[[-1], [-1, 0, 0], parents],
            paths=[[0], [], tree_path(parents, end)],
        )
        requests.check()
        # No drafts after partial acceptance, one row without a token at all; then the rest of the window.
        requests.step([2, 0], [1, 0], [1, 0])
        requests.step([0, 2], None, None)
        requests.check()


def poison(cache: ReplayCache) -> None:
    for case in LAYERS:
        for tensor in cache.layer(case.spec.layer_idx).tensors():
            tensor.fill_(torch.nan)


@pytest.mark.parametrize("num_drafts", [3, 15])
def test_a_thousand_windows_with_random_acceptance(num_drafts: int) -> None:
    """Chains, trees and single tokens in turn, slots recycled: every checkpoint equals stepwise decoding's bitwise."""
    plan = small_plan(num_draft_tokens=num_drafts, buffer_len=num_drafts + 3)
    requests, pick = Requests(ReplayCache(plan, 5), seed=num_drafts), random.Random(num_drafts)
    poison(requests.cache)
    requests.load([4, 1, 3])
    windows = 0
    while windows < (1200 if num_drafts == 3 else 240):
        rows = [*pick.sample([4, 1, 3], 3), -1]
        lens = [pick.randint(0, 1 + num_drafts) for _ in rows]
        if pick.random() < 0.5:
            requests.step(rows, lens, [pick.randint(0, n) for n in lens], check_outputs=False)
        else:
            trees = [make_tree(pick.choice(SHAPES), n, pick) for n in lens]
            paths = [tree_path(tree, pick.randint(-1, len(tree) - 1)) for tree in trees]
            requests.step(rows, lens, None, parents=trees, paths=paths, check_outputs=False)
        windows += 3
        if windows % 60 == 0:
            requests.check()
            requests.load([pick.choice([4, 1, 3])])
    requests.check()


def test_taking_back_is_not_committing() -> None:
    requests = Requests(ReplayCache(small_plan(), 3), 2)
    requests.load([0, 2])
    pick = random.Random(3)
    for _ in range(30):
        saved = {s: ([t.clone() for t in requests.states[s]], [t.clone() for t in requests.exact[s]]) for s in (0, 2)}
        requests.step([2, 0], [3, 2], None)
        requests.cache.take_back([2, 0], [3, 2])
        for slot, (states, exact) in saved.items():
            requests.states[slot], requests.exact[slot] = states, exact
        requests.check()
        requests.step([0, 2], [pick.randint(0, 4), 1], None)
    requests.check()
