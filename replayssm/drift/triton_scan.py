"""A whole piece of a layer's text in one launch: ordinary decoding, or a checkpoint and what reads of it see."""

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.ops.triton_formats import encode_fp8, encode_int8, encode_nvfp4, global_scale, largest_finite
from replayssm.ops.triton_rounding import encode_fp8_by_words, random_words, round_to


@triton.jit
def stored(x, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """What FORMAT gives back of a head's state [V, K]."""
    if FORMAT == "nvfp4":
        scale, inverse = global_scale(tl.max(largest_finite(x), 0))
        _codes, _scales, x = encode_nvfp4(x, scale, inverse, NATIVE)
    elif FORMAT == "fp8":
        _codes, _scales, x = encode_fp8(x, NATIVE)
    elif FORMAT == "int8":
        _codes, _scales, x = encode_int8(x, NATIVE)
    elif FORMAT == "bf16":
        x = x.to(tl.bfloat16).to(tl.float32)
    elif FORMAT == "fp16":
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def stored_at_random(x, seed, flush, first, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """The same with stochastic rounding; first: the number of the head's first element in the slot."""
    words = random_words(seed, flush, 0, first, x.shape[0], x.shape[1], x.shape[1])
    if FORMAT == "fp8":
        _codes, _scales, x = encode_fp8_by_words(x, words, NATIVE)
    elif FORMAT == "bf16":
        x = round_to(x, words, tl.bfloat16).to(tl.float32)
    else:
        x = round_to(x, words, tl.float16).to(tl.float32)
    return x


@triton.jit
def updated(state, value, read, keep, outgoing, DELTA: tl.constexpr):
    """(u, the state after a token) of a state before it."""
    u = value
    if DELTA:
        u -= tl.sum(state * read[None, :], 1)
    return u, state * keep + u[:, None] * outgoing[None, :]


@triton.jit
def scan_kernel(
    values_ptr, reads_ptr, queries_ptr, attention_ptr, keep_ptr, outgoing_ptr, state_ptr, out_ptr,
    seeds_ptr, flushes_ptr, tokens, heads, buffer_len,
    V: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, PER_CHANNEL: tl.constexpr, DELTA: tl.constexpr,
    READ: tl.constexpr, CHECKPOINT: tl.constexpr, STOCHASTIC: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The recurrence of `windows.Windows` of one token; a program is a head, ROWS >= V a power of two.

    Every buffer_len tokens, tokens being divisible by it, the state is rounded to CHECKPOINT and what reads see of it
    is renewed. In between both go on token by token: that is what a read of the old copy and the ring amounts to.
    """
    head = tl.program_id(0).to(tl.int64)
    v, k = tl.arange(0, ROWS), tl.arange(0, K)
    at = head * V * K + v[:, None] * K + k[None, :]
    inside = (v < V)[:, None]
    state = tl.load(state_ptr + at, mask=inside, other=0.0)
    seen = stored(state, READ, NATIVE)
    seed, flush = tl.load(seeds_ptr), tl.load(flushes_ptr).to(tl.int32)
    for t in range(tokens):
        row = t * heads + head
        value = tl.load(values_ptr + row * V + v, mask=v < V, other=0.0)
        q, outgoing = tl.load(queries_ptr + row * K + k), tl.load(outgoing_ptr + row * K + k)
        read = q
        if DELTA:
            read = tl.load(reads_ptr + row * K + k)
        keep = tl.load(keep_ptr + row * K + k)[None, :] if PER_CHANNEL else tl.load(keep_ptr + row)
        before = state if READ == "none" else seen
        u, after = updated(before, value, read, keep, outgoing, DELTA)
        out = tl.sum(before * q[None, :], 1) + tl.load(attention_ptr + row) * u
        tl.store(out_ptr + row * V + v, out, mask=v < V)
        if READ == "none":
            state = after
        else:
            seen = after
            _u, state = updated(state, value, read, keep, outgoing, DELTA)
        if (t + 1) % buffer_len == 0:
            if STOCHASTIC:
                state = stored_at_random(state, seed, flush, (head * V * K).to(tl.int32), CHECKPOINT, NATIVE)
                flush += 1
            else:
                state = stored(state, CHECKPOINT, NATIVE)
            if READ != "none":
                seen = stored(state, READ, NATIVE)
    tl.store(state_ptr + at, state, mask=inside)
