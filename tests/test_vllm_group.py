"""Cursors of a KV-cache group over steps as vLLM makes them: shuffled rows, pads, drafts, prefills, recycled blocks.

Needs no vLLM. The oracle is stepwise decoding of the accepted tokens alone.
"""

from __future__ import annotations

import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from replayssm import GDNSpec, KDASpec, LayerCache, Mamba2Spec, Plan, ReplayCache, delta_decode, mamba2_decode
from replayssm.cursors import Step
from replayssm.integrations.vllm import pages
from replayssm.integrations.vllm.group import NULL_BLOCK, Group, Rows, continued_blocks, decode_step
from replayssm.integrations.vllm.layer import ReplayLayer
from replayssm.layer import layer_shapes, view_layer
from replayssm.quant import as_indexable, quantize

SPECS = {
    "mamba2": Mamba2Spec(num_heads=4, head_dim=6, d_state=8, n_groups=2),
    "gdn": GDNSpec(num_k_heads=2, num_v_heads=4, head_k_dim=8, head_v_dim=6),
    "kda": KDASpec(num_k_heads=3, num_v_heads=3, head_k_dim=8, head_v_dim=6),
}
BLOCKS, LAYERS = 9, ["a", "b"]


def paged_layer(plan: Plan, cursors: torch.Tensor) -> LayerCache:
    """A layer in pages with padding between and after the tensors, all of it NaN at first."""
    tensors, offset, pool = {}, 1, torch.full((BLOCKS, 5000), float("nan"))
    for name, (shape, dtype) in layer_shapes(plan.layers[0], plan).items():
        assert dtype == torch.float32
        size = torch.Size(shape).numel()
        tensors[name] = pool[:, offset : offset + size].view(BLOCKS, *shape)
        offset += size + 3
    layer = view_layer(plan.layers[0], plan, tensors, cursors)
    layer.A = -torch.linspace(0.5, 4.0, plan.layers[0].state_shape[0])
    return layer


def token_inputs(spec: Any, rng: torch.Generator, n: int) -> tuple[torch.Tensor, ...]:
    """Inputs of n tokens, as the step functions take them."""

    def noise(*shape: int) -> torch.Tensor:
        return torch.empty(n, *shape).normal_(generator=rng)

    if isinstance(spec, Mamba2Spec):
        x, dt = noise(spec.num_heads, spec.head_dim), noise(spec.num_heads)
        return x, dt, noise(spec.n_groups, spec.d_state), noise(spec.n_groups, spec.d_state)
    q, k = noise(spec.num_k_heads, spec.head_k_dim), noise(spec.num_k_heads, spec.head_k_dim)
    v, beta = noise(spec.num_v_heads, spec.head_v_dim), noise(spec.num_v_heads)
    g = noise(spec.num_v_heads, spec.head_k_dim) if isinstance(spec, KDASpec) else noise(spec.num_v_heads)
    return q, k, v, -g.abs(), beta.sigmoid()


