"""Caches with read copies and fp8 checkpoints on a GPU: every way of writing a checkpoint, and CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from replayssm import GDNSpec, KDASpec, LayerSpec, Mamba2Spec, ReplayCache, delta_decode, mamba2_decode
from replayssm.check import run_check
from replayssm.check_cases import CheckCase
from replayssm.quant import as_indexable, dequantize, quantize
from replayssm.workload import random_inputs, random_parameters

pytestmark = pytest.mark.gpu
SPECS = (
    Mamba2Spec(num_heads=16, head_dim=64, d_state=128, n_groups=2),
    GDNSpec(num_k_heads=4, num_v_heads=8, head_k_dim=128, head_v_dim=128),
    KDASpec(num_k_heads=4, num_v_heads=4, head_k_dim=128, head_v_dim=128, lower_bound=-5.0),
)
NEAREST = (("int8", "fp32"), ("fp8", "fp32"), ("nvfp4", "fp32"), ("nvfp4", "fp16"), ("nvfp4", "fp8"), ("none", "fp8"))
STOCHASTIC = (("int8", "fp16", "stochastic"), ("none", "bf16", "stochastic"), ("nvfp4", "fp8", "stochastic"))
FORMATS = (*((*pair, "nearest") for pair in NEAREST), *STOCHASTIC)
WHOLE = (
    Mamba2Spec(num_heads=96, head_dim=80, d_state=128, n_groups=8),
    Mamba2Spec(num_heads=128, head_dim=64, d_state=128, n_groups=8),
    GDNSpec(num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128),
    GDNSpec(num_k_heads=16, num_v_heads=64, head_k_dim=128, head_v_dim=128),
    KDASpec(num_k_heads=32, num_v_heads=32, head_k_dim=128, head_v_dim=128),
)


def name(value: Any) -> str:
    return f"{value.family}-{'x'.join(map(str, value.state_shape))}" if hasattr(value, "family") else "-".join(value)


def case_of(spec: LayerSpec, formats: tuple[str, str, str], batch: int) -> CheckCase:
    read, checkpoint, rounding = formats
    case = CheckCase(spec, "bf16", checkpoint, "decode", batch, read, rounding=rounding)
    if not case.runs_on(torch.device("cuda")):
        pytest.skip(f"no kernels for {formats}")
    return case


class Requests:
    """One layer's cache, and the same inputs for any cache of the same seed."""

    def __init__(self, spec: LayerSpec, formats: tuple[str, str, str], num_slots: int, seed: int = 0) -> None:
        self.spec = replace(spec, layer_idx=0)
        plan = case_of(self.spec, formats, 1).plan(torch.device("cuda")).with_options(spread_flushes=False)
        self.cache = ReplayCache(plan, num_slots)
        self.generator = torch.Generator().manual_seed(seed)
        self.parameters = {n: v.cuda() for n, v in random_parameters(spec, self.generator).items()}

    def load(self, slots: list[int]) -> None:
        self.cache.load(slots, {0: torch.randn(len(slots), *self.spec.state_shape, generator=self.generator).cuda()})

    def inputs(self, batch: int) -> dict[str, torch.Tensor]:
        return {n: v.cuda() for n, v in random_inputs(self.spec, batch, torch.bfloat16, self.generator).items()}

    def step(self, slots: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        step = self.cache.begin_step(slots)
        decode: Any = mamba2_decode if isinstance(self.spec, Mamba2Spec) else delta_decode
        out = decode(self.cache.layer(0), step, **inputs, **self.parameters)
        self.cache.commit(step)
        return out

    def check_copies(self, slots: list[int]) -> None:
        """Bit for bit what the CPU makes of the checkpoint."""
        layer, index = self.cache.layer(0), torch.tensor(slots, device="cuda")
        if layer.read_copy is None:
            return
        got = layer.read_copy.gather(index).tensors()
        for key, tensor in quantize(layer.stored.checkpoint(index).cpu(), layer.read_copy.format).tensors().items():
            assert torch.equal(as_indexable(got[key]).cpu(), as_indexable(tensor)), key


@pytest.mark.parametrize("formats", FORMATS, ids=name)
@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_whatever_writes_a_checkpoint_renews_its_copy(spec: LayerSpec, formats: tuple[str, str, str]) -> None:
    requests = Requests(spec, formats, 7)
    requests.load([5, 0, 3])
    requests.check_copies([5, 0, 3])
    slots = torch.tensor([3, 5, 0], dtype=torch.int32, device="cuda")
    for _ in range(20):
        assert torch.isfinite(requests.step(slots, requests.inputs(3))).all()
    requests.check_copies([5, 0, 3])
    cache = requests.cache
    before = cache.materialize(0, [5, 0, 3])
    cache.copy([5], [1])
    cache.flush([5, 0])
    requests.check_copies([5, 0, 3, 1])
    after = cache.materialize(0, [5, 0, 3, 1])
    expected = before if formats[1] == "fp32" else dequantize(quantize(before, formats[1]))
    if formats[2] == "nearest":
        assert torch.equal(after[:2], expected[:2])
    assert torch.equal(after[2:], before[[2, 0]])
    cache.load([2], {0: before[1:2]})
    requests.check_copies([2])


@pytest.mark.parametrize("formats", FORMATS, ids=name)
@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_a_graph_of_a_step_serves_whole_cycles(spec: LayerSpec, formats: tuple[str, str, str]) -> None:
    eager, graphed = (Requests(spec, formats, 40, seed=2) for _ in range(2))
    slots = torch.randperm(40, generator=eager.generator)[:33].int().cuda()
    graphed.generator.set_state(eager.generator.get_state())
    for requests in (eager, graphed):
        requests.load(slots.tolist())
    static = graphed.inputs(33)
    eager.inputs(33)
    assert graphed.cache.seeds is None or torch.equal(graphed.cache.seeds, eager.cache.seeds)
    saved = [t.clone() for t in (*graphed.cache.layer(0).tensors(), graphed.cache.cursors)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graphed.step(slots, static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = graphed.step(slots, static)
    for tensor, old in zip((*graphed.cache.layer(0).tensors(), graphed.cache.cursors), saved, strict=True):
        tensor.copy_(old)
    for _ in range(40):
        inputs = eager.inputs(33)
        for key, value in inputs.items():
            static[key].copy_(value)
        graph.replay()
        assert torch.equal(out, eager.step(slots, inputs))
    pairs = zip(eager.cache.layer(0).tensors(), graphed.cache.layer(0).tensors(), strict=True)
    assert all(torch.equal(as_indexable(a), as_indexable(b)) for a, b in pairs)
    assert int(eager.cache.cursors[slots.long(), 3].min()) >= 2
    eager.check_copies(slots.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("formats", FORMATS, ids=name)
@pytest.mark.parametrize("spec", WHOLE, ids=name)
def test_whole_layers_of_real_models(spec: LayerSpec, formats: tuple[str, str, str]) -> None:
    """Each format at one of three sizes of batch, another for the next layer."""
    batch = (1, 33, 150)[(WHOLE.index(spec) + FORMATS.index(formats)) % 3]
    result = run_check(case_of(spec, formats, batch), torch.device("cuda"))
    assert result.passed, result
