"""Two kernels that do nothing but move memory: the ceilings that decode kernels are measured against."""

import triton
import triton.language as tl


@triton.jit
def read_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """out[i] = sum of block i of x."""
    i = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + i, tl.sum(x, 0))


@triton.jit
def update_kernel(x_ptr, BLOCK: tl.constexpr):
    """x = x * 0.999 + 0.001, in place."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at) * 0.999 + 0.001)
