"""Windows of drafts over many steps on a GPU: graphs, large pools, and a thousand windows with random acceptance."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from window_lifecycle import DRAFTS, FAMILIES, GDN, KDA, MAMBA2, Lifecycle, Requests, Run, error, table_kernels

from replayssm import LayerSpec

pytestmark = pytest.mark.gpu


def name(spec: LayerSpec) -> str:
    return spec.family


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