def decode(layer: LayerCache, step: Step, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    if isinstance(layer.spec, Mamba2Spec):
        x, dt, B, C = inputs
        return mamba2_decode(layer, step, x, dt, layer.A, B, C)
    return delta_decode(layer, step, *inputs)


class Requests:
    """Requests that live in blocks: what vLLM's scheduler and model runner do, in small."""

    def __init__(self, family: str, drafts: int, seed: int) -> None:
        self.plan = Plan((SPECS[family],), buffer_len=6, num_draft_tokens=drafts, activation=torch.float32)
        self.rng, self.noise = random.Random(seed), torch.Generator().manual_seed(seed)
        self.group = Group(self.plan, BLOCKS, torch.device("cpu"), LAYERS)
        self.layers = [paged_layer(self.plan, self.group.cursors) for _ in LAYERS]
        self.oracle = [paged_layer(self.plan, torch.zeros(BLOCKS, 4, dtype=torch.int32)) for _ in LAYERS]
        self.window: dict[int, list[tuple[torch.Tensor, ...]]] = {}  # block -> each layer's tokens, not yet accepted

    def accept(self, block: int, count: int) -> None:
        """The oracle takes the first `count` tokens of the block's last window."""
        for layer, tokens in zip(self.oracle, self.window[block], strict=True):
            for i in range(count):
                step = Step(torch.tensor([block], dtype=torch.int32), None, 1, 1, 6, NULL_BLOCK, 0, stepwise=True)
                decode(layer, step, tuple(x[i : i + 1] for x in tokens))
        self.window[block] = [tuple(x[:0] for x in tokens) for tokens in self.window[block]]

    def step(self, decodes: list[int], prefills: list[int], resumed: list[int]) -> None:
        """Decode some blocks, prefill others: `resumed` ones go on from their state."""
        lens = {b: self.rng.randint(0, self.plan.max_window_len) if self.plan.num_draft_tokens else 1 for b in decodes}
        accepted = {b: self.rng.randint(1, max(1, len(self.window[b][0][0]))) for b in decodes}
        rows = [*decodes, NULL_BLOCK]
        blocks = torch.tensor([[b, 77] for b in rows], dtype=torch.int32)[:, 0]  # strided, as a column of a table
        starts = torch.tensor([0, *(lens.get(b, 0) for b in rows)]).cumsum(0).int()
        counts = torch.tensor([accepted.get(b, 1) for b in rows], dtype=torch.int32)
        windows = self.plan.num_draft_tokens > 0
        targets = torch.tensor([*prefills, *resumed], dtype=torch.int32)
        has_state = torch.tensor([False] * len(prefills) + [True] * len(resumed))
        for block in decodes:
            self.accept(block, min(accepted[block], len(self.window[block][0][0])))
        for block in resumed:
            self.accept(block, len(self.window[block][0][0]))
        for name, layer, oracle in zip(LAYERS, self.layers, self.oracle, strict=True):
            found = self.group.begin(
                name,
                lambda: Rows(
                    decode_step(self.plan, blocks, starts if windows else None),
                    counts if windows else None,
                    targets if len(targets) else None,
                    continued_blocks(targets, has_state) if len(targets) else None,
                ),
            )
            self._decode_layer(layer, found, rows, lens)
            self._prefill_layer(layer, oracle, found, [*prefills, *resumed])
            self.group.end(name)
        if not windows:
            for block in decodes:
                self.accept(block, 1)

    def _decode_layer(self, layer: LayerCache, found: Rows, rows: list[int], lens: dict[int, int]) -> None:
        n = sum(lens.values()) if self.plan.num_draft_tokens else len(rows)
        inputs = token_inputs(layer.spec, self.noise, n)
        assert found.decodes is not None
        out = decode(layer, found.decodes, inputs)
        assert torch.isfinite(out).all()
        at = 0
        for block in rows[:-1]:
            taken = tuple(x[at : at + lens[block]] for x in inputs)
            index = next(i for i, mine in enumerate(self.layers) if mine is layer)
            self.window[block][index] = taken
            at += lens[block]

    def _prefill_layer(self, layer: LayerCache, oracle: LayerCache, found: Rows, blocks: list[int]) -> None:
        """A stand-in for vLLM's prefill: it reads the plain state where there is one, and writes another."""
        if found.continued is not None:
            layer.replay(found.continued, None, layer.state, found.continued, NULL_BLOCK)
        for block in blocks:
            if found.continued is not None and block in found.continued.tolist():
                torch.testing.assert_close(layer.state[block], oracle.state[block], rtol=1e-5, atol=1e-5)
            new = torch.empty(layer.state.shape[1:]).normal_(generator=self.noise)
            layer.state[block], oracle.state[block] = new, new
            self.window.setdefault(block, [(), ()])
            index = next(i for i, mine in enumerate(self.layers) if mine is layer)
            self.window[block][index] = token_inputs(layer.spec, self.noise, 0)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("seed", range(2))
def test_states_are_those_of_the_accepted_tokens(family: str, drafts: int, seed: int) -> None:
    requests = Requests(family, drafts, seed)
    rng, running = random.Random(seed), set()
    for _ in range(60):
        free = [b for b in range(1, BLOCKS) if b not in running]
        prefills = rng.sample(free, min(len(free), rng.choice((0, 0, 0, 1, 2))))
        resumed = rng.sample(sorted(running), min(len(running), rng.choice((0, 0, 0, 0, 1))))
        decodes = [b for b in running if b not in resumed and rng.random() < 0.9]
        rng.shuffle(decodes)
        requests.step(decodes, prefills, resumed)
        running |= set(prefills)
        running -= {b for b in running if rng.random() < 0.03}  # ended or preempted: its block is given away
    requests.step([], [], sorted(running))  # compares every state once more


def test_first_windows_differ_in_large_batches_only() -> None:
    plan = Plan((SPECS["gdn"],), buffer_len=4)
    group = Group(plan, 300, torch.device("cpu"), LAYERS)
    for first, count, spread in ((1, 8, False), (100, 150, True)):
        blocks = torch.arange(first, first + count, dtype=torch.int32)
        for name in LAYERS:
            group.begin(name, lambda rows=blocks: Rows(prefills=rows))
            group.end(name)
        limits = group.cursors[blocks.long(), 2]
        assert (limits.max() <= 4) == spread
        if spread:
            assert limits.bincount()[1:].tolist() == [38, 38, 37, 37]


@pytest.mark.parametrize("drafts", [0, 3])
def test_requests_start_without_a_prefill(drafts: int) -> None:
    """In a block that another request has left: its state, its ring and its last window are gone."""
    spec, noise = SPECS["gdn"], torch.Generator().manual_seed(0)
    plan = Plan((spec,), buffer_len=6, num_draft_tokens=drafts, activation=torch.float32)
    cache = ReplayCache(plan, BLOCKS, pad_slot_id=NULL_BLOCK)
    layer, group = cache.layer(0), Group(plan, BLOCKS, torch.device("cpu"), ["a"], [lambda: cache.layer(0)])
    layer.cursors = group.cursors
    outputs, inputs = [], token_inputs(spec, noise, 1)
    for block, used in ((4, False), (2, True)):
        blocks = torch.tensor([block], dtype=torch.int32)
        starts = torch.tensor([0, 1], dtype=torch.int32) if drafts else None
        found = Rows(decode_step(plan, blocks, starts))
        for given in [token_inputs(spec, noise, 1)] * (5 if used else 0) + [inputs, inputs]:
            if given is inputs:
                group.start(blocks.long())
            rows = group.begin("a", lambda found=found: found)
            outputs.append(decode(layer, rows.decodes, given))
            group.end("a")
    assert torch.equal(outputs[0], outputs[-1]) and torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[2], outputs[3])  # a request that goes on


