"""Decoding through the cache on a GPU: every launch, determinism, graphs, large pools, engines' pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from replayssm import GDNSpec, KDASpec, LayerSpec, Mamba2Spec, Plan, ReplayCache, Step
from replayssm.check import run_check
from replayssm.check_cases import FORMATS, SHAPES, CheckCase, check_cases
from replayssm.layer import layer_shapes
from replayssm.workload import op_options, positional, random_inputs, random_parameters

pytestmark = pytest.mark.gpu
FAMILIES = (
    Mamba2Spec(num_heads=16, head_dim=64, d_state=128, n_groups=2),
    GDNSpec(num_k_heads=4, num_v_heads=8, head_k_dim=128, head_v_dim=128),
    KDASpec(num_k_heads=4, num_v_heads=4, head_k_dim=128, head_v_dim=128, lower_bound=-5.0),
)

PLAIN_FORMATS = [formats for formats in FORMATS if formats[1] != "fp8" and formats[2] == "none"]


def name(spec: LayerSpec) -> str:
    return spec.family


@pytest.mark.parametrize("formats", PLAIN_FORMATS, ids="-".join)
@pytest.mark.parametrize("batch", [1, 2, 5, 16, 40, 100, 300])
@pytest.mark.parametrize("spec", SHAPES, ids=lambda s: f"{s.family}-{'x'.join(map(str, s.state_shape))}")
def test_outputs_and_states_against_float64(spec: LayerSpec, batch: int, formats: tuple[str, str, str]) -> None:
    for case in check_cases([spec], ["decode"], [batch], formats=[formats]):
        result = run_check(case, torch.device("cuda"))
        assert result.passed, result


@pytest.mark.parametrize(
    "spec",
    [
        Mamba2Spec(num_heads=96, head_dim=80, d_state=128, n_groups=8),
        Mamba2Spec(num_heads=128, head_dim=64, d_state=128, n_groups=8),
        Mamba2Spec(num_heads=24, head_dim=128, d_state=256, n_groups=1),
        GDNSpec(num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128),
        GDNSpec(num_k_heads=16, num_v_heads=64, head_k_dim=128, head_v_dim=128),
        KDASpec(num_k_heads=32, num_v_heads=32, head_k_dim=128, head_v_dim=128),
    ],
    ids=lambda s: f"{s.family}-{'x'.join(map(str, s.state_shape))}",
)
@pytest.mark.parametrize("batch", [1, 33])
def test_whole_layers_of_real_models(spec: LayerSpec, batch: int) -> None:
    for checkpoint in ("fp32", "bf16"):
        result = run_check(CheckCase(spec, "bf16", checkpoint, "decode", batch), torch.device("cuda"))
        assert result.passed, result


class Layer:
    """One layer's cache on the GPU with random states, and steps of it."""

    def __init__(self, spec: LayerSpec, num_slots: int, seed: int = 0, **options: object) -> None:
        self.spec = replace(spec, layer_idx=0)
        defaults = {"device": "cuda", "activation": torch.bfloat16, "spread_flushes": False}
        self.plan = Plan((self.spec,), **(defaults | options))
        self.generator = torch.Generator().manual_seed(seed)
        self.parameters = random_parameters(spec, self.generator)
        self.cache = ReplayCache(self.plan, num_slots)

    def inputs(self, batch: int) -> dict[str, torch.Tensor]:
        return random_inputs(self.spec, batch, torch.bfloat16, self.generator)

    def decode(self, step: Step, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        layer = self.cache.layer(0)
        every = {n: v.cuda() for n, v in (inputs | self.parameters).items()}
        layer.A = every.get("A")
        out = torch.full((len(inputs["g" if "g" in inputs else "dt"]), *self.spec.state_shape[:2]), float("nan"))
        out = out.bfloat16().cuda()
        layer.ops.step(
            *(*positional(self.spec, every), layer.state, *layer.ring.values(), self.cache.cursors),
            *(step.slot_indices, None, out),
            buffer_len=step.buffer_len,
            pad_slot_id=step.pad_slot_id,
            max_window_len=1,
            **op_options(self.spec),
        )
        return out


@pytest.mark.parametrize("batch", [3, 150])
@pytest.mark.parametrize("spec", FAMILIES, ids=name)
def test_five_identical_launches_are_bit_equal(spec: LayerSpec, batch: int) -> None:
    runs = []
    for _ in range(5):
        layer = Layer(spec, batch)
        layer.cache.layer(0).state.normal_(generator=torch.Generator("cuda").manual_seed(1))
        outputs = []
        for _ in range(20):
            step = layer.cache.begin_step(list(range(batch)))
            outputs.append(layer.decode(step, layer.inputs(batch)))
            layer.cache.commit(step)
        runs.append((torch.stack(outputs), layer.cache.layer(0).state))
    assert all(torch.equal(runs[0][i], run[i]) for run in runs[1:] for i in (0, 1))


@pytest.mark.parametrize("batch", [4, 150])
@pytest.mark.parametrize("spec", FAMILIES, ids=name)
def test_rows_do_not_depend_on_slot_or_neighbours(spec: LayerSpec, batch: int) -> None:
    """The same request as row 0 of slot 2 and as the last row of another slot, among others: equal to the last bit."""
    outputs, states = [], []
    for row, slot, seed in ((0, 2, 11), (batch - 1, batch + 1, 12)):
        layer, mine = Layer(spec, batch + 2, seed), Layer(spec, 1, 5)
        layer.parameters = mine.parameters
        layer.cache.layer(0).state.normal_()
        start = torch.randn(1, *spec.state_shape, generator=mine.generator).cuda()
        layer.cache.load([slot], {0: start})
        others = [s for s in range(batch + 2) if s != slot][: batch - 1]
        slots = [*others[:row], slot, *others[row:]]
        for _ in range(20):
            step = layer.cache.begin_step(slots)
            inputs, one = layer.inputs(batch), mine.inputs(1)
            for key, value in inputs.items():
                value[row] = one[key][0]
            outputs.append(layer.decode(step, inputs)[row])
            layer.cache.commit(step)
        states.append(layer.cache.layer(0).state[slot])
    assert all(torch.equal(a, b) for a, b in zip(outputs[:20], outputs[20:], strict=True))
    assert torch.equal(*states)


@pytest.mark.parametrize("spec", FAMILIES, ids=name)
def test_sixty_four_windows_equal_the_stepwise_kernel(spec: LayerSpec) -> None:
    batch = 8
    layer = Layer(spec, batch)
    state = torch.randn(batch, *spec.state_shape, generator=layer.generator).cuda()
    layer.cache.load(list(range(batch)), {0: state})
    stepwise = layer.cache.layer(0).state.clone()
    slots = torch.arange(batch, dtype=torch.int32, device="cuda")
    for _ in range(64 * 16 + 3):
        inputs = layer.inputs(batch)
        step = layer.cache.begin_step(slots)
        layer.decode(step, inputs)
        layer.cache.commit(step)
        every = {n: v.cuda() for n, v in (inputs | layer.parameters).items()}
        out = torch.empty(batch, *spec.state_shape[:2], dtype=torch.bfloat16, device="cuda")
        layer.cache.layer(0).ops.stepwise(
            *(*positional(spec, every), stepwise, slots, None, out),
            pad_slot_id=-1,
            max_window_len=1,
            **op_options(spec),
        )
    assert int(layer.cache.cursors[0, 3]) == 64
    got = layer.cache.materialize(0, slots)
    assert torch.isfinite(got).all()
    assert torch.equal(got, stepwise)


@pytest.mark.parametrize("spec", FAMILIES, ids=name)
def test_a_captured_step_follows_slots_and_cursors(spec: LayerSpec) -> None:
    """One graph, replayed over more than two cycles while the slot indices and the inputs change in place."""
    eager, graphed = Layer(spec, 8, buffer_len=4), Layer(spec, 8, buffer_len=4)
    for layer in (eager, graphed):
        layer.cache.layer(0).state.normal_(generator=torch.Generator("cuda").manual_seed(2))
    slots = torch.arange(3, dtype=torch.int32, device="cuda")
    static = {n: v.cuda() for n, v in (eager.inputs(3) | eager.parameters).items()}
    out = torch.empty(3, *spec.state_shape[:2], dtype=torch.bfloat16, device="cuda")
    snapshot = [t.clone() for t in (*graphed.cache.layer(0).tensors(), graphed.cache.cursors)]

    def one_step(layer: Layer) -> None:
        target, step = layer.cache.layer(0), layer.cache.begin_step(slots)
        target.ops.step(
            *(*positional(spec, static), target.state, *target.ring.values(), layer.cache.cursors),
            *(step.slot_indices, None, out),
            buffer_len=4,
            pad_slot_id=-1,
            max_window_len=1,
            **op_options(spec),
        )
        layer.cache.commit(step)

    one_step(graphed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_step(graphed)
    for tensor, old in zip((*graphed.cache.layer(0).tensors(), graphed.cache.cursors), snapshot, strict=True):
        tensor.copy_(old)
    generator = torch.Generator().manual_seed(3)
    for _ in range(30):
        slots.copy_(torch.cat([torch.randperm(8, generator=generator)[:2], torch.tensor([-1])]).int())
        for key, value in eager.inputs(3).items():
            static[key].copy_(value)
        graph.replay()
        from_graph = out.clone()
        one_step(eager)
        assert torch.equal(from_graph, out)
    for a, b in zip(eager.cache.layer(0).tensors(), graphed.cache.layer(0).tensors(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(eager.cache.cursors, graphed.cache.cursors)
    assert int(eager.cache.cursors[:, 3].max()) >= 2


@pytest.mark.parametrize("spec", FAMILIES, ids=name)
def test_pools_beyond_two_to_the_31_elements(spec: LayerSpec) -> None:
    per_slot = torch.Size(spec.state_shape).numel()
    num_slots = 2**31 // per_slot + 8
    large, small = Layer(spec, num_slots, checkpoint="bf16"), Layer(spec, 4, checkpoint="bf16")
    start = torch.randn(2, *spec.state_shape, generator=torch.Generator().manual_seed(4)).cuda()
    far = [num_slots - 1, num_slots - 5]
    large.cache.load(far, {0: start})
    small.cache.load([0, 1], {0: start})
    for _ in range(20):
        inputs = small.inputs(2)
        steps = small.cache.begin_step([0, 1]), large.cache.begin_step(far)
        assert torch.equal(small.decode(steps[0], inputs), large.decode(steps[1], inputs))
        small.cache.commit(steps[0])
        large.cache.commit(steps[1])
    assert torch.equal(large.cache.materialize(0, far), small.cache.materialize(0, [0, 1]))


@pytest.mark.parametrize("batch", [3, 150])
@pytest.mark.parametrize("spec", FAMILIES, ids=name)
def test_engine_pages_with_padding_between_slots(spec: LayerSpec, batch: int) -> None:
    """State and rings as views of one padded page a slot, slot 0 as padding; everything else stays as it was."""
    own = Layer(spec, batch + 1, seed=3)
    shapes = layer_shapes(own.spec, own.plan)
    sizes = {n: torch.Size(shape).numel() * dtype.itemsize for n, (shape, dtype) in shapes.items()}
    page_bytes = sum(-(-size // 64) * 64 for size in sizes.values()) + 192
    pages = torch.full(
        (batch + 3, page_bytes), 0xFF, dtype=torch.uint8, device="cuda"
    )  # 0xFF..FF is NaN in all formats
    tensors, at = {}, 0
    for key, (shape, dtype) in shapes.items():
        tensors[key] = pages[:, at : at + sizes[key]].view(dtype).unflatten(1, shape)
        at += -(-sizes[key] // 64) * 64
    paged = Layer(spec, 1, seed=3)
    paged.cache = ReplayCache(own.plan, batch + 3, layers={0: tensors}, pad_slot_id=0)
    slots = torch.randperm(batch, generator=torch.Generator().manual_seed(6)) + 1
    start = torch.randn(batch, *spec.state_shape, generator=torch.Generator().manual_seed(7)).cuda()
    own.cache.load(slots - 1, {0: start})
    paged.cache.load(slots, {0: start})
    idle = pages[[0, batch + 1, batch + 2]].clone()
    for _ in range(20):
        inputs = own.inputs(batch)
        steps = own.cache.begin_step((slots - 1).tolist()), paged.cache.begin_step(slots.tolist())
        assert torch.equal(own.decode(steps[0], inputs), paged.decode(steps[1], inputs))
        own.cache.commit(steps[0])
        paged.cache.commit(steps[1])
    assert torch.equal(own.cache.materialize(0, slots - 1), paged.cache.materialize(0, slots))
    assert torch.equal(pages[[0, batch + 1, batch + 2]], idle)
    assert (pages[:, -192:] == 0xFF).all()
