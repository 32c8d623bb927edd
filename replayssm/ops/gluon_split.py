"""fp32 numbers as sums of 16-bit ones: exact operands of tensor cores beside a 16-bit checkpoint."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PARTS = gl.constexpr(3)


@gluon.jit
def split(x, part, TYPE: gl.constexpr):
    """Part 0, 1 or 2 of x, which sum up to it; zero for other numbers of a part."""
    first = x.to(TYPE).to(gl.float32)
    rest = x - first
    second = rest.to(TYPE).to(gl.float32)
    small = gl.where(part == 2, rest - second, 0.0)
    return gl.where(part == 0, first, gl.where(part == 1, second, small)).to(TYPE)
