"""Two kernels that do nothing but move memory: the ceilings that decode kernels are measured against."""

import triton
import triton.language as tl


@triton.jit
def read_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, EVICT: tl.constexpr):
    """Read CHUNKS blocks of x a program; nothing is written, since small writes among reads cost extra."""
    at = tl.program_id(0).to(tl.int64) * (BLOCK * CHUNKS) + tl.arange(0, BLOCK)
    total = tl.load(x_ptr + at, eviction_policy=EVICT)
    for chunk in tl.static_range(1, CHUNKS):
        total += tl.load(x_ptr + at + chunk * BLOCK, eviction_policy=EVICT)
    found = tl.sum(total, 0)
    # No sum of normal numbers is this large, but only the data shows that, so the loads stay.
    tl.store(out_ptr, found, mask=found > 1e30)


@triton.jit
def update_kernel(x_ptr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, EVICT: tl.constexpr):
    """x = x * 0.999 + 0.001, in place, CHUNKS blocks a program."""
    at = tl.program_id(0).to(tl.int64) * (BLOCK * CHUNKS) + tl.arange(0, BLOCK)
    for chunk in tl.static_range(CHUNKS):
        x = tl.load(x_ptr + at + chunk * BLOCK, eviction_policy=EVICT)
        tl.store(x_ptr + at + chunk * BLOCK, x * 0.999 + 0.001, eviction_policy=EVICT)
