"""Committing accepted paths on a GPU: captured in a CUDA graph, without a synchronisation, equal to the CPU's."""

from __future__ import annotations

import pytest
import torch

from replayssm import GDNSpec, KDASpec, Mamba2Spec, Plan, ReplayCache

pytestmark = pytest.mark.gpu
LAYERS = (
    Mamba2Spec(num_heads=4, head_dim=64, d_state=128, n_groups=2, layer_idx=0),
    GDNSpec(num_k_heads=2, num_v_heads=4, head_k_dim=128, head_v_dim=128, layer_idx=1),
    KDASpec(num_k_heads=2, num_v_heads=2, head_k_dim=128, head_v_dim=128, layer_idx=2),
)
PARENTS = [-1, 0, 0, 2, 2]
PATHS = [[[0, 2, 4], [], [0, 1]], [[0], [0, 2, 3], [0, 2, 4]], [[], [0, 2], [0]]]


def cache_on(device: str) -> ReplayCache:
    """Wrapped rings of known values; NaN in dead rows would have to stay where it is."""
    cache = ReplayCache(Plan(LAYERS, num_draft_tokens=4, device=device), 5)
    for spec in LAYERS:
        for i, ring in enumerate(cache.layer(spec.layer_idx).ring.values()):
            values = torch.randn(ring.shape, generator=torch.Generator().manual_seed(i))
            values[:, :, 7] = torch.nan
            ring.copy_(values)
    cache.cursors.copy_(
        torch.tensor([[19, 3, 2**31 - 1, 0], [0, 16, 2**31 - 1, 2], [12, 9, 4, 0]] + [[0, 0, 1, 0]] * 2)
    )
    return cache


def padded(paths: list[list[int]]) -> torch.Tensor:
    return torch.tensor([[*path, *[-1] * (5 - len(path))] for path in paths], dtype=torch.int32)


def test_captured_commits_equal_the_cpus() -> None:
    host, cache = cache_on("cpu"), cache_on("cuda")
    slots, starts = torch.tensor([2, 4, 0]), torch.tensor([0, 5, 10, 15], dtype=torch.int32)
    parents = torch.tensor(PARENTS * 3, dtype=torch.int32)
    rows = {"query_start_loc": starts.cuda(), "max_window_len": 5, "parents": parents.cuda()}
    on_device, paths = slots.cuda(), padded(PATHS[0]).cuda()
    before = [t.clone() for t in cache._tensors()]

    def commit() -> None:
        step = cache.begin_step(on_device, **rows)
        cache.commit(step, accepted_paths=paths)

    commit()  # warms up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        commit()
    for tensor, old in zip(cache._tensors(), before, strict=True):
        tensor.copy_(old)
    for step_paths in PATHS:
        paths.copy_(padded(step_paths))
        torch.cuda.set_sync_debug_mode("error")
        graph.replay()
        torch.cuda.set_sync_debug_mode("default")
        step = host.begin_step(slots, query_start_loc=starts, max_window_len=5, parents=parents)
        host.commit(step, accepted_paths=padded(step_paths))
        for mine, theirs in zip(cache._tensors(), host._tensors(), strict=True):
            assert torch.equal(mine.cpu().nan_to_num(7.0), theirs.nan_to_num(7.0))
