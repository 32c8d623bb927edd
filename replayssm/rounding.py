"""Stochastic rounding of fp32, reproducible from a seed.

A value between two numbers of the target becomes the upper one with the probability of its place between them, so
that the expected result is the value itself. The random words come from Philox-4x32-10 (Salmon et al. 2011), a pure
function of

    key     = (low, high) half of the slot's 64-bit seed
    counter = (element // 4, flush, stream, 0)

of whose four output words element `e` takes number `e % 4`; elements of a slot's state [heads, V, K] count in memory
order. In Triton these are `tl.philox(seed, element // 4, flush, stream, 0)`, and for stream 0
`tl.randint4x(seed, flush << 32 | element // 4)`. So a result depends on seed, flush and place alone, never on the
batch or the slot's number; the count of flushes in the cursors makes it fresh every time, in a CUDA graph too.
"""

from __future__ import annotations

import math

import torch

from replayssm.checks import check_choice, check_tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[torch.Tensor, ...]

# dtype -> (stored mantissa bits, exponent of the smallest normal number, largest code, integer type of its bits)
_TARGETS = {
    torch.bfloat16: (7, -126, 0x7F80, torch.int16),
    torch.float16: (10, -14, 0x7C00, torch.int16),
    torch.float8_e4m3fn: (3, -6, 0x7E, torch.uint8),
}


def philox_4x32(counter: Words, key: Words) -> Words:
    """Philox-4x32-10 of broadcastable int64 tensors that hold unsigned 32-bit words: four words from 4 + 2."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A product fills all 64 bits of an int64, the sign included; the mask undoes the sign of its upper half.
        product_0, product_2 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((product_2 >> 32) & _MASK) ^ c1 ^ k0, product_2 & _MASK
        c2, c3 = ((product_0 >> 32) & _MASK) ^ c3 ^ k1, product_0 & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def random_words(
    seeds: torch.Tensor, flushes: torch.Tensor, shape: tuple[int, ...], *, stream: int = 0
) -> torch.Tensor:
    """Random 32-bit words [n, *shape], in int64, for n slots with `seeds` [n] int64 at flush number `flushes` [n].

    shape: one slot's state. stream: tells apart what shares a seed (a layer's index). The next flush of a slot, another
    seed and another stream give independent words.
    """
    check_tensor("seeds", seeds, (None,), (torch.int64,), inner_contiguous=0)
    check_tensor("flushes", flushes, (len(seeds),), (torch.int32, torch.int64), seeds.device, inner_contiguous=0)
    count = math.prod(shape)
    seeds, flushes = seeds.long()[:, None], flushes.long()[:, None]
    quads = torch.arange((count + 3) // 4, device=seeds.device)[None, :]
    counter = torch.broadcast_tensors(quads, flushes & _MASK, torch.full_like(quads, stream), torch.zeros_like(quads))
    words = philox_4x32(counter, (seeds & _MASK, (seeds >> 32) & _MASK))
    return torch.stack(words, dim=-1).flatten(1)[:, :count].reshape(-1, *shape)


def round_stochastic(x: torch.Tensor, words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round fp32 `x` to `dtype` (bf16, fp16 or float8_e4m3fn) with one random word an element.

    With `shift` dropped bits of the significand (more below the smallest normal number) the result's significand is
    `(significand + (word >> (32 - shift))) >> shift`, the sign kept: away from zero with probability dropped bits /
    2^shift. Numbers of the target stay what they are. Past the largest number, bf16 and fp16 continue as if there were
    one more, which is infinity; float8_e4m3fn saturates at 448. NaN stays NaN.
    """
    check_choice("dtype", dtype, _TARGETS)
    mantissa, min_exponent, largest, bits_dtype = _TARGETS[dtype]
    x = x.float()
    bits = x.contiguous().view(torch.int32).long() & _MASK
    exponent = ((bits >> 23) & 0xFF).clamp(min=1)
    significand = (bits & 0x7FFFFF) + ((bits & 0x7F800000) != 0).long() * 0x800000
    below = (min_exponent + 127 - exponent).clamp(min=0)
    shift = 23 - mantissa + below
    # Up to shift 32 the probability is exact; beyond, the value is under 2^-8 of a step and loses what is under 2^-32.
    kept = significand >> (shift - 32).clamp(min=0, max=31)
    shift = shift.clamp(max=32)
    rounded = (kept + (words >> (32 - shift))) >> shift
    code = ((exponent - min_exponent - 127).clamp(min=0) << mantissa) + rounded
    sign = (bits >> 31) << (15 if bits_dtype is torch.int16 else 7)
    result = (code.clamp(max=largest) | sign).to(bits_dtype).view(dtype)
    return torch.where(x.isnan(), x, result.float()).to(dtype)
