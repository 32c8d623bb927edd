"""Windows with a read copy on a GPU: shapes, formats, many steps, lowered buffers, graphs."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from read_window_case import (
    BF16,
    FP16,
    FP32,
    KIMI,
    NANO,
    QWEN,
    READS,
    SPECS,
    SUPER,
    check,
    copied,
    make_case,
    new_layer,
    read_step,
    replay_of,
    run,
    same_bytes,
)
from test_window_gpu import error, name
from window_lifecycle import FAMILIES, Lifecycle, Requests, table_kernels

from replayssm import LayerSpec, Mamba2Spec
from replayssm.cursors import NUM_COMMITTED
from replayssm.quant import quantize
from replayssm.workload import op_options, positional

pytestmark = pytest.mark.gpu
# buffer_len, the longest window, whether it is a tree. Random keys that are not normalised overflow in 32 rows.
SHAPES = [*product((16,), (4, 6), (False, True)), (20, 10, False), (32, 5, False), (32, 16, True)]
WINDOWS = [
    (spec, *shape) for spec in SPECS for shape in SHAPES if shape[0] == 16 or getattr(spec, "use_qk_l2norm", True)
]


def name_or_str(value: Any) -> str:
    return name(value) if hasattr(value, "family") else str(value)


class ReadLifecycle(Lifecycle):
    """Windows that read a copy."""

    def _window(self, step: Any, first: int, count: int) -> None:
        layer, out = self.requests.layer, self._out(count)
        inputs = {n: v[first : first + count] for n, v in self.inputs.items()}
        rows = (self.requests.cache.cursors, step.slot_indices, step.query_start_loc, out)
        options = {"buffer_len": step.buffer_len, "pad_slot_id": -1, "max_window_len": step.max_window_len}
        arguments = positional(self.spec, inputs | self.requests.parameters)
        options["max_committed"] = self.requests.plan.buffer_len
        options |= layer.op_formats() | op_options(self.spec)
        self.window(*arguments, layer.state, *layer.ring.values(), *rows, **options)
        self.finite &= torch.isfinite(out).all()


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize(("spec", "buffer_len", "window", "tree"), WINDOWS, ids=name_or_str)
def test_windows(spec: LayerSpec, buffer_len: int, window: int, tree: bool, read: str) -> None:
    check(spec, window, read, tree=tree, buffer_len=buffer_len, replay=replay_of(spec))


@pytest.mark.parametrize(("read", "stored"), [*product(("nvfp4", "int8"), ("fp16", "bf16", "fp8")), ("none", "fp8")])
@pytest.mark.parametrize("spec", [SUPER, NANO, QWEN, KIMI], ids=name)
def test_checkpoints(spec: LayerSpec, read: str, stored: str) -> None:
    for buffer_len, replay in product((16, 32), ("serial", "chunk")):
        check(spec, 4, read, stored, buffer_len=buffer_len, replay=replay)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("spec", [SUPER, NANO, QWEN, KIMI], ids=name)
def test_fp16_inputs_and_one_token(spec: LayerSpec, read: str) -> None:
    check(spec, 4, read, activation=FP16, replay=replay_of(spec))
    check(spec, 9, read, activation=FP16, buffer_len=32, replay=replay_of(spec))
    check(spec, 1, read, replay=replay_of(spec))
    check(spec, 1, read, buffer_len=32, replay=replay_of(spec))


@pytest.mark.parametrize(("read", "buffer_len"), [("nvfp4", 16), ("int8", 16), ("nvfp4", 32)])
@pytest.mark.parametrize("spec", FAMILIES, ids=name)
def test_many_windows_remember_as_decoding_does(spec: LayerSpec, read: str, buffer_len: int) -> None:
    """Random acceptance, windows of zero tokens, padding, recycled slots: states and copies after 400 windows."""
    owned, windows = [5, 0, 3, 7, 2], 400
    life = ReadLifecycle(Requests(spec, 9, owned, read=read, buffer_len=buffer_len), table_kernels(spec))
    for i in range(windows):
        life.step()
        if i % 150 == 99:
            life.recycle(owned[3])
    life.flush()
    layer, cursors = life.requests.layer, life.requests.cache.cursors
    assert bool(life.finite) and int(cursors[owned, 1].max()) == 0
    assert int(cursors[owned[0], 3]) > windows // (2 * buffer_len)
    states, plain, exact = layer.state[owned], life.decoded(), life.decoded_exactly()
    if isinstance(spec, Mamba2Spec):
        assert torch.equal(states, plain)
    assert error(states, exact) <= 2 * error(plain, exact)
    copies = layer.read_copy.gather(torch.tensor(owned, device="cuda")).tensors()
    for part, tensor in quantize(states, read).tensors().items():
        assert same_bytes(copies[part], tensor), part


@pytest.mark.parametrize("buffer_len", [32, 64])
@pytest.mark.parametrize("spec", FAMILIES, ids=name)
def test_a_lowered_buffer_flushes_more_rows_than_it_allows(spec: LayerSpec, buffer_len: int) -> None:
    """With 64, GDN's and KDA's kernels for NVIDIA GPUs have no room for what a flush may find."""
    owned, lens = [5, 0, 3], [4, 4, 4]
    requests = Requests(spec, 9, owned, read="nvfp4", buffer_len=buffer_len)
    for _ in range(6):
        step = requests.cache.begin_step(owned, lens)
        requests.decode(step, requests.inputs(sum(lens)))
        requests.cache.commit(step, lens)
    want = requests.cache.materialize(0, owned)
    step = requests.cache.begin_step(owned, lens, buffer_len=4)
    assert bool(torch.isfinite(requests.decode(step, requests.inputs(sum(lens)))).all())
    states = requests.layer.state[owned]
    assert error(states, want) < 2e-6
    copies = requests.layer.read_copy.gather(torch.tensor(owned, device="cuda")).tensors()
    for part, tensor in quantize(states, "nvfp4").tensors().items():
        assert same_bytes(copies[part], tensor), part


@pytest.mark.parametrize("spec", [SUPER, NANO, QWEN, KIMI], ids=name)
def test_a_graph_follows_slots_and_cursors(spec: LayerSpec) -> None:
    """A captured step gives, for rows in another order and other cursors, what it gives without a graph."""
    case = make_case(spec, 4, False, BF16, FP32)
    case.rows = tuple(t.cuda() for t in case.rows)
    case.inputs = {n: t.cuda() for n, t in case.inputs.items()}
    start = new_layer(case, "nvfp4", False, "cuda")
    options = {"window": 4, "replay": replay_of(spec)}
    graphed = copied(start)
    run(read_step(spec), spec, case, copied(start), False, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(read_step(spec), spec, case, graphed, False, **options)
    for turn in range(3):
        case.rows[1].copy_(case.rows[1].roll(turn))
        case.rows[0][:, NUM_COMMITTED] = (case.rows[0][:, NUM_COMMITTED] * 7 // 8).clamp(max=16)
        for name_, tensor in start.items():
            graphed[name_].copy_(tensor)
        out.fill_(float("nan"))
        graph.replay()
        eager = copied(start)
        assert torch.equal(run(read_step(spec), spec, case, eager, False, **options), out)
        for name_ in start:
            assert same_bytes(graphed[name_], eager[name_]), name_
