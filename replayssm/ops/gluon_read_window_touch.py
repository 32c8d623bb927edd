"""What a flush will load soon is asked for before it is needed."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.gluon_window_parts import wrap


@gluon.constexpr_function
def lanes_of(width, step):
    """Lanes, a power of two, of which each asks for `step` of `width` elements."""
    return 1 << (-(-width // step) - 1).bit_length()


@gluon.jit
def touch(ptrs):
    """Bring what the pointers point at to the L2 cache; nothing waits."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def touch_rows(ring, start, count, ring_len, WIDTH: gl.constexpr, ROWS: gl.constexpr):
    """`touch` of a ring's `count` rows of WIDTH elements, of up to ROWS; in sectors of 32 bytes."""
    STEP: gl.constexpr = min(WIDTH, 256 // ring.dtype.element_ty.primitive_bitwidth)
    LANES: gl.constexpr = lanes_of(WIDTH, STEP)
    L: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    j = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, L)), 1)
    c = gl.minimum(gl.expand_dims(gl.arange(0, LANES, layout=gl.SliceLayout(0, L)), 0) * STEP, WIDTH - 1)
    # In place of missing rows the last one.
    row = wrap(start + gl.minimum(j, gl.maximum(count, 1) - 1), ring_len)
    touch(ring + (row * WIDTH + c))
