"""Step ops of the CPU against the plain recurrence: outputs, states and rings, over ragged windows and many flushes."""

from __future__ import annotations

import random

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
    run_materialize,
    run_step,
    run_stepwise,
)

from replayssm import cursors as cursor_ops
from replayssm.cursors import NO_LIMIT, Step

BUFFER_LEN, MAX_WINDOW, NUM_SLOTS = 16, 5, 7
RING_LEN = BUFFER_LEN + MAX_WINDOW
EPS = torch.finfo(torch.float32).eps


class Lifecycle:
    """The same requests decoded three ways: through a backend, and by float64 and float32 stepwise decoding."""

    def __init__(self, case: Case, backend: str, dtype: torch.dtype, poison: float) -> None:
        self.case, self.backend, self.dtype = case, backend, dtype
        self.generator = torch.Generator().manual_seed(1)
        heads, V, K = case.spec.state_shape
        start = torch.randn(NUM_SLOTS, heads, V, K, generator=self.generator, dtype=torch.float64).float()
        self.owned = [5, 1, 3, 0]
        self.exact, self.stepwise = start.double(), start.to(torch.promote_types(dtype, torch.float32))
        self.state = torch.full_like(self.stepwise, poison)
        self.state[self.owned] = self.stepwise[self.owned]
        self.ring = poisoned_ring(case, NUM_SLOTS, RING_LEN, dtype, poison)
        self.cursors = torch.zeros(NUM_SLOTS, 4, dtype=torch.int32)
        self.cursors[:, 0] = torch.randint(0, RING_LEN, (NUM_SLOTS,), generator=self.generator)
        self.cursors[:, 2] = NO_LIMIT
        self.params = random_params(case, self.generator)
        self.pick = random.Random(2)
        self.errors: dict[str, float] = {"replay": 0.0, "stepwise": 0.0}

    def window(self) -> None:
        """One step with random windows (zero tokens included), a pad row, and random acceptance."""
        slots = self.pick.sample(self.owned, 3)
        slots.insert(self.pick.randrange(4), -1)
        lens = [self.pick.randint(0, MAX_WINDOW) for _ in slots]
        starts = torch.tensor([0, *lens]).cumsum(0).int()
        inputs = random_tokens(self.case, sum(lens), self.generator) | self.params
        rows = {"slot_indices": torch.tensor(slots, dtype=torch.int32), "query_start_loc": starts}
        limits = {"buffer_len": BUFFER_LEN, "pad_slot_id": -1, "max_window_len": MAX_WINDOW}
        mine = cast(inputs, self.dtype, self.stepwise.dtype)
        before = {name: ring.clone() for name, ring in self.ring.items()}
        out = run_step(self.case, self.backend, mine, self.state, self.ring, cursors=self.cursors, **rows, **limits)
        self._check_outputs(out, inputs, rows)
        self._check_rings(before, slots, lens)
        accepted = [self.pick.randint(0, n) for n in lens]
        self._accept(inputs, slots, starts.tolist(), accepted)
        step = Step(rows["slot_indices"], starts, MAX_WINDOW, sum(lens), BUFFER_LEN, -1, 0)
        cursor_ops.commit(self.cursors, step, torch.tensor(accepted), RING_LEN)

    def _check_outputs(self, out: torch.Tensor, inputs: dict, rows: dict) -> None:
        expected = run_stepwise(
            self.case, "reference", cast(inputs, torch.float64, torch.float64), self.exact.clone(), **rows
        )
        plain = run_stepwise(self.case, "reference", cast(inputs, torch.float32), self.stepwise.float().clone(), **rows)
        assert torch.isfinite(out).all()
        pads = expected.double().abs().sum((1, 2)) == 0
        assert torch.equal(out[pads], torch.zeros_like(out[pads]))
        if len(out) and not pads.all():
            self.errors["replay"] = max(self.errors["replay"], relative_error(out, expected))
            self.errors["stepwise"] = max(self.errors["stepwise"], relative_error(plain, expected))

    def _check_rings(self, before: dict, slots: list[int], lens: list[int]) -> None:
        """Only the rows of this window changed."""
        touched = torch.zeros(NUM_SLOTS, RING_LEN, dtype=torch.bool)
        for slot, n in zip(slots, lens, strict=True):
            if slot >= 0:
                first = int(self.cursors[slot, 0] + self.cursors[slot, 1])
                touched[slot, [(first + i) % RING_LEN for i in range(n)]] = True
        for name, ring in self.ring.items():
            same = (ring == before[name]) | (ring.isnan() & before[name].isnan())
            changed = ~same.movedim(2, 1).reshape(NUM_SLOTS, RING_LEN, -1).all(2)
            assert not (changed & ~touched).any(), name
            assert torch.isfinite(ring.movedim(2, 1)[touched]).all(), name

    def _accept(self, inputs: dict, slots: list[int], starts: list[int], accepted: list[int]) -> None:
        kept = [starts[r] + i for r, n in enumerate(accepted) for i in range(n)]
        tokens = {n: v if n in self.params or v is None else v[kept] for n, v in inputs.items()}
        where = torch.tensor(slots, dtype=torch.int32)
        loc = torch.tensor([0, *accepted]).cumsum(0).int()
        run_stepwise(self.case, "reference", cast(tokens, torch.float64, torch.float64), self.exact, where, loc)
        mine = cast(tokens, self.dtype, self.stepwise.dtype)
        run_stepwise(self.case, self.backend, mine, self.stepwise, where, loc)

    def materialized(self, num_tokens: torch.Tensor | None = None) -> torch.Tensor:
        dst = torch.full((len(self.owned), *self.state.shape[1:]), float("nan"), dtype=self.stepwise.dtype)
        A = self.params.get("A")
        A = None if A is None else A.to(self.stepwise.dtype)
        slots, rows = torch.tensor(self.owned, dtype=torch.int32), torch.arange(len(self.owned), dtype=torch.int32)
        run_materialize(self.case, self.backend, A, self.state, self.ring, self.cursors, slots, num_tokens, dst, rows)
        return dst