@pytest.mark.parametrize("read", ["none", "nvfp4"])
def test_requests_move_to_other_blocks(read: str) -> None:
    """As prefix caching moves them: blocks that are settled hold plain states and copies of them, and empty rings."""
    spec = GDNSpec(num_k_heads=2, num_v_heads=4, head_k_dim=16, head_v_dim=6)
    plan = Plan((spec,), buffer_len=6, activation=torch.float32, read=read)
    cache = ReplayCache(plan, BLOCKS, pad_slot_id=NULL_BLOCK)
    layer, group = cache.layer(0), Group(plan, BLOCKS, torch.device("cpu"), ["a"], [lambda: cache.layer(0)])
    layer.cursors = group.cursors
    noise = torch.Generator().manual_seed(0)
    cache.load_layer(0, [1, 2, 3], torch.empty(3, *spec.state_shape).normal_(generator=noise))
    blocks = torch.tensor([2, 1, 3], dtype=torch.int32)
    for rows in (Rows(prefills=blocks), *[Rows(decode_step(plan, blocks))] * 4):
        group.begin("a", lambda found=rows: found)
        if rows.decodes is not None:
            decode(layer, rows.decodes, token_inputs(spec, noise, 3))
        group.end("a")
    states = torch.empty(3, *spec.state_shape)
    layer.replay(blocks, None, states, torch.arange(3, dtype=torch.int32), NULL_BLOCK)
    src, dst = torch.tensor([2, 1, 2]), torch.tensor([5, 6, 7])  # two requests start from block 2
    group.settle(src)
    layer.state[dst] = layer.state[src]  # what vLLM copies
    group.copied(src, dst)
    for block, row in ((2, 0), (1, 1), (5, 0), (6, 1), (7, 0)):
        assert torch.equal(layer.state[block], states[row])
        assert group.cursors[block, 1] == 0
    assert group.cursors[3, 1] == 4  # the request that stays
    if layer.read_copy is not None:
        made = quantize(layer.state[dst], "nvfp4")
        for name, tensor in layer.read_copy.tensors().items():
            assert torch.equal(as_indexable(tensor)[dst], as_indexable(made.tensors()[name]))


def test_the_log_names_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for what goes through replay and what does not, and one for the kernels of the largest batch."""
    lines: list[str] = []
    logger = SimpleNamespace(info_once=lambda text, *values: lines.append(text % values))
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.logger", SimpleNamespace(init_logger=lambda name: logger))
    replaced, other = ReplayLayer(), SimpleNamespace(plan=None)
    replaced.plan, replaced.max_batch = Plan((GDNSpec(1, 2, 32, 16),), num_draft_tokens=2), 24
    pages._log(["a", "b"], {"a": replaced, "b": other}, [SimpleNamespace(plan=replaced.plan)])
    assert lines == [
        "replayssm: 1 gdn 2x16x32 through replay, 1 SimpleNamespace as in vLLM; "
        "buffer_len 16, checkpoint fp32, read none, torch",
        "replayssm: gdn 2x16x32, 24 requests: torch",
    ]
