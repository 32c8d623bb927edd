"""Whole lifecycles of requests, drawn by hypothesis, against token-by-token decoding."""

from __future__ import annotations

import random

import pytest
import torch
from families import random_tokens, relative_error
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from lifecycle_rules import LifecycleRules
from requests_model import EPS, LAYERS, Requests, small_plan

from replayssm import ReplayCache

NUM_SLOTS = 5


class CacheMachine(LifecycleRules):
    """States are those of stepwise decoding, to the last bit, whatever happened."""

    num_slots = NUM_SLOTS

    @initialize(seed=st.integers(0, 2**16), pad=st.sampled_from([-1, 0]), spread=st.booleans())
    def start(self, seed: int, pad: int, spread: bool) -> None:
        self.pad = pad
        cache = ReplayCache(small_plan(spread_flushes=spread), NUM_SLOTS, pad_slot_id=pad)
        for case in LAYERS:
            for tensor in cache.layer(case.spec.layer_idx).tensors():
                tensor.fill_(float("nan"))
        self.model = Requests(cache, seed)

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data(), buffer_len=st.integers(1, 6))
    def decode_with_a_lower_buffer_len(self, data: st.DataObject, buffer_len: int) -> None:
        self.model.step(self.draw_rows(data), None, None, buffer_len=buffer_len)


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
test_lifecycles = CacheMachine.TestCase


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_hundreds_of_windows_stay_bit_equal(num_drafts: int) -> None:
    """Thousands of tokens: ragged windows, any acceptance, shuffled slots, more than 64 flushes of every slot."""
    requests = Requests(ReplayCache(small_plan(num_draft_tokens=num_drafts), NUM_SLOTS), seed=9)
    pick = random.Random(4)
    requests.load([4, 1, 3])
    for _ in range(450):
        rows = pick.sample([4, 1, 3], 3)
        lens = None if num_drafts == 0 else [pick.randint(0, 1 + num_drafts) for _ in rows]
        requests.step(rows, lens, None if lens is None else [pick.randint(0, n) for n in lens])
    requests.check()
    assert int(requests.cache.cursors[[4, 1, 3], 3].min()) >= 64


def test_five_steps_without_a_flush_and_the_one_that_flushes() -> None:
    requests = Requests(ReplayCache(small_plan(buffer_len=8, spread_flushes=False), 2), seed=3)
    requests.load([1])
    for step in range(25):
        requests.step([1], None, None)
        assert int(requests.cache.cursors[1, 1]) == step % 8 + 1
        requests.check()


def test_a_recycled_slot_starts_with_an_empty_ring() -> None:
    requests = Requests(ReplayCache(small_plan(), 2), seed=5)
    requests.load([0, 1])
    for _ in range(9):
        requests.step([0, 1], None, None)
    requests.load([0])
    requests.step([0], [1], [0])
    requests.check()
    requests.step([1, 0], None, None)
    requests.check()


def test_states_do_not_depend_on_the_rest_of_the_batch_or_the_slot() -> None:
    plan = small_plan(spread_flushes=False)
    alone, crowded = (Requests(ReplayCache(plan, slots), seed=6) for slots in (1, 5))
    alone.load([0])
    for case in LAYERS:
        state = alone.cache.layer(case.spec.layer_idx).state
        crowded.cache.load_layer(case.spec.layer_idx, [3], state)
        crowded.cache.load_layer(case.spec.layer_idx, [0, 4], torch.cat([state, state]) * 3)
    pick = random.Random(1)
    for _ in range(20):
        tokens = [random_tokens(case, 3, alone.generator) for case in LAYERS]
        others = pick.sample([3, 0, 4], 3)
        mine = others.index(3)
        small, large = alone.cache.begin_step([0]), crowded.cache.begin_step(others)
        for i in range(len(LAYERS)):
            one = {n: None if v is None else v[mine : mine + 1] for n, v in tokens[i].items()}
            out, among = alone.decode(i, small, one), alone.decode(i, large, tokens[i], crowded.cache)
            assert relative_error(among[mine : mine + 1], out) <= 8 * EPS
        alone.cache.commit(small)
        crowded.cache.commit(large)
    for case in LAYERS:
        idx = case.spec.layer_idx
        assert torch.equal(alone.cache.materialize(idx, [0]), crowded.cache.materialize(idx, [3]))
