"""CUDA-graph timing and the memory ceilings of a device."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# (floats a block, warps, blocks a program, eviction policy): which of them is fastest differs by machine.
READS = (
    (4096, 4, 1, ""),
    (4096, 4, 1, "evict_first"),
    (2048, 4, 2, "evict_first"),
    (4096, 8, 4, "evict_first"),
    (8192, 8, 1, "evict_first"),
    (4096, 8, 2, ""),
)
UPDATES = (
    (1024, 8, 1, ""),
    (512, 4, 1, ""),
    (1024, 4, 1, "evict_first"),
    (2048, 16, 1, ""),
    (4096, 4, 1, ""),
)
WARM_UP_LAUNCHES = 400  # of the first variant, some 0.2 s: clocks rise under load


@dataclass(frozen=True)
class Ceilings:
    """What the device's memory reaches, in GB/s: reading, and updating in place (reads and writes counted)."""

    read_gbps: float
    update_gbps: float

    def best(self, other: Ceilings) -> Ceilings:
        """The higher of both measurements, for one before and one after what is compared with them."""
        return Ceilings(max(self.read_gbps, other.read_gbps), max(self.update_gbps, other.update_gbps))


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


def measure_ceilings(device: torch.device, nbytes: int = 2**31, rounds: int = 2) -> Ceilings:
    """The best of several streaming kernels over `nbytes` of fp32, much more than any L2 holds, each `rounds` times.

    Measure before and after what is compared with the ceilings, and take `Ceilings.best`: a device that is slow for a
    moment (cold clocks, a neighbour) must not make kernels look better than they are.
    """
    from replayssm.bench.triton_ceilings import read_kernel, update_kernel

    x = torch.randn(nbytes // 4, device=device)
    out = torch.empty(1, device=device)

    def launcher(kernel: Any, tensors: tuple[torch.Tensor, ...], variant: tuple[Any, ...]) -> Callable[[], object]:
        block, warps, chunks, evict = variant
        grid = (x.numel() // (block * chunks),)
        return lambda: kernel[grid](*tensors, BLOCK=block, CHUNKS=chunks, EVICT=evict, num_warps=warps)

    reads = [launcher(read_kernel, (x, out), variant) for variant in READS]
    updates = [launcher(update_kernel, (x,), variant) for variant in UPDATES]
    for _ in range(WARM_UP_LAUNCHES):
        reads[0]()
    read = min(time_graph([launch]) for _ in range(rounds) for launch in reads)
    update = min(time_graph([launch]) for _ in range(rounds) for launch in updates)
    return Ceilings(x.nbytes / read / 1000, 2 * x.nbytes / update / 1000)