@pytest.mark.parametrize("poison", [float("nan"), 1e30], ids=["nan", "1e30"])
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_lifecycle_equals_stepwise_decoding(case: Case, backend: str, poison: float) -> None:
    life = Lifecycle(case, backend, torch.float32, poison)
    for _ in range(70 if backend == "torch" else 25):
        life.window()
    # The same operations in the same order, whenever a flush comes: equal to the last bit.
    assert torch.equal(life.materialized(), life.stepwise[life.owned])
    # Outputs sum the same terms in another order: a few roundings more than ordinary decoding's own.
    assert life.errors["replay"] <= 4 * life.errors["stepwise"] + 8 * EPS
    unowned = [s for s in range(NUM_SLOTS) if s not in life.owned]
    untouched = torch.full_like(life.state[unowned], poison)
    assert torch.equal(life.state[unowned].nan_to_num(7.0), untouched.nan_to_num(7.0))


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64_lifecycle_agrees_with_the_plain_recurrence(case: Case, backend: str) -> None:
    life = Lifecycle(case, backend, torch.float64, float("nan"))
    for _ in range(25):
        life.window()
    assert life.errors["replay"] <= 1e-12
    assert relative_error(life.materialized(), life.exact[life.owned]) <= 1e-13


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_16_bit_activations_keep_the_recurrence_exact(case: Case, dtype: torch.dtype) -> None:
    life = Lifecycle(case, "torch", dtype, float("nan"))
    for _ in range(70):
        life.window()
    assert torch.equal(life.materialized(), life.stepwise[life.owned])
    # One rounding of each output, and u rounded once on its way through the ring.
    assert life.errors["replay"] <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("case", CASES, ids=str)
def test_materialize_at_every_committed_token(case: Case) -> None:
    life = Lifecycle(case, "torch", torch.float32, float("nan"))
    for _ in range(9):
        life.window()
    reference = Lifecycle(case, "reference", torch.float32, float("nan"))
    for _ in range(9):
        reference.window()
    for most in range(int(life.cursors[life.owned, 1].max()) + 1):
        counts = life.cursors[life.owned, 1].clamp(max=most)
        got, expected = life.materialized(counts), reference.materialized(counts)
        assert relative_error(got, expected) <= 4 * EPS


@pytest.mark.parametrize("checkpoint", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_16_bit_checkpoints_round_once_a_window(case: Case, checkpoint: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    params = random_params(case, generator)
    ring = poisoned_ring(case, 2, BUFFER_LEN + 1, torch.bfloat16)
    cursors = torch.tensor([[3, 0, NO_LIMIT, 0], [0, 0, NO_LIMIT, 0]], dtype=torch.int32)
    state = torch.randn(2, *case.spec.state_shape, generator=generator).to(checkpoint)
    window_state, per_token, exact = state[:1].float(), state.clone(), state.double()
    slot = torch.zeros(1, dtype=torch.int32)
    limits = {"buffer_len": BUFFER_LEN, "pad_slot_id": -1, "max_window_len": 1}
    for t in range(4 * BUFFER_LEN + 1):
        inputs = random_tokens(case, 1, generator) | params
        mine = cast(inputs, torch.bfloat16)
        if t and t % BUFFER_LEN == 0:
            window_state = window_state.to(checkpoint).float()
        run_step(case, "torch", mine, state, ring, cursors=cursors, slot_indices=slot, query_start_loc=None, **limits)
        run_stepwise(case, "torch", mine, window_state, slot)
        run_stepwise(case, "torch", mine, per_token, slot)
        run_stepwise(case, "reference", cast(inputs, torch.float64, torch.float64), exact, slot)
        cursor_ops.commit(cursors, Step(slot, None, 1, 1, BUFFER_LEN, -1, 0), None, BUFFER_LEN + 1)
        if t and t % BUFFER_LEN == 0:
            expected = window_state.clone()
    assert int(cursors[0, 3]) == 4
    assert expected.isfinite().all()
    dst = torch.empty(1, *case.spec.state_shape)
    A = None if "A" not in params else params["A"].float()
    run_materialize(case, "torch", A, state, ring, cursors, slot, None, dst, slot)
    assert torch.equal(dst, window_state)
    assert relative_error(dst, exact[:1]) <= relative_error(per_token[:1], exact[:1])
