"""Names that Gluon changed between Triton 3.6 and 3.9, under one spelling."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def view(memory, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory in another shape and layout."""
    if _PUBLIC:
        return memory.reinterpret(memory.dtype, shape, layout)
    else:
        return memory._reinterpret(memory.dtype, shape, layout)
