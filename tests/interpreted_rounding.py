"""Stochastic rounding of `triton_rounding` against `replayssm.rounding`, bit by bit; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from replayssm.ops.triton_rounding import encode_fp8_by_words, random_words, round_to
from replayssm.quant import dequantize, quantize
from replayssm.rounding import random_words as reference_words
from replayssm.rounding import round_stochastic

HEADS, V, K = 3, 8, 32
SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF)


@triton.jit
def words_kernel(words_ptr, seed, flush, stream, V: tl.constexpr, K: tl.constexpr):
    head = tl.program_id(0)
    at = head * V * K + tl.arange(0, V)[:, None] * K + tl.arange(0, K)[None, :]
    tl.store(words_ptr + at, random_words(tl.load(seed), flush, stream, head * V * K, V, K, K).to(tl.int64))


@triton.jit
def round_kernel(
    x_ptr, words_ptr, out_ptr, scales_ptr, values_ptr, V: tl.constexpr, K: tl.constexpr, FP8: tl.constexpr
):
    at = tl.arange(0, V)[:, None] * K + tl.arange(0, K)[None, :]
    x, words = tl.load(x_ptr + at), tl.load(words_ptr + at).to(tl.uint32)
    if FP8:
        codes, scales, values = encode_fp8_by_words(x, words, False)
        tl.store(out_ptr + at, codes)
        tl.store(scales_ptr + tl.arange(0, V), scales)
        tl.store(values_ptr + at, values)
    else:
        tl.store(out_ptr + at, round_to(x, words, out_ptr.dtype.element_ty))


def numbers() -> torch.Tensor:
    """Random numbers of every exponent, subnormal ones of every target, the largest, zeros, infinities and NaN."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, K, generator=generator) * torch.logspace(-44, 38, 64)[:, None]
    x[0, :8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65519.9, 448.0, 3.4e38])
    x[1] = torch.tensor([2.0**-24, 2.0**-25, 1.5 * 2.0**-24, 2.0**-126]).repeat(K // 4)
    x[2] = torch.linspace(-70000, 70000, K)
    return x


def extreme_words(shape: torch.Size) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, 2**32, shape, generator=generator)
    words[..., ::5], words[..., 1::5] = 0, 2**32 - 1
    return words


@pytest.mark.parametrize("seed", SEEDS)
def test_words(seed: int) -> None:
    for flush, stream in ((0, 0), (7, 3), (2**31 - 1, 60)):
        words = torch.full((HEADS, V, K), -1, dtype=torch.int64)
        words_kernel[(HEADS,)](words, torch.tensor([seed]), flush, stream, V, K)
        expected = reference_words(torch.tensor([seed]), torch.tensor([flush]), (HEADS, V, K), stream=stream)
        assert torch.equal(words, expected[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(dtype: torch.dtype) -> None:
    x = numbers()
    words, out = extreme_words(x.shape), torch.full_like(x, torch.nan, dtype=dtype)
    round_kernel[(1,)](x, words, out, x, x, 64, K, False)
    expected = round_stochastic(x, words, dtype)
    assert torch.equal(out.isnan(), expected.isnan()) and int(out.isnan().sum()) == 1
    assert torch.equal(out.view(torch.int16)[~out.isnan()], expected.view(torch.int16)[~out.isnan()])


def test_fp8() -> None:
    x = numbers().clamp(-1e30, 1e30)
    x[3, 5] = torch.nan
    x[:, ::7] *= torch.logspace(-12, 0, 64)[:, None]
    words = extreme_words(x.shape)
    codes, scales, values = torch.zeros(64, K, dtype=torch.uint8), torch.zeros(64), torch.zeros(64, K)
    round_kernel[(1,)](x, words, codes, scales, values, 64, K, True)
    expected = quantize(x, "fp8", words=words)
    assert torch.equal(codes, expected.codes.view(torch.uint8))
    assert torch.equal(scales.nan_to_num(7.0), expected.scales.nan_to_num(7.0))
    assert torch.equal(values.nan_to_num(7.0), dequantize(expected).nan_to_num(7.0))
