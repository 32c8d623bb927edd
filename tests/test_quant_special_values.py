"""Storage formats: zeros, NaN and infinity, and the ends of their ranges."""

from __future__ import annotations

import pytest
import torch
from quant_case import BLOCK, BLOCKED, FORMATS, blocks_of, raw, spread

from replayssm.quant import dequantize, empty, quantize


@pytest.mark.parametrize("format", FORMATS)
def test_zero_state_and_zero_memory(format: str) -> None:
    q = quantize(torch.zeros(2, 8, 64), format)
    assert all(bool((t.float() > 0).all()) for name, t in q.tensors().items() if name != "codes")
    assert bool((dequantize(q) == 0).all())
    memory = empty(format, (2, 8, 64))
    for tensor in memory.tensors().values():
        tensor.view(torch.uint8).zero_()
    assert bool((dequantize(memory) == 0).all())


@pytest.mark.parametrize("format", BLOCKED)
def test_zero_blocks_beside_others(format: str) -> None:
    x = spread(2, 8, 128)
    x[:, ::2] = 0
    blocks_of(x, format)[:, 1, 0] = 0
    value = dequantize(quantize(x, format))
    assert bool((value[x == 0] == 0).all()) and bool(value.isfinite().all())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("format", BLOCKED)
def test_a_block_with_nan_or_infinity_reads_as_nan_and_no_other_does(format: str, bad: float) -> None:
    x = spread(2, 8, 128) * 2**-12
    clean = quantize(x, format)
    x[1, 3, 70] = bad
    hit = torch.zeros_like(x, dtype=torch.bool)
    blocks_of(hit, format)[1, 3, 70 // BLOCK.get(format, 128)] = True
    q = quantize(x, format)
    value = dequantize(q)
    assert torch.equal(value.isnan(), hit)
    assert torch.equal(value[~hit], dequantize(clean)[~hit])
    if q.global_scale is not None:
        assert clean.global_scale is not None and torch.equal(q.global_scale, clean.global_scale)
    codes = raw(q)["codes"]
    assert bool((codes[hit[..., :: 128 // codes.shape[-1]]] == 0).all())


@pytest.mark.parametrize("format", ["fp32", "fp16", "bf16"])
def test_dtypes_keep_nan_and_infinity_and_overflow_to_infinity(format: str) -> None:
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 3.4e38, -3.4e38, 65504.0, 65519.0, 65520.0]])
    dtype = FORMATS[format].dtype
    assert dtype is not None
    assert torch.equal(dequantize(quantize(x, format)).nan_to_num(7.0), x.to(dtype).float().nan_to_num(7.0))


@pytest.mark.parametrize("magnitude", [1e-4, 3e-6, 1e-7, 1e-9])
def test_int8_with_subnormal_scales_saturates_nowhere(magnitude: float) -> None:
    x = spread(1, 32, 64, seed=7) * magnitude
    q = quantize(x, "int8")
    assert q.scales is not None and float(q.scales.float().min()) >= 2.0**-24
    step = blocks_of(torch.empty_like(x), "int8") * 0 + q.scales.float()[..., None]
    assert bool((blocks_of(dequantize(q) - x, "int8").abs() <= step * (0.5 + 2**-15)).all())


def test_int8_and_given_global_scale_saturate() -> None:
    x = torch.zeros(1, 1, 32)
    x[..., 0], x[..., 1] = 1e8, -1e3
    assert dequantize(quantize(x, "int8"))[0, 0, :2].tolist() == [127 * 65504.0, 0.0]
    q = quantize(x, "nvfp4", global_scale=torch.tensor([2.0**-4]))
    assert dequantize(q)[0, 0, :2].tolist() == [6 * 448 / 16, -6 * 448 / 16]


@pytest.mark.parametrize("exponent", [-140, -120, -100, -60, 0, 60, 120])
@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_wide_scales_reach_from_2_to_the_minus_100_to_2_to_the_120(format: str, exponent: int) -> None:
    x = torch.randn(2, 4, 64)
    x = x / x.abs().amax((1, 2), keepdim=True)
    scaled = (x.double() * 2.0**exponent).float()
    value = dequantize(quantize(scaled, format))
    assert bool(value.isfinite().all())
    if exponent > -90:
        assert torch.equal(value.double() * 2.0**-exponent, dequantize(quantize(x, format)).double())
    else:  # what is below the smallest scale is rounded to multiples of it
        assert float((value.double() - scaled.double()).abs().max()) <= 2.0**-100


def test_small_blocks_of_nvfp4_beside_a_large_one() -> None:
    x = torch.randn(1, 16, 64)
    x[0, 0, 0], x[0, 1:] = 1000.0, x[0, 1:] * 1e-4
    q = quantize(x, "nvfp4")
    assert q.scales is not None and q.global_scale is not None
    assert float(q.scales[:, 1:].float().max()) < 2.0**-6  # subnormal scales
    error = blocks_of((dequantize(q) - x).abs(), "nvfp4")[0, 1:]
    step = q.scales.float()[0, 1:, :, None] * q.global_scale
    assert bool((error <= step * 3).all())  # the scale may be rounded down by a third; 9 units at most, read as 6
