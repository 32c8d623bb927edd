"""Stochastic rounding: the generator, its addressing, and every property of the rounded values."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from replayssm.checks import ReplayError
from replayssm.quant import dequantize, quantize
from replayssm.rounding import philox_4x32, random_words, round_stochastic

DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn]
LARGEST = {torch.bfloat16: 0x7F7F, torch.float16: 0x7BFF, torch.float8_e4m3fn: 0x7E}

# Random123's known answers for philox4x32 with ten rounds: counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every finite number of `dtype` from zero up, in fp32."""
    integers = torch.uint8 if dtype == torch.float8_e4m3fn else torch.int16
    return torch.arange(LARGEST[dtype] + 1).to(integers).view(dtype).float()


def words(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 2**32, x.shape, generator=torch.Generator().manual_seed(seed))


def spread_of_mean(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, n: int) -> torch.Tensor:
    """Five sigma for the mean of n roundings of x to low or high, plus Bernstein's term for rare outcomes."""
    p = (x - low) / (high - low)
    return (high - low) * (5 * (p * (1 - p) / n).sqrt() + 25 / 6 / n)


class TestGenerator:
    @pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
    def test_known_answers(self, counter: str, key: str, output: str) -> None:
        c, k, want = ([int(word, 16) for word in text.split()] for text in (counter, key, output))
        got = philox_4x32(tuple(map(torch.tensor, c)), tuple(map(torch.tensor, k)))
        assert [int(word) for word in got] == want

    def test_addressing(self) -> None:
        seeds, flushes = torch.tensor([0x0123456789ABCDEF, -1]), torch.tensor([3, 70000], dtype=torch.int32)
        got = random_words(seeds, flushes, (2, 3, 5), stream=9)
        assert got.shape == (2, 2, 3, 5)
        for row, (seed, flush) in enumerate(zip(seeds.tolist(), flushes.tolist(), strict=True)):
            key = torch.tensor(seed & 0xFFFFFFFF), torch.tensor((seed >> 32) & 0xFFFFFFFF)
            for element, word in enumerate(got[row].flatten().tolist()):
                counter = tuple(torch.tensor(c) for c in (element // 4, flush, 9, 0))
                assert word == int(philox_4x32(counter, key)[element % 4])

    def test_bad_input(self) -> None:
        with pytest.raises(ReplayError, match=r"flushes\.shape is \[3\].*\[2\]"):
            random_words(torch.zeros(2).long(), torch.zeros(3).long(), (4,))
        with pytest.raises(ReplayError, match=r"seeds\.dtype is torch\.float32.*int64"):
            random_words(torch.zeros(2), torch.zeros(2).long(), (4,))

    def test_a_slot_does_not_see_the_batch(self) -> None:
        seeds, flushes = torch.arange(100, 108), torch.arange(8) * 5
        whole = random_words(seeds, flushes, (2, 4, 16))
        order = torch.tensor([5, 0, 7])
        assert torch.equal(random_words(seeds[order], flushes[order], (2, 4, 16)), whole[order])

    def test_seed_flush_and_stream_each_make_other_words(self) -> None:
        base = {"seeds": torch.tensor([1]), "flushes": torch.tensor([1]), "stream": 1}
        first = random_words(**base, shape=(1, 8, 16))
        for change in ({"seeds": torch.tensor([1 + 2**32])}, {"flushes": torch.tensor([2])}, {"stream": 2}):
            assert float((random_words(**{**base, **change}, shape=(1, 8, 16)) == first).float().mean()) < 0.02

    def test_bits_are_fair_and_independent(self) -> None:
        got = random_words(torch.arange(4), torch.arange(4), (4, 64, 64)).flatten()
        bits = ((got[:, None] >> torch.arange(32)) & 1).double()
        limit = 5 * 0.5 / math.sqrt(len(got))
        assert float((bits.mean(0) - 0.5).abs().max()) < limit
        for lag in (1, 2, 3, 4, 64):  # both of two fair bits are set with probability 1/4
            both = (bits[lag:] * bits[:-lag]).mean(0)
            assert float((both - 0.25).abs().max()) < 5 * math.sqrt(3 / 16 / (len(got) - lag))

    def test_triton_makes_the_same_words(self, tmp_path: Path) -> None:
        pytest.importorskip("triton")
        script = tmp_path / "words.py"
        script.write_text(TRITON_SCRIPT)
        env = {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


TRITON_SCRIPT = """
import torch, triton, triton.language as tl
from replayssm.rounding import random_words

@triton.jit
def kernel(out, seed, flush, stream, OFFSET: tl.constexpr, N: tl.constexpr):
    quad = tl.arange(0, N)
    if OFFSET:
        a, b, c, d = tl.randint4x(seed, (flush.to(tl.int64) << 32) | quad.to(tl.int64))
    else:
        zero = quad * 0
        a, b, c, d = tl.philox(seed, quad, zero + flush, zero + stream, zero)
    tl.store(out + quad * 4 + 0, a.to(tl.int32, bitcast=True))
    tl.store(out + quad * 4 + 1, b.to(tl.int32, bitcast=True))
    tl.store(out + quad * 4 + 2, c.to(tl.int32, bitcast=True))
    tl.store(out + quad * 4 + 3, d.to(tl.int32, bitcast=True))

for seed in (0, 1, 0x0123456789ABCDEF, -2):
    for flush in (0, 1, 70000):
        for stream, offset in ((0, True), (0, False), (5, False)):
            out = torch.zeros(64, dtype=torch.int32)
            kernel[(1,)](out, seed, flush, stream, OFFSET=offset, N=16)
            want = random_words(torch.tensor([seed]), torch.tensor([flush]), (64,), stream=stream)[0]
            assert torch.equal(out.long() & 0xFFFFFFFF, want), (seed, flush, stream, offset)
"""


@pytest.mark.parametrize("dtype", DTYPES)
class TestRounding:
    def test_numbers_stay(self, dtype: torch.dtype) -> None:
        x = numbers(dtype)
        x = torch.cat([x, -x])
        for word in (0, 1, 2**31, 2**32 - 1):
            got = round_stochastic(x, torch.full(x.shape, word), dtype)
            assert torch.equal(got.float().view(torch.int32), x.view(torch.int32))

    def test_every_gap_rounds_to_its_ends_with_the_right_word(self, dtype: torch.dtype) -> None:
        """A quarter of the way up, the words of the upper quarter round up, in every gap, subnormal ones too."""
        low, high = numbers(dtype)[:-1].double(), numbers(dtype)[1:].double()
        x = low + (high - low) * 0.25
        keep = x.float().double() == x  # bf16's smallest gaps are fp32's too
        x, low, high = x[keep].float(), low[keep], high[keep]
        assert len(x) > 0.9 * LARGEST[dtype]
        for sign in (1, -1):
            for word, up in ((0, False), (2**31, False), (3 * 2**30 - 1, False), (3 * 2**30, True), (2**32 - 1, True)):
                got = round_stochastic(sign * x, torch.full(x.shape, word), dtype)
                assert torch.equal(got.double(), sign * (high if up else low)), (word, sign)

    def test_neighbours_only(self, dtype: torch.dtype) -> None:
        g = torch.Generator().manual_seed(1)
        x = torch.randn(20000, generator=g) * torch.exp(4 * torch.randn(20000, generator=g))
        x = x.clamp(-400, 400)
        got, table = round_stochastic(x, words(x), dtype).float(), numbers(dtype)
        below = table[torch.searchsorted(table, x.abs(), right=True) - 1]
        above = table[torch.searchsorted(table, x.abs())]
        assert bool(((got.abs() == below) | (got.abs() == above)).all())
        assert bool((got.signbit() == x.signbit()).all())

    @pytest.mark.parametrize("value", [1.0 + 2**-9 + 2**-14, -3.3, 0.01, 2**-9 * 1.3, 447.0, 1e-5, -3e-7])
    def test_unbiased(self, dtype: torch.dtype, value: float) -> None:
        """The mean of n results is within `spread_of_mean` of the value."""
        n = 40000
        x = torch.full((n,), value)
        noise = random_words(torch.tensor([5]), torch.tensor([0]), (n,))[0]
        got = round_stochastic(x, noise, dtype).double()
        table, exact = numbers(dtype).double(), x[:1].abs().double()
        at = torch.searchsorted(table, exact, right=True)
        bound = spread_of_mean(exact, table[at - 1], table[at], n)
        assert abs(float(got.mean()) - float(x[0])) <= float(bound)

    def test_unbiased_over_many_flushes(self, dtype: torch.dtype) -> None:
        """Each flush rounds anew: over 400 flushes every element's mean closes in on the element."""
        x = torch.randn(64, generator=torch.Generator().manual_seed(2))
        flushes = torch.arange(400)
        noise = random_words(torch.full((400,), 77), flushes, (64,))
        got = round_stochastic(x.expand(400, 64), noise, dtype).double()
        table = numbers(dtype)
        gap = table[torch.searchsorted(table, x.abs())] - table[torch.searchsorted(table, x.abs()) - 1]
        assert bool(((got.mean(0) - x).abs() <= 5 * 0.5 * gap / math.sqrt(400)).all())

    def test_tiny_values_round_to_zero_or_the_smallest_number(self, dtype: torch.dtype) -> None:
        smallest = float(numbers(dtype)[1])
        x = torch.tensor([2.0**-149, -(2.0**-149), 2.0**-126, smallest / 2**20])
        x = x[x.abs() < smallest]
        for word in (0, 2**31):
            got = round_stochastic(x, torch.full(x.shape, word), dtype).float()
            assert bool((got == 0).all()) and torch.equal(got.signbit(), x.signbit())
        if smallest / 2**20 >= 2.0**-149:
            top = torch.tensor([2**32 - 2**12, 2**32 - 2**12 - 1])  # one word in 2^20 rounds up
            got = round_stochastic(torch.full((2,), smallest / 2**20), top, dtype).float()
            assert got.tolist() == [smallest, 0.0]

    def test_nan_infinity_and_overflow(self, dtype: torch.dtype) -> None:
        largest = float(numbers(dtype)[-1])
        x = torch.tensor([torch.nan, torch.inf, -torch.inf])
        got = round_stochastic(x, words(x), dtype).float()
        infinity = 448.0 if dtype == torch.float8_e4m3fn else torch.inf
        assert got[0].isnan() and got[1:].tolist() == [infinity, -infinity]
        beyond = torch.tensor({torch.bfloat16: 3.4e38, torch.float16: 65520.0, torch.float8_e4m3fn: 1e9}[dtype])
        for word, limit in ((0, largest), (2**32 - 1, largest if dtype == torch.float8_e4m3fn else torch.inf)):
            for sign in (1, -1):
                assert float(round_stochastic(sign * beyond, torch.tensor(word), dtype)) == sign * limit

    def test_any_strides(self, dtype: torch.dtype) -> None:
        x = torch.randn(8, 6).t()
        noise = words(x)
        assert torch.equal(
            round_stochastic(x, noise, dtype).float(), round_stochastic(x.contiguous(), noise, dtype).float()
        )


class TestCheckpoints:
    @pytest.mark.parametrize("format", ["fp16", "bf16", "fp8"])
    def test_stochastic_states_are_unbiased(self, format: str) -> None:
        """The mean of 400 roundings of a state, at the scales that its nearest rounding has, closes in on the state."""
        n, x = 400, torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(3))
        noise = random_words(torch.full((n,), 5), torch.arange(n), (8, 64))
        q = quantize(x.expand(n, 8, 64), format, words=noise)
        table = numbers(q.codes.dtype).double()
        step = torch.ones(1, 8, 1) if q.scales is None else q.scales[:1, :, None]
        scaled = (x.double() / step.double()).abs().clamp(max=float(table[-1]))
        at = torch.searchsorted(table, scaled, right=True).clamp(max=len(table) - 1)
        bound = spread_of_mean(scaled, table[at - 1], table[at], n) * step
        error = (dequantize(q).double().mean(0) - x).abs()
        assert bool((error <= bound + x.abs() * 2**-16).all())  # scales have 16 bits: a maximum may be clipped to 448
        assert float(error.max()) > 0

    def test_scales_do_not_depend_on_the_words(self) -> None:
        x = torch.randn(2, 8, 64)
        plain, q = quantize(x, "fp8"), quantize(x, "fp8", words=words(x))
        assert plain.scales is not None and q.scales is not None and torch.equal(plain.scales, q.scales)
        codes = [t.codes.view(torch.uint8).int() for t in (plain, q)]
        assert int((codes[0] - codes[1]).abs().max()) == 1

    def test_bad_dtype(self) -> None:
        with pytest.raises(ReplayError, match=r"dtype is torch\.float32.*bfloat16"):
            round_stochastic(torch.zeros(1), torch.zeros(1).long(), torch.float32)


@pytest.mark.gpu
def test_cuda_makes_the_same_bits() -> None:
    x = torch.randn(3, 2, 8, 16) * torch.exp(4 * torch.randn(3, 2, 8, 16))
    seeds, flushes = torch.tensor([1, -5, 2**40]), torch.tensor([0, 3, 9], dtype=torch.int32)
    noise = random_words(seeds, flushes, (2, 8, 16), stream=4)
    on_gpu = random_words(seeds.cuda(), flushes.cuda(), (2, 8, 16), stream=4)
    assert torch.equal(on_gpu.cpu(), noise)
    for dtype in DTYPES:
        got = round_stochastic(x.cuda(), on_gpu, dtype).float().cpu()
        assert torch.equal(got.nan_to_num(7.0), round_stochastic(x, noise, dtype).float().nan_to_num(7.0))
