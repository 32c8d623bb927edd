"""Windows of drafts over many steps on a GPU: graphs, large pools, and a thousand windows with random acceptance."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from replayssm import GDNSpec, KDASpec, LayerSpec, Mamba2Spec, Plan, ReplayCache, Step, delta_decode, mamba2_decode
from replayssm.ops.registry import family_ops
from replayssm.workload import op_options, positional, random_inputs, random_parameters

pytestmark = pytest.mark.gpu
MAMBA2 = Mamba2Spec(num_heads=8, head_dim=64, d_state=128, n_groups=2)
GDN = GDNSpec(num_k_heads=2, num_v_heads=4, head_k_dim=128, head_v_dim=128)
KDA = KDASpec(num_k_heads=2, num_v_heads=2, head_k_dim=128, head_v_dim=128, lower_bound=-5.0)
FAMILIES = (MAMBA2, GDN, KDA)
DRAFTS, TOKENS = 3, 2048
Run = Callable[..., None]


def name(spec: LayerSpec) -> str:
    return spec.family


class Requests:
    """One layer's cache with windows of up to DRAFTS + 1 tokens; whatever no request owns holds NaN."""

    def __init__(self, spec: LayerSpec, num_slots: int, owned: list[int], seed: int = 0, **options: Any) -> None:
        self.spec = replace(spec, layer_idx=0)
        self.plan = Plan((self.spec,), num_draft_tokens=DRAFTS, device="cuda", spread_flushes=False, **options)
        self.cache, self.owned = ReplayCache(self.plan, num_slots), owned
        self.layer, self.pick = self.cache.layer(0), random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.parameters = {n: v.cuda() for n, v in random_parameters(spec, self.generator).items()}
        for tensor in self.layer.tensors():
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0x7F)
        self.cache.load(owned, {0: self.new_states(len(owned))})
        if "A" in self.parameters:
            self.cache.bind(0, self.parameters["A"])

    def new_states(self, count: int) -> torch.Tensor:
        states = torch.randn(count, *self.spec.state_shape, generator=self.generator)
        return (states * self.spec.state_shape[2] ** -0.5).cuda()

    def inputs(self, tokens: int) -> dict[str, torch.Tensor]:
        values = random_inputs(self.spec, tokens, torch.bfloat16, self.generator)
        return {n: v.cuda() for n, v in values.items()}

    def decode(self, step: Step, inputs: dict[str, torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = torch.full((step.num_tokens, *self.spec.state_shape[:2]), float("nan"), device="cuda").bfloat16()
        run = mamba2_decode if self.spec.family == "mamba2" else delta_decode
        return run(self.layer, step, **inputs, **self.parameters, out=out)

    def rows(self) -> tuple[list[int], list[int], list[int]]:
        """Slots in a new order with padding among them, window lengths from zero on, accepted tokens."""
        slots = [*self.pick.sample(self.owned, len(self.owned)), -1]
        self.pick.shuffle(slots)
        lens = [self.pick.randint(0, DRAFTS + 1) for _ in slots]
        return slots, lens, [self.pick.randint(0, n) for n in lens]


def table_kernels(spec: LayerSpec) -> tuple[Run, Run, Run]:
    """What a plan runs: windows, stepwise decoding; and decoding in float64."""
    ops = family_ops(spec.family, "triton", torch.device("cuda"))
    return ops.step, ops.stepwise, family_ops(spec.family, "torch", torch.device("cuda")).stepwise


def portable_kernels(spec: LayerSpec) -> tuple[Run, Run, Run]:
    """The portable GDN and KDA kernels, which other GPUs run."""
    from replayssm.ops.delta.configs import LaunchConfig
    from replayssm.ops.delta.launch import delta_stepwise
    from replayssm.ops.delta.window_launch import delta_window
    from replayssm.ops.window_config import WindowConfig

    def window(*args: Any, **options: Any) -> None:
        delta_window(*args, **options, config=WindowConfig("triton", 16, 4))

    def stepwise(*args: Any, **options: Any) -> None:
        delta_stepwise(*args, **options, config=LaunchConfig("triton", 16, 4))

    return window, stepwise, table_kernels(spec)[2]


class Lifecycle:
    """Windows through the ring; then the accepted tokens of every request, token by token in fp32 and in float64."""

    def __init__(self, requests: Requests, kernels: tuple[Run, Run, Run]) -> None:
        self.requests, self.spec = requests, requests.spec
        self.window, self.stepwise, self.exact = kernels
        self.inputs = requests.inputs(TOKENS)
        self.start = {slot: requests.layer.state[slot].clone() for slot in requests.owned}
        self.tokens: dict[int, list[int]] = {slot: [] for slot in requests.owned}
        self.finite = torch.ones((), dtype=torch.bool, device="cuda")

    def step(self) -> None:
        slots, lens, accepted = self.requests.rows()
        first = self.requests.pick.randint(0, TOKENS - sum(lens))
        step = self.requests.cache.begin_step(slots, lens)
        self._window(step, first, sum(lens))
        self.requests.cache.commit(step, accepted)
        for row, slot in enumerate(slots):
            if slot >= 0:
                begin = first + sum(lens[:row])
                self.tokens[slot] += range(begin, begin + accepted[row])

    def recycle(self, slot: int) -> None:
        """A new request takes the slot."""
        self.start[slot], self.tokens[slot] = self.requests.new_states(1)[0], []
        self.requests.cache.load([slot], {0: self.start[slot][None]})

    def flush(self) -> None:
        """By a step of the window kernel in which every row flushes and nothing is accepted."""
        owned = self.requests.owned
        step = self.requests.cache.begin_step(owned, [1] * len(owned), buffer_len=1)
        self._window(step, 0, len(owned))
        self.requests.cache.commit(step, [0] * len(owned))

    def _window(self, step: Step, first: int, count: int) -> None:
        layer, out = self.requests.layer, self._out(count)
        inputs = {n: v[first : first + count] for n, v in self.inputs.items()}
        rows = (self.requests.cache.cursors, step.slot_indices, step.query_start_loc, out)
        options = {"buffer_len": step.buffer_len, "pad_slot_id": -1, "max_window_len": step.max_window_len}
        arguments = positional(self.spec, inputs | self.requests.parameters)
        self.window(*arguments, layer.state, *layer.ring.values(), *rows, **options, **op_options(self.spec))
        self.finite &= torch.isfinite(out).all()

    def decoded(self) -> torch.Tensor:
        """States [owned, ...] after stepwise decoding; where a request has no token left, its row is padding."""
        states = torch.stack([self.start[slot] for slot in self.requests.owned])
        longest = max(map(len, self.tokens.values()))
        paths = [self.tokens[slot] for slot in self.requests.owned]
        index = torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths]).t().cuda()
        gathered = {n: v[index] for n, v in self.inputs.items()}
        out, options = self._out(len(paths)), {"pad_slot_id": -1, "max_window_len": 1, **op_options(self.spec)}
        live = torch.tensor([[r if t < len(p) else -1 for r, p in enumerate(paths)] for t in range(longest)])
        for t, slots in enumerate(live.int().cuda()):
            arguments = positional(self.spec, {n: v[t] for n, v in gathered.items()} | self.requests.parameters)
            self.stepwise(*arguments, states, slots, None, out, **options)
        return states

    def decoded_exactly(self) -> torch.Tensor:
        """The same in float64."""
        paths = [self.tokens[slot] for slot in self.requests.owned]
        kept = torch.tensor([i for path in paths for i in path]).cuda()
        every = {n: v[kept] for n, v in self.inputs.items()} | self.requests.parameters
        arguments = positional(self.spec, {n: v.double() for n, v in every.items()})
        states = torch.stack([self.start[slot] for slot in self.requests.owned]).double()
        starts = torch.tensor([0, *map(len, paths)], device="cuda").cumsum(0).int()
        rows = (torch.arange(len(paths), device="cuda").int(), starts, self._out(len(kept)).double())
        options = {"pad_slot_id": -1, "max_window_len": max(map(len, paths)), **op_options(self.spec)}
        self.exact(*arguments, states, *rows, **options)
        return states

    def _out(self, tokens: int) -> torch.Tensor:
        return torch.full((tokens, *self.spec.state_shape[:2]), float("nan"), dtype=torch.bfloat16, device="cuda")


