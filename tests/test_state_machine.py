"""Whole lifecycles of requests, drawn by hypothesis, against token-by-token decoding."""

from __future__ import annotations

import random

import pytest
import torch
from families import random_tokens, relative_error
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from requests_model import EPS, LAYERS, Requests, small_plan, tree_path

from replayssm import ReplayCache

NUM_SLOTS = 5


class CacheMachine(RuleBasedStateMachine):
    """Load, decode, verify, accept, flush, copy, materialize, reset and recycle in any order."""

    @initialize(seed=st.integers(0, 2**16), pad=st.sampled_from([-1, 0]), spread=st.booleans())
    def start(self, seed: int, pad: int, spread: bool) -> None:
        self.pad = pad
        cache = ReplayCache(small_plan(spread_flushes=spread), NUM_SLOTS, pad_slot_id=pad)
        for case in LAYERS:
            for tensor in cache.layer(case.spec.layer_idx).tensors():
                tensor.fill_(float("nan"))
        self.requests = Requests(cache, seed)

    def free(self) -> list[int]:
        return [s for s in range(NUM_SLOTS) if s != self.pad and s not in self.requests.states]

    @precondition(lambda self: self.free())
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        self.requests.load(data.draw(st.lists(st.sampled_from(self.free()), unique=True, min_size=1)))

    @precondition(lambda self: self.requests.states)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        self.requests.step(self.draw_rows(data), None, None)

    @precondition(lambda self: self.requests.states)
    @rule(data=st.data())
    def verify(self, data: st.DataObject) -> None:
        rows = self.draw_rows(data)
        lens = [data.draw(st.integers(0, 4)) for _ in rows]
        self.requests.step(rows, lens, [data.draw(st.integers(0, n)) for n in lens])

    @precondition(lambda self: self.requests.states)
    @rule(data=st.data(), buffer_len=st.integers(1, 6))
    def decode_with_a_lower_buffer_len(self, data: st.DataObject, buffer_len: int) -> None:
        self.requests.step(self.draw_rows(data), None, None, buffer_len=buffer_len)

    def draw_rows(self, data: st.DataObject) -> list[int]:
        owned = sorted(self.requests.states)
        rows = data.draw(st.lists(st.sampled_from(owned), unique=True, min_size=1))
        pads = data.draw(st.integers(0, 2))
        return data.draw(st.permutations(rows + [self.pad] * pads))

    @precondition(lambda self: self.requests.states)
    @rule(data=st.data())
    def verify_trees(self, data: st.DataObject) -> None:
        rows = self.draw_rows(data)
        lens = [data.draw(st.integers(0, 4)) for _ in rows]
        parents = [[data.draw(st.integers(-1, i - 1)) for i in range(n)] for n in lens]
        paths = [tree_path(p, data.draw(st.integers(-1, len(p) - 1))) for p in parents]
        self.requests.step(rows, lens, None, parents=parents, paths=paths)

    @precondition(lambda self: self.requests.states)
    @rule(data=st.data())
    def flush(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.requests.states)), unique=True))
        self.requests.cache.flush(slots or None)

    @precondition(lambda self: self.requests.states and self.free())
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        src = data.draw(st.sampled_from(sorted(self.requests.states)))
        dst = data.draw(st.sampled_from(self.free()))
        self.requests.cache.copy([src], [dst])
        self.requests.copy(src, dst)

    @precondition(lambda self: self.requests.states)
    @rule(data=st.data())
    def preempt_and_resume(self, data: st.DataObject) -> None:
        """What leaves the device is the materialised state; the request comes back in another slot."""
        slot = data.draw(st.sampled_from(sorted(self.requests.states)))
        cache = self.requests.cache
        saved = {case.spec.layer_idx: cache.materialize(case.spec.layer_idx, [slot]) for case in LAYERS}
        back = data.draw(st.sampled_from([slot, *self.free()]))
        self.requests.copy(slot, back)
        if back != slot:
            self.requests.forget(slot)
        cache.load([back], saved)

    @precondition(lambda self: self.requests.states)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.requests.forget(data.draw(st.sampled_from(sorted(self.requests.states))))

    @invariant()
    def states_are_exact(self) -> None:
        if hasattr(self, "requests"):
            self.requests.check()


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
