"""Flushes in chunk form of the one-token GDN and KDA kernels: as accurate as token by token, in every configuration."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from delta_case import NAN, RINGS, Dims, Tensors, copy_of, error, new_layer, own, run_step, run_stepwise
from test_delta_gpu import FP16, KIMI, QWEN, TILES, check_steps, launch

from replayssm.checks import ReplayError
from replayssm.cursors import NUM_COMMITTED, WINDOW_LIMIT
from replayssm.ops.delta import configs
from replayssm.ops.delta.reference import _update

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
# Half a unit in the last place, relative.
HALF_ULP = {BF16: 2.0**-8, FP16: 2.0**-11}
SHAPES = {
    "qwen": QWEN,
    "qwen, fp16 inputs": replace(QWEN, act=FP16),
    "qwen, ring of 30": replace(QWEN, buffer_len=28, ring_len=30),
    "k64, no norm": replace(QWEN, head_k_dim=64, head_v_dim=64, l2norm=False),
    "kimi": KIMI,
}
DECAYS = ("none", "mild", "strong", "mixed")


STEPS = {name: replace(dims, checkpoint=BF16) for name, dims in SHAPES.items()} | {
    "qwen, fp32 state": QWEN,
    "qwen, fp16 state": replace(QWEN, checkpoint=FP16),
    "three v-heads a k-head": Dims(1, 3, 128, 128, buffer_len=16, ring_len=17, act=BF16, checkpoint=BF16),
    "kimi, fp32 state": KIMI,
    "kimi, fp16 state and inputs": replace(KIMI, act=FP16, checkpoint=FP16),
    "kimi, lower bound": replace(KIMI, lower_bound=-5.0, bias=False, checkpoint=BF16),
}


@pytest.mark.parametrize("dims", STEPS.values(), ids=STEPS.keys())
def test_steps_follow_the_reference(dims: Dims) -> None:
    check_steps(dims, 9, 20 if dims.buffer_len < 20 else 32, config=large_batch(dims), replay="chunk")


@pytest.mark.parametrize(("kda", "config"), [(kda, config) for kda, size, config in TILES if size == 2], ids=str)
def test_every_configuration_of_16_bit_states(kda: bool, config: configs.LaunchConfig) -> None:
    dims = KIMI if kda else Dims(1, 4, 128, 128, buffer_len=16, ring_len=17, act=BF16)
    check_steps(replace(dims, checkpoint=BF16), 17, 18, config=config, replay="chunk")


@pytest.mark.parametrize("heads", [(16, 32, False), (16, 64, False), (32, 32, True)], ids=str)
def test_layers_of_real_models(heads: tuple[int, int, bool]) -> None:
    k_heads, v_heads, kda = heads
    dims = Dims(k_heads, v_heads, 128, 128, kda, buffer_len=16, ring_len=17, act=BF16, checkpoint=BF16)
    check_steps(dims, 33, 18, replay="chunk")


def test_unknown_forms_are_refused() -> None:
    with pytest.raises(ReplayError, match="replay is 'fast'; allowed: 'serial' or 'chunk'"):
        check_steps(QWEN, 1, 1, replay="fast")


def large_batch(dims: Dims) -> configs.LaunchConfig:
    """A large batch's configuration: the smallest have tiles that replay serially."""
    heads, sizes = (dims.num_k_heads, dims.num_v_heads), (dims.head_k_dim, dims.head_v_dim)
    shape = configs.Shape(*heads, *sizes, dims.kda, dims.checkpoint.itemsize, dims.ring_len, True, "sm90")
    return configs._with_tiles(configs.STEP[dims.kda, dims.checkpoint.itemsize][-1][1], shape)


