"""CUDA-graph timing and the memory ceilings of a device."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

BLOCK = 4096  # floats a program: 16 KiB


@dataclass(frozen=True)
class Ceilings:
    """What the device's memory reaches, in GB/s: reading, and updating in place (reads and writes counted)."""

    read_gbps: float
    update_gbps: float


def time_graph(launches: Sequence[Callable[[], object]], *, repeats: int = 11) -> float:
    """Median microseconds of one of `launches`, captured together in a CUDA graph and replayed `repeats` times."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launches[0]()  # compile outside the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    for _ in range(2):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1000 / len(launches)


def measure_ceilings(device: torch.device, nbytes: int = 2**31) -> Ceilings:
    """Stream over `nbytes` of fp32, much more than any L2 holds."""
    from replayssm.bench.triton_ceilings import read_kernel, update_kernel

    blocks = nbytes // 4 // BLOCK
    x = torch.randn(blocks * BLOCK, device=device)
    out = torch.empty(blocks, device=device)
    read = time_graph([lambda: read_kernel[(blocks,)](x, out, BLOCK=BLOCK, num_warps=4)])
    update = time_graph([lambda: update_kernel[(blocks,)](x, BLOCK=BLOCK, num_warps=4)])
    return Ceilings(x.nbytes / read / 1000, 2 * x.nbytes / update / 1000)