def error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("spec", "kernels", "windows"),
    [
        (MAMBA2, table_kernels, 1000),
        (GDN, table_kernels, 1000),
        (KDA, table_kernels, 1000),
        (GDN, portable_kernels, 200),
        (KDA, portable_kernels, 200),
    ],
    ids=["mamba2", "gdn", "kda", "gdn-portable", "kda-portable"],
)
def test_a_thousand_windows_equal_decoding_the_accepted_tokens(
    spec: LayerSpec, kernels: Callable[[LayerSpec], tuple[Run, Run, Run]], windows: int
) -> None:
    """Random acceptance from none to all, windows of zero tokens, padding, and a slot that is now and then recycled.

    To the last bit with the kernels of the tables: all sum over K in one order. In the portable ones, whose layouts the
    compiler chooses, the order is not the same in every kernel.
    """
    owned = [5, 0, 3, 7, 2]
    life = Lifecycle(Requests(spec, 9, owned), kernels(spec))
    for i in range(windows):
        life.step()
        if i % 300 == 99:
            life.recycle(owned[3])
    life.flush()
    state, cursors = life.requests.layer.state, life.requests.cache.cursors
    assert bool(life.finite) and int(cursors[owned, 1].max()) == 0 and int(cursors[owned[0], 3]) > windows // 25
    assert state[[slot for slot in range(9) if slot not in owned]].isnan().all()
    plain, exact = life.decoded(), life.decoded_exactly()
    if kernels is table_kernels:
        assert torch.equal(state[owned], plain)
    errors = [error(states, exact) for states in (state[owned], plain)]
    assert errors[0] <= 2 * errors[1], errors


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("spec", FAMILIES, ids=name)
def test_a_captured_window_step_follows_slots_cursors_and_acceptance(spec: LayerSpec, tree: bool) -> None:
    """One graph of begin, decode and commit, replayed over several cycles while all of its inputs change in place."""
    eager, graphed = (Requests(spec, 8, list(range(8))) for _ in range(2))
    window, batch = DRAFTS + 1, 4
    slots = torch.tensor([3, 1, -1, 6], dtype=torch.int32, device="cuda")
    starts = torch.arange(0, batch * window + 1, window, dtype=torch.int32, device="cuda")
    accepted = torch.zeros(batch, dtype=torch.int32, device="cuda")
    paths = torch.full((batch, 3), -1, dtype=torch.int32, device="cuda")
    parents = torch.tensor([-1, 0, 0, 2] * batch, dtype=torch.int32, device="cuda") if tree else None
    static = eager.inputs(batch * window)
    out = torch.empty(batch * window, *spec.state_shape[:2], dtype=torch.bfloat16, device="cuda")

    def one_step(requests: Requests) -> None:
        rows = {"query_start_loc": starts, "max_window_len": window, "parents": parents}
        step = requests.cache.begin_step(slots, **rows)
        requests.decode(step, static, out)
        requests.cache.commit(step, **({"accepted_paths": paths} if tree else {"num_accepted_tokens": accepted}))

    before = [t.clone() for t in graphed.cache._tensors()]
    one_step(graphed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_step(graphed)
    for tensor, old in zip(graphed.cache._tensors(), before, strict=True):
        tensor.copy_(old)
    pick = eager.pick
    for _ in range(60):
        lens = [window if tree else pick.randint(0, window) for _ in range(batch)]
        slots.copy_(torch.tensor(pick.sample([*pick.sample(range(8), 3), -1], batch)))
        starts.copy_(torch.tensor([0, *lens]).cumsum(0))
        accepted.copy_(torch.tensor([pick.randint(0, n) for n in lens]))
        paths.copy_(torch.tensor([pick.choice([[0, 2, 3], [0, 1, -1], [0, -1, -1], [-1] * 3]) for _ in lens]))
        for key, value in eager.inputs(batch * window).items():
            static[key].copy_(value)
        outputs = []
        for run in (graph.replay, lambda: one_step(eager)):
            out.fill_(float("nan"))
            run()
            assert torch.isfinite(out[: sum(lens)]).all()
            outputs.append(out[: sum(lens)].clone())
        assert torch.equal(*outputs)
    for mine, theirs in zip(eager.cache._tensors(), graphed.cache._tensors(), strict=True):
        assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))
    assert int(eager.cache.cursors[:, 3].max()) >= 2


@pytest.mark.parametrize("spec", FAMILIES, ids=name)
def test_pools_beyond_two_to_the_31_elements(spec: LayerSpec) -> None:
    num_slots = 2**31 // torch.Size(spec.state_shape).numel() + 8
    far, near = [num_slots - 1, num_slots - 5], [0, 1]
    large, small = Requests(spec, num_slots, far, checkpoint="bf16"), Requests(spec, 2, near, checkpoint="bf16")
    for _ in range(40):
        lens = [small.pick.randint(0, DRAFTS + 1), DRAFTS + 1]
        accepted = [small.pick.randint(0, n) for n in lens]
        inputs = small.inputs(sum(lens))
        steps = small.cache.begin_step(near, lens), large.cache.begin_step(far, lens)
        assert torch.equal(small.decode(steps[0], inputs), large.decode(steps[1], inputs))
        small.cache.commit(steps[0], accepted)
        large.cache.commit(steps[1], accepted)
    assert int(small.cache.cursors[:, 3].min()) >= 1
    assert torch.equal(large.cache.materialize(0, far), small.cache.materialize(0, near))
