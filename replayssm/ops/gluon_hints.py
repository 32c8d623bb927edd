"""Hints to the memory that a kernel may give before it may read anything: what it will need goes to the L2 cache.

A kernel that starts while the previous one still runs (programmatic dependent launch) must not use what it reads until
that one is done. It may guess, though: the slot of its row as memory holds it now tells where its state lies, and
bringing that to the L2 cache changes no result, whatever the previous kernel writes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def guess_slot(slot_index):
    """A row's slot, past the L1 cache, in the program's first thread; -1 in the others. Only for `prefetch`."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        mov.b32 $0, -1;
        @first ld.relaxed.gpu.global.b32 $0, [$1];
        }""",
        "=&r,l",
        [slot_index],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def prefetch(at, slot, num_slots, slot_bytes, nbytes):
    """Ask for `nbytes` (a multiple of 16) of a guessed slot; `at` is their place in slot 0."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred owned;
        .reg .s64 from;
        setp.lt.u32 owned, $2, $3;
        cvt.s64.s32 from, $2;
        mad.lo.s64 from, from, $4, $1;
        and.b64 from, from, -16;
        @owned cp.async.bulk.prefetch.L2.global [from], $5;
        mov.b32 $0, 0;
        }""",
        "=r,l,r,r,l,r",
        [at, slot, num_slots, gl.to_tensor(slot_bytes).to(gl.int64), nbytes],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
