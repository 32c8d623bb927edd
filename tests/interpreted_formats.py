"""The encoders and decoders of `triton_formats` against `replayssm.quant`, bit by bit; run with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from replayssm.ops.mamba2.triton_read_tiles import load_copy, write_copy
from replayssm.ops.triton_formats import encode_nvfp4_numbers, global_scale, largest_finite
from replayssm.quant import dequantize, quantize

V, K = 16, 64


@triton.jit
def encode_kernel(
    x_ptr, codes_ptr, scales_ptr, global_ptr, values_ptr, read_ptr,
    V: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Write a head in FORMAT, beside what the writer and a later reader hold."""
    at = tl.arange(0, V)[:, None] * K + tl.arange(0, K)[None, :]
    values = write_copy(tl.load(x_ptr + at), codes_ptr, scales_ptr, global_ptr, V, K, FORMAT, False)
    tl.store(values_ptr + at, values)
    tl.store(read_ptr + at, load_copy(codes_ptr, scales_ptr, global_ptr, V, K, V, K, FORMAT, False))


def cases() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(V, K, generator=generator)
    spread = plain * torch.logspace(-6, 6, V)[:, None] * torch.logspace(0, 2, K)[None, :]
    halves = torch.randint(-40, 41, (V, K), generator=generator) / 4.0
    steps = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -2.5, -5.0, -6.0, 6.0, -0.0])
    special = plain.clone()
    special[0] = 0.0
    special[1, 3], special[2, 40], special[3, 17] = float("nan"), float("inf"), -float("inf")
    special[4] *= 1e-30
    special[5, ::3] = -0.0
    special[6] *= 1e-20
    return {
        "plain": plain,
        "rows far apart": spread,
        "ties": halves,
        "every tie of E2M1": steps.repeat(V, K // 16) * torch.logspace(-20, 10, V, base=2)[:, None],
        "NaN, infinity, zeros": special,
        "one element rules the head": torch.cat([torch.full((1, K), 1e5), plain[1:] * 0.1]),
        "smallest block scales": torch.cat(
            [torch.full((1, K), 1792.0), plain[1:] * torch.logspace(-3, -0.5, V - 1)[:, None] * 0.05]
        ),
        "zeros": torch.zeros(V, K),
    }


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


@pytest.mark.parametrize("format", ["bf16", "int8", "fp8", "nvfp4"])
@pytest.mark.parametrize("case", cases())
def test_bytes_and_values(case: str, format: str) -> None:
    x = cases()[case]
    if format == "bf16":
        x = x.bfloat16().float()  # the interpreter truncates
    want = quantize(x[None], format)
    got = {
        name: torch.full_like(bits(tensor), 0x55).view(tensor.dtype).view(tensor.shape)
        for name, tensor in want.tensors().items()
    }
    codes, scales = got["codes"], got.get("scales", x)
    scale = got.get("global_scale", torch.zeros(1))
    values, read = torch.empty(V, K), torch.empty(V, K)
    as_bytes = [t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in (codes, scales)]
    encode_kernel[(1,)](x, *as_bytes, scale, values, read, V, K, format)
    for name, tensor in want.tensors().items():
        assert torch.equal(bits(got[name]), bits(tensor)), name
    exact = dequantize(want)[0]
    assert torch.equal(values.isnan(), exact.isnan())
    assert torch.equal(values.nan_to_num(), exact.nan_to_num())
    assert torch.equal(read.nan_to_num(), exact.nan_to_num())
    assert torch.equal(read.isnan(), exact.isnan())


@triton.jit
def quick_kernel(x_ptr, codes_ptr, scales_ptr, doubtful_ptr, V: tl.constexpr, K: tl.constexpr):
    """nvfp4 with errors summed in fp32, and where that may choose otherwise."""
    rows = tl.arange(0, V)[:, None]
    x = tl.load(x_ptr + rows * K + tl.arange(0, K)[None, :])
    scale, inverse = global_scale(tl.max(largest_finite(x), 0))
    codes, scales, _, _, doubtful = encode_nvfp4_numbers(x, scale, inverse, False, False)
    tl.store(codes_ptr + rows * (K // 2) + tl.arange(0, K // 2)[None, :], codes)
    blocks = rows * (K // 16) + tl.arange(0, K // 16)[None, :]
    tl.store(scales_ptr + blocks, scales)
    tl.store(doubtful_ptr + blocks, doubtful.to(tl.int32))


@pytest.mark.parametrize("kind", ["normal", "quarters", "eighths"])
def test_quick_errors_choose_alike_unless_doubtful(kind: str) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(256, 128, generator=generator) * torch.logspace(-2, 2, 256)[:, None]
    if kind == "quarters":
        x = torch.randint(-24, 25, (256, 128), generator=generator) / 4.0
    if kind == "eighths":
        x = (x * 8).round() / 8
    want = quantize(x[None], "nvfp4")
    codes, scales = torch.empty(256, 64, dtype=torch.uint8), torch.empty(256, 8, dtype=torch.uint8)
    doubtful = torch.empty(256, 8, dtype=torch.int32)
    quick_kernel[(1,)](x, codes, scales, doubtful, 256, 128)
    same = (codes.view(256, 8, 8) == want.codes[0].view(256, 8, 8)).all(-1) & (scales == bits(want.scales[0]))
    assert bool((same | (doubtful != 0)).all())
    assert doubtful.float().mean() < 0.02
