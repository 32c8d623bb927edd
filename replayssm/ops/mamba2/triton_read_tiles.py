"""A head's state in memory, in any storage format, as a tile [BV, BK] in registers: zeros past V-row P and column N."""

from __future__ import annotations

import triton
import triton.language as tl

from replayssm.ops.triton_formats import (
    decode_blocks,
    decode_nvfp4,
    encode_fp8,
    encode_int8,
    encode_nvfp4,
    from_e4m3,
    global_scale,
    largest_finite,
)


@triton.jit
def places(P: tl.constexpr, N: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr):
    """Offsets of a [P, N] array as a tile [BV, BK], and which of them exist."""
    v = tl.arange(0, BV)[:, None]
    k = tl.arange(0, BK)[None, :]
    return v * N + k, (v < P) & (k < N)


@triton.jit
def load_state(
    state_ptr, scales_ptr, P: tl.constexpr, N: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """The checkpoint in fp32."""
    at, ok = places(P, N, BV, BK)
    if FORMAT == "fp8":
        v = tl.arange(0, BV)
        scales = tl.load(scales_ptr + v, mask=v < P, other=0.0)
        return from_e4m3(tl.load(state_ptr + at, mask=ok, other=0), NATIVE) * scales[:, None]
    return tl.load(state_ptr + at, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def write_state(S, state_ptr, scales_ptr, P: tl.constexpr, N: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Round to the checkpoint's format and write; returns what the memory now holds."""
    if FORMAT == "fp8":
        return write_fp8(S, state_ptr, scales_ptr, P, N, NATIVE)
    at, ok = places(P, N, S.shape[0], S.shape[1])
    stored = S.to(state_ptr.dtype.element_ty)
    tl.store(state_ptr + at, stored, mask=ok)
    return stored.to(tl.float32)


@triton.jit
def write_fp8(S, codes_ptr, scales_ptr, P: tl.constexpr, N: tl.constexpr, NATIVE: tl.constexpr):
    at, ok = places(P, N, S.shape[0], S.shape[1])
    codes, scales, values = encode_fp8(S, NATIVE)
    v = tl.arange(0, S.shape[0])
    tl.store(codes_ptr + at, codes, mask=ok)
    tl.store(scales_ptr + v, scales, mask=v < P)
    return values


@triton.jit
def write_copy(
    S, codes_ptr, scales_ptr, global_ptr, P: tl.constexpr, N: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr
):
    """Round to the read copy's format and write; returns what a read of it gives."""
    BV: tl.constexpr = S.shape[0]
    BK: tl.constexpr = S.shape[1]
    if FORMAT == "none":
        return S
    elif FORMAT == "fp8":
        return write_fp8(S, codes_ptr, scales_ptr, P, N, NATIVE)
    elif FORMAT == "int8":
        at, ok = places(P, N, BV, BK)
        block_at, block_ok = places(P, N // 32, BV, BK // 32)
        codes, scales, values = encode_int8(S, NATIVE)
        tl.store(codes_ptr + at, codes, mask=ok)
        tl.store(scales_ptr + block_at, scales, mask=block_ok)
        return values
    elif FORMAT == "nvfp4":
        at, ok = places(P, N // 2, BV, BK // 2)
        block_at, block_ok = places(P, N // 16, BV, BK // 16)
        scale, inverse = global_scale(tl.max(largest_finite(S), 0))
        codes, scales, values = encode_nvfp4(S, scale, inverse, NATIVE)
        tl.store(codes_ptr + at, codes, mask=ok)
        tl.store(scales_ptr + block_at, scales, mask=block_ok)
        tl.store(global_ptr, scale)
        return values
    else:
        at, ok = places(P, N, BV, BK)
        copy = S.to(codes_ptr.dtype.element_ty)
        tl.store(codes_ptr + at, copy, mask=ok)
        return copy.to(tl.float32)


@triton.jit
def load_copy(
    codes_ptr, scales_ptr, global_ptr, P: tl.constexpr, N: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """What the read copy stands for, in fp32."""
    if FORMAT == "nvfp4":
        at, ok = places(P, N // 2, BV, BK // 2)
        block_at, block_ok = places(P, N // 16, BV, BK // 16)
        scales = tl.load(scales_ptr + block_at, mask=block_ok, other=0)
        return decode_nvfp4(tl.load(codes_ptr + at, mask=ok, other=0), scales, tl.load(global_ptr), NATIVE)
    elif FORMAT == "int8":
        at, ok = places(P, N, BV, BK)
        block_at, block_ok = places(P, N // 32, BV, BK // 32)
        scales = tl.load(scales_ptr + block_at, mask=block_ok, other=0.0).to(tl.float32)
        return decode_blocks(tl.load(codes_ptr + at, mask=ok, other=0).to(tl.float32), scales, 32)
    else:
        return load_state(codes_ptr, scales_ptr, P, N, BV, BK, FORMAT, NATIVE)
