"""Requests of one layer on a GPU that draft, accept and are recycled, and the same tokens decoded one by one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from replayssm import GDNSpec, KDASpec, LayerSpec, Mamba2Spec, Plan, ReplayCache, Step, delta_decode, mamba2_decode
from replayssm.ops.registry import family_ops
from replayssm.workload import op_options, positional, random_inputs, random_parameters

MAMBA2 = Mamba2Spec(num_heads=8, head_dim=64, d_state=128, n_groups=2)
GDN = GDNSpec(num_k_heads=2, num_v_heads=4, head_k_dim=128, head_v_dim=128)
KDA = KDASpec(num_k_heads=2, num_v_heads=2, head_k_dim=128, head_v_dim=128, lower_bound=-5.0)
FAMILIES = (MAMBA2, GDN, KDA)
DRAFTS, TOKENS = 3, 2048
Run = Callable[..., None]


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
