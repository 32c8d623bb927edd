"""Storage formats against independent conversions: ml_dtypes code by code, and torchao."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from quant_case import spread

from replayssm.quant import dequantize, quantize
from replayssm.quant.encoders import to_e4m3
from replayssm.quant.nvfp4 import from_e2m1, to_e2m1


def sweep(values: torch.Tensor) -> torch.Tensor:
    """Values, their midpoints, both fp32 neighbours of all of these, and the negatives."""
    values = values.float().sort().values
    points = torch.cat([values, (values[1:] + values[:-1]) / 2])
    points = torch.cat([torch.nextafter(points, torch.tensor(d)) for d in (-1e9, 1e9)] + [points])
    return torch.cat([points, -points])


class TestConversions:
    def test_every_e2m1_code(self) -> None:
        codes = np.arange(16, dtype=np.uint8)
        want = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        got = from_e2m1(torch.arange(16, dtype=torch.uint8))
        assert np.array_equal(got.numpy().view(np.int32), want.view(np.int32))  # the sign of zero too

    def test_e2m1_rounds_to_nearest_even_and_saturates(self) -> None:
        x = sweep(torch.tensor([0, 2.0**-149, 2.0**-126, 0.5, 1, 1.5, 2, 3, 4, 6, 7, 8, 100, 3e38]))
        want = x.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        assert np.array_equal(to_e2m1(x).numpy(), want)
        assert to_e2m1(torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])).tolist() == [0, 2, 2, 4, 4, 6, 6]
        assert to_e2m1(torch.tensor([torch.inf, -torch.inf])).tolist() == [7, 15]

    def test_every_e4m3_value_and_tie(self) -> None:
        codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
        values = codes.view(torch.float8_e4m3fn).float()
        assert np.array_equal(
            values.numpy(), codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32), equal_nan=True
        )
        assert torch.equal(to_e4m3(values).view(torch.uint8)[values.isfinite()], codes[values.isfinite()])
        x = sweep(values[values.isfinite() & (values >= 0)])
        x = x[x.abs() <= 448]
        want = x.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        assert np.array_equal(to_e4m3(x).view(torch.uint8).numpy(), want)

    def test_e4m3_saturates_and_keeps_nan(self) -> None:
        x = torch.tensor([448.1, 464.0, 1e9, torch.inf, -500.0, torch.nan])
        got = to_e4m3(x).float()
        assert got[:5].tolist() == [448, 448, 448, 448, -448] and got[5].isnan()


# The written rules again, in numpy and with the conversions of ml_dtypes.
def _sum_of_squares(difference: np.ndarray, resolution: float) -> np.ndarray:
    return np.rint(difference * difference * np.float32(resolution)).astype(np.int64).sum(-1)


def oracle_int8(x: np.ndarray) -> dict[str, np.ndarray]:
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    exact = np.maximum(np.abs(blocks).max(-1) * np.float32(1 / 127), np.float32(2**-24))
    half = exact.astype(np.float16)
    half = np.where(half.astype(np.float32) < exact, np.nextafter(half, np.float16(np.inf)), half)
    codes = np.rint(blocks * (np.float32(1) / half.astype(np.float32))[..., None])
    return {"codes": codes.astype(np.int8).reshape(x.shape), "scales": half}


def oracle_fp8(x: np.ndarray) -> dict[str, np.ndarray]:
    e4m3, tried = ml_dtypes.float8_e4m3fn, []
    unit = None
    for target in (448, 288):
        scale = np.abs(x).max(-1) * np.float32(1 / target)
        significand, exponent = np.frexp(scale.astype(np.float64))
        scale = np.ldexp(np.floor(significand * 2**16 + 0.5), exponent - 16).astype(np.float32)
        inverse = np.float32(1) / scale
        unit = inverse if unit is None else unit
        codes = np.clip(x * inverse[..., None], -448, 448).astype(e4m3)
        error = (x - codes.astype(np.float32) * scale[..., None]) * unit[..., None]
        tried.append((codes.view(np.uint8), scale, _sum_of_squares(error, 2**12)))
    better = tried[1][2] < tried[0][2]
    return {
        "codes": np.where(better[..., None], tried[1][0], tried[0][0]),
        "scales": np.where(better, tried[1][1], tried[0][1]),
    }


def oracle_nvfp4(x: np.ndarray) -> dict[str, np.ndarray]:
    e4m3, e2m1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
    global_scale = np.exp2(np.ceil(np.log2(np.abs(x).max((-2, -1)) / 1792.0))).astype(np.float32)
    y = (x / global_scale[..., None, None]).reshape(*x.shape[:-1], -1, 16)
    tried, unit = [], None
    for factor in (np.float32(1 / 6), np.float32(1 / 4)):
        scale = np.maximum((np.abs(y).max(-1) * factor).astype(e4m3).astype(np.float32), np.float32(2**-9))
        inverse = np.float32(1) / scale
        unit = inverse if unit is None else unit
        codes = (y * inverse[..., None]).astype(e2m1)
        error = (y - codes.astype(np.float32) * scale[..., None]) * unit[..., None]
        tried.append((codes.view(np.uint8), scale, _sum_of_squares(error, 2**20)))
    better = tried[1][2] < tried[0][2]
    codes = np.where(better[..., None], tried[1][0], tried[0][0]).reshape(x.shape)
    scale = np.where(better, tried[1][1], tried[0][1]).astype(e4m3)
    return {"codes": codes[..., 0::2] + 16 * codes[..., 1::2], "scales": scale, "global_scale": global_scale}


@pytest.mark.parametrize(("format", "oracle"), [("int8", oracle_int8), ("fp8", oracle_fp8), ("nvfp4", oracle_nvfp4)])
@pytest.mark.parametrize("magnitude", [1.0, 1e-3, 3e4])
def test_bits_follow_the_written_rules(format: str, oracle: Any, magnitude: float) -> None:
    x = spread(3, 2, 40, 128, seed=1) * magnitude
    x[..., ::7, :] = x[..., ::7, :].bfloat16().float()  # ties
    want = oracle(x.numpy())
    for name, tensor in quantize(x, format).tensors().items():
        got = tensor.view(torch.uint8).numpy() if tensor.dtype == torch.float8_e4m3fn else tensor.numpy()
        assert np.array_equal(got, want[name].view(got.dtype)), name


def test_nvfp4_agrees_with_torchao() -> None:
    torchao = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = spread(64, 128, seed=2)
    q = quantize(x, "nvfp4")
    assert q.scales is not None and q.global_scale is not None
    scales, packed = torchao.nvfp4_quantize(x, per_tensor_scale=q.global_scale)
    same = (scales.view(torch.uint8).view(64, 8) == q.scales.view(torch.uint8)) & (q.scales.float() >= 2**-6)
    assert 0.3 < same.float().mean() < 0.9  # the other blocks put their maximum at 4
    mine, theirs = (codes.view(torch.uint8).view(64, 8, 8)[same] for codes in (q.codes, packed))
    assert torch.equal(mine, theirs)
    tensor = torchao.NVFP4Tensor(q.codes, q.scales, 16, torch.float32, per_tensor_scale=q.global_scale)
    assert torch.equal(tensor.dequantize(torch.float32), dequantize(q))
