"""ReplayCache: memory that an engine owns, copies, materialised prefixes, and accounting."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from families import random_tokens
from requests_model import LAYERS, Requests, small_plan

from replayssm import ReplayCache, ReplayError
from replayssm.layer import layer_shapes

NUM_BLOCKS = 6


def engine_pages(plan, poison: float) -> tuple[dict[int, dict[str, torch.Tensor]], list[torch.Tensor]]:  # type: ignore[no-untyped-def]
    """For each layer one page a block, padded at its end, that holds the state and then the rings."""
    layers, pages = {}, []
    for spec in plan.layers:
        shapes = layer_shapes(spec, plan)
        size = sum(torch.Size(shape).numel() for shape, _ in shapes.values())
        page = torch.full((NUM_BLOCKS, size + 13), poison)
        at, tensors = 0, {}
        for name, (shape, _) in shapes.items():
            n = torch.Size(shape).numel()
            tensors[name] = page[:, at : at + n].view(NUM_BLOCKS, *shape)
            at += n
        layers[spec.layer_idx] = tensors
        pages.append(page)
    return layers, pages


@pytest.mark.parametrize("poison", [float("nan"), 1e30])
def test_engine_owned_pages_with_block_zero_as_padding(poison: float) -> None:
    plan = small_plan()
    layers, pages = engine_pages(plan, poison)
    cursors = torch.full((NUM_BLOCKS, 4), 2**30, dtype=torch.int32)
    cache = ReplayCache(plan, NUM_BLOCKS, layers=layers, cursors=cursors, pad_slot_id=0)
    for case, params in zip(LAYERS, Requests(cache, 1).params, strict=True):
        if case.prefix == "mamba2":
            cache.bind(case.spec.layer_idx, params["A"].float())
    before = [page.clone() for page in pages]
    requests = Requests(cache, 1)
    requests.load([5, 2])
    for _ in range(30):
        requests.step([2, 0, 5, 0], [2, 1, 1, 3], [1, 1, 1, 0])
    requests.check()
    cache.flush([5, 2])
    requests.check()
    for page, old in zip(pages, before, strict=True):
        for block in (0, 1, 3, 4):
            assert torch.equal(page[block].nan_to_num(7.0), old[block].nan_to_num(7.0))
        assert torch.equal(page[:, -13:].nan_to_num(7.0), old[:, -13:].nan_to_num(7.0))
    assert (cursors[[0, 1, 3, 4]] == 2**30).all()


def test_bytes_are_what_the_plan_says() -> None:
    plan = small_plan()
    assert ReplayCache(plan, 7).nbytes == 7 * plan.memory_per_request


def test_copy_reads_all_sources_first() -> None:
    requests = Requests(ReplayCache(small_plan(), 4), 2)
    requests.load([0, 1, 2])
    for _ in range(8):
        requests.step([0, 1, 2], None, None)
    requests.cache.copy([0, 1, 1], [1, 0, 3])
    states = requests.states
    requests.states = {0: states[1], 1: states[0], 2: states[2], 3: [s.clone() for s in states[1]]}
    exact = requests.exact
    requests.exact = {0: exact[1], 1: exact[0], 2: exact[2], 3: [s.clone() for s in exact[1]]}
    requests.check()
    for _ in range(8):
        requests.step([3, 0, 1, 2], None, None)
    requests.check()


def test_materialize_a_prefix_leaves_the_cache_as_it_was() -> None:
    requests = Requests(ReplayCache(small_plan(spread_flushes=False), 2), 3)
    requests.load([1])
    history = {}
    for t in range(4):
        history[t] = [s.clone() for s in requests.states[1]]
        requests.step([1], None, None)
    before = {
        case.spec.layer_idx: [t.clone() for t in requests.cache.layer(case.spec.layer_idx).tensors()] for case in LAYERS
    }
    for t, expected in history.items():
        for case, state in zip(LAYERS, expected, strict=True):
            out = torch.full((1, *case.spec.state_shape), float("nan"))
            assert requests.cache.materialize(case.spec.layer_idx, [1], [t], out=out) is out
            assert torch.equal(out[0], state)
    for idx, tensors in before.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, requests.cache.layer(idx).tensors(), strict=True))


def test_steps_go_stale() -> None:
    cache = ReplayCache(small_plan(), 2)
    step = cache.begin_step([0])
    cache.commit(step)
    for stale in (step,):
        with pytest.raises(ReplayError, match="committed once"):
            cache.commit(stale)
    later = cache.begin_step([1])
    cache.flush()
    with pytest.raises(ReplayError, match="step is an earlier one"):
        cache.commit(later)


def test_replaying_needs_the_decay_rate_of_given_memory() -> None:
    plan = small_plan()
    layers, _ = engine_pages(plan, 0.0)
    cache = ReplayCache(plan, NUM_BLOCKS, layers=layers)
    with pytest.raises(ReplayError, match=r"A of layer 0 is not known; allowed after bind"):
        cache.flush([1])
    cache.bind(0, -torch.ones(4))
    cache.flush([1])


def test_the_reference_backend_serves_the_same_cache() -> None:
    requests = Requests(ReplayCache(small_plan(backend="reference"), 3), 4)
    requests.load([2, 0])
    for _ in range(8):
        requests.step([0, -1, 2], [1, 2, 4], [1, 0, 2])
    requests.cache.flush([0])
    for slot in (0, 2):
        for i, case in enumerate(LAYERS):
            got = requests.cache.materialize(case.spec.layer_idx, [slot])[0]
            torch.testing.assert_close(got, requests.states[slot][i])


def test_a_plan_without_the_ring() -> None:
    requests = Requests(ReplayCache(small_plan(route="stepwise", num_draft_tokens=0), 3), 8)
    requests.load([0, 2])
    for _ in range(9):
        requests.step([2, 0], None, None)
        requests.check()
    assert (requests.cache.cursors[:, 1] == 0).all()
    assert requests.cache.plan.kernels(2)["gdn 2x5x6"] == "stepwise"
    cache = requests.cache
    for name, call in {
        "parents": lambda: cache.begin_step([2, 0], parents=[-1, -1]),
        "num_accepted_tokens": lambda: cache.commit(cache.begin_step([2, 0]), [1, 0]),
        "accepted_paths": lambda: cache.commit(cache.begin_step([2, 0]), accepted_paths=[[0], [-1]]),
        "num_tokens": lambda: cache.take_back([2], [1]),
    }.items():
        with pytest.raises(ReplayError, match=f"{name} is 'given with route stepwise'; allowed: None"):
            call()
    assert small_plan().kernels(2)["gdn 2x5x6"] == "torch"


@pytest.mark.parametrize(("lowered", "expected"), [(None, 0), (4, 6)])
def test_a_step_with_a_lowered_limit_says_how_many_rows_a_flush_may_find(lowered: int | None, expected: int) -> None:
    """A kernel that is laid out for buffer_len rows must not be given a flush of more."""
    requests, given = Requests(ReplayCache(small_plan(buffer_len=6), 3), 5), []
    requests.load([0])
    for case in LAYERS:
        layer = requests.cache.layer(case.spec.layer_idx)
        layer.ops = replace(layer.ops, step=lambda *args, **kwargs: given.append(kwargs.get("max_committed", 0)))
    step = requests.cache.begin_step([0], **({} if lowered is None else {"buffer_len": lowered}))
    for i, case in enumerate(LAYERS):
        requests.decode(i, step, random_tokens(case, 1, requests.generator))
    assert given == [expected] * len(LAYERS)


def test_windows_of_more_rows_than_the_gluon_kernel_lays_out_take_the_portable_one() -> None:
    from replayssm.ops.delta.window_launch import WindowShape, window_config
    from replayssm.ops.window_config import window_rows

    shape = WindowShape(16, 32, 128, 128, False, 4, 4, window_rows(16, 4), "sm90")
    assert window_config(8, shape).backend == "gluon"
    assert window_config(8, replace(shape, rows=window_rows(24, 4))).backend == "triton"


def test_a_column_of_a_table_of_slots_is_made_contiguous_for_kernels() -> None:
    cache = ReplayCache(small_plan(), 4)
    table = torch.tensor([[0, 9], [3, 9], [2, 9]], dtype=torch.int32)
    step = cache.begin_step(table[:, 0])
    assert step.slot_indices.is_contiguous() and step.slot_indices.tolist() == [0, 3, 2]
    whole = table[:, 0].contiguous()
    assert cache.begin_step(whole).slot_indices is whole  # so that a graph follows what is written to it


def test_a_cache_made_in_inference_mode_is_used_outside_of_it() -> None:
    with torch.inference_mode():
        requests = Requests(ReplayCache(small_plan(), 3), 4)
    requests.load([0, 2])
    for _ in range(8):
        requests.step([2, 0], None, None)
    requests.check()
