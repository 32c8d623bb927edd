"""Decays of a window's tokens, in as few instructions as fp32's accuracy allows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def decay_of(g):
    """e^g, for log decays and what is at most 0."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 a;
        mul.rn.f32 a, $1, 0f3FB8AA3B;
        ex2.approx.ftz.f32 $0, a;
        }""",
        "=f,f", [g], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