class Windows:
    """Slots whose whole rings are flushed again and again, and the same tokens through other recurrences."""

    def __init__(self, dims: Dims, decays: str, batch: int = 6) -> None:
        self.dims, self.decays, self.generator = replace(dims, raw=False, bias=False), decays, torch.Generator()
        self.generator.manual_seed(11)
        self.layer = new_layer(self.dims, batch + 2, self.generator, "cuda")
        self.slots = torch.randperm(batch + 2, generator=self.generator)[:batch].int().cuda()
        own(self.layer, self.dims, self.slots.tolist(), self.generator)
        size = 10.0 ** torch.linspace(-3, 3, batch).cuda()
        state = self.layer["state"]
        state[self.rows] = (state[self.rows].float() * size[:, None, None, None]).to(state.dtype)

    @property
    def rows(self) -> torch.Tensor:
        return self.slots.long()

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def tokens(self) -> list[Tensors]:
        """As many tokens a row as the ring holds; the keys of a row resemble each other, which A has to undo."""
        dims, batch = self.dims, len(self.slots)
        keys = self.random(batch, dims.num_k_heads, dims.head_k_dim)
        strength = {"none": [0.0], "mild": [0.05], "strong": [8.0], "mixed": [0.05, 8.0, 0.5]}[self.decays]
        tokens = []
        for t in range(dims.buffer_len):
            g = -self.random(batch, *dims.gate).abs() * strength[t % len(strength)]
            k = 0.7 * keys + 0.7 * self.random(*keys.shape)
            if not dims.l2norm:
                k *= dims.head_k_dim**-0.5
            one = {"k": k, "v": self.random(batch, dims.num_v_heads, dims.head_v_dim)}
            one = {name: x.to(dims.act) for name, x in one.items()}
            one |= {"g": g, "beta": self.random(batch, dims.num_v_heads).mul(2).sigmoid()}
            one["q"] = one["k"]
            tokens.append({name: x.cuda() for name, x in one.items()})
        return tokens

    def flush(self, layer: Tensors, tokens: list[Tensors], count: torch.Tensor, replay: str) -> None:
        """Put the first `count` [batch] tokens into the rings, wherever those start, and flush them all."""
        cursors = layer["cursors"]
        cursors[self.rows, NUM_COMMITTED] = cursors[self.rows, WINDOW_LIMIT] = count.int()
        for name in RINGS:
            layer[name][self.rows] = NAN
        for t, token in enumerate(tokens):
            at = (cursors[self.rows, 0].long() + t) % self.dims.ring_len
            some = t < count
            for name in ("k", "v", "g", "beta"):
                layer[f"ring_{name}"][self.rows[some], :, at[some]] = token[name][some]
        self.step(layer, tokens[0], replay)
        assert torch.isfinite(layer["state"][self.rows].float()).all()

    def step(self, layer: Tensors, token: Tensors, replay: str) -> None:
        config = large_batch(replace(self.dims, checkpoint=layer["state"].dtype))
        run_step(launch().delta_step, self.dims, layer, token, self.slots, config=config, replay=replay)

    def exact(self, state: torch.Tensor, tokens: list[Tensors], count: torch.Tensor) -> torch.Tensor:
        """The recurrence in float64 on state [batch, HV, V, K]."""
        heads = state.flatten(0, 1)
        for t, token in enumerate(tokens):
            k, v, g, beta = (token[name].flatten(0, 1) for name in ("k", "v", "g", "beta"))
            live = (t < count).repeat_interleave(self.dims.num_v_heads)[:, None, None]
            heads = torch.where(live, _update(heads, k, v, g, beta, self.dims.l2norm)[0], heads)
        return heads.view_as(state)


@pytest.mark.parametrize("dims", SHAPES.values(), ids=SHAPES.keys())
def test_states_are_as_accurate_as_stepwise_in_fp32(dims: Dims) -> None:
    """After 64 windows the error against float64 is at most twice that of stepwise decoding with an fp32 state."""
    for decays in DECAYS:
        windows = Windows(dims, decays)
        layer, count = windows.layer, torch.full((6,), dims.buffer_len, device="cuda")
        stepwise = copy_of(layer)
        exact = layer["state"][windows.rows].double()
        for _ in range(64):
            tokens = windows.tokens()
            windows.flush(layer, tokens, count, "chunk")
            for token in tokens:
                run_stepwise(launch().delta_stepwise, windows.dims, stepwise, token, windows.slots)
            exact = windows.exact(exact, tokens, count)
        errors = [error(x["state"][windows.rows], exact) for x in (layer, stepwise)]
        assert errors[0] <= 2 * errors[1], (decays, errors)


@pytest.mark.parametrize("checkpoint", [BF16, FP16], ids=str)
@pytest.mark.parametrize("dims", SHAPES.values(), ids=SHAPES.keys())
def test_a_flush_is_an_fp32_recurrence_rounded_once(dims: Dims, checkpoint: torch.dtype) -> None:
    """Every element is off by half a unit of its format and twice the largest error of the fp32 recurrence at most."""
    for decays in DECAYS:
        windows = Windows(replace(dims, checkpoint=checkpoint), decays)
        count = torch.tensor([1, 2, dims.buffer_len, 5, dims.buffer_len - 1, dims.buffer_len], device="cuda")
        tokens, single = windows.tokens(), copy_of(windows.layer)
        single["state"] = single["state"].float()
        exact = windows.exact(windows.layer["state"][windows.rows].double(), tokens, count)
        windows.flush(single, tokens, count, "serial")
        windows.flush(windows.layer, tokens, count, "chunk")
        in_fp32 = (single["state"][windows.rows] - exact).abs().amax((2, 3), keepdim=True)
        off = (windows.layer["state"][windows.rows].double() - exact).abs()
        assert (off <= exact.abs() * HALF_ULP[checkpoint] + 2 * in_fp32 + 2.0**-25).all(), decays


@pytest.mark.parametrize("checkpoint", [BF16, FP16], ids=str)
@pytest.mark.parametrize("dims", [QWEN, KIMI], ids=["qwen", "kimi"])
def test_16_bit_states_stray_no_further_than_token_by_token(dims: Dims, checkpoint: torch.dtype) -> None:
    """After 64 windows, each rounded once either way: the same error to a tenth, below that of a rounding a token."""
    windows = Windows(replace(dims, checkpoint=checkpoint), "mild")
    layer, count = windows.layer, torch.full((6,), dims.buffer_len, device="cuda")
    serial, stepwise = copy_of(layer), copy_of(layer)
    exact = layer["state"][windows.rows].double()
    for _ in range(64):
        tokens = windows.tokens()
        windows.flush(layer, tokens, count, "chunk")
        windows.flush(serial, tokens, count, "serial")
        for token in tokens:
            run_stepwise(launch().delta_stepwise, windows.dims, stepwise, token, windows.slots)
        exact = windows.exact(exact, tokens, count)
    chunk, by_token, rounded = (error(x["state"][windows.rows], exact) for x in (layer, serial, stepwise))
    assert chunk <= 1.1 * by_token and chunk < rounded
