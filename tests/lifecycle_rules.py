"""The rules of a request's life that every state machine of this suite draws from."""

from __future__ import annotations

from typing import Any, Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from requests_model import tree_path


class Model(Protocol):
    """What the rules act on: caches that hold requests, and what must be true of them."""

    @property
    def requests(self) -> list[int]:
        """Slots that hold a request."""

    def load(self, slots: list[int]) -> None: ...

    def step(self, slots: list[int], lens: list[int] | None, accepted: list[int] | None, **options: Any) -> None: ...

    def flush(self, slots: list[int] | None) -> None: ...

    def copy(self, src: int, dst: int) -> None: ...

    def move(self, slot: int, back: int) -> None:
        """Preempt the request and resume it from its materialised state, in the slot `back`."""

    def finish(self, slot: int) -> None: ...

    def check(self) -> None: ...


class LifecycleRules(RuleBasedStateMachine):
    """Load, decode, verify chains and trees, flush, copy, preempt, finish, in any order; subclasses make `model`."""

    num_slots: int
    pad: int
    model: Model

    def free(self) -> list[int]:
        return [s for s in range(self.num_slots) if s != self.pad and s not in self.model.requests]

    def some(self, data: st.DataObject) -> list[int]:
        return data.draw(st.lists(st.sampled_from(self.model.requests), unique=True, min_size=1))

    def one(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(self.model.requests))

    def draw_rows(self, data: st.DataObject) -> list[int]:
        return data.draw(st.permutations(self.some(data) + [self.pad] * data.draw(st.integers(0, 2))))

    @precondition(lambda self: self.free())
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        self.model.load(data.draw(st.lists(st.sampled_from(self.free()), unique=True, min_size=1)))

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        self.model.step(self.draw_rows(data), None, None)

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data())
    def verify(self, data: st.DataObject) -> None:
        rows = self.draw_rows(data)
        lens = [data.draw(st.integers(0, 4)) for _ in rows]
        self.model.step(rows, lens, [data.draw(st.integers(0, n)) for n in lens])

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data())
    def verify_trees(self, data: st.DataObject) -> None:
        rows = self.draw_rows(data)
        lens = [data.draw(st.integers(0, 4)) for _ in rows]
        parents = [[data.draw(st.integers(-1, i - 1)) for i in range(n)] for n in lens]
        paths = [tree_path(p, data.draw(st.integers(-1, len(p) - 1))) for p in parents]
        self.model.step(rows, lens, None, parents=parents, paths=paths)

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data())
    def flush(self, data: st.DataObject) -> None:
        self.model.flush(data.draw(st.one_of(st.none(), st.just(self.some(data)))))

    @precondition(lambda self: self.model.requests and self.free())
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        self.model.copy(self.one(data), data.draw(st.sampled_from(self.free())))

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data())
    def preempt_and_resume(self, data: st.DataObject) -> None:
        slot = self.one(data)
        self.model.move(slot, data.draw(st.sampled_from([slot, *self.free()])))

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.model.finish(self.one(data))

    @invariant()
    def model_holds(self) -> None:
        if hasattr(self, "model"):
            self.model.check()
