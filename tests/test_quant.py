"""Storage formats: values and their errors; bad input; the same bits on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quant_case import BLOCKED, FORMATS, assert_same_bits, blocks_of, spread

from replayssm.checks import ReplayError
from replayssm.quant import QuantizedState, dequantize, empty, quantize, quantize_into
from replayssm.quant.encoders import to_e4m3
from replayssm.quant.nvfp4 import from_e2m1, to_e2m1


@pytest.mark.parametrize("format", BLOCKED)
def test_products_are_exact_in_any_order(format: str) -> None:
    q = quantize(spread(2, 64, 128) * 0.37, format)
    assert q.scales is not None
    scales = q.scales.double().unsqueeze(-1) if format == "fp8" else q.scales.double()
    scales = scales.repeat_interleave(128 // scales.shape[-1], dim=-1)
    codes = q.codes.float()
    if format == "nvfp4":
        codes = from_e2m1(torch.stack((q.codes & 15, q.codes >> 4), dim=-1).flatten(-2))
    if q.global_scale is not None:
        scales = scales * q.global_scale[:, None, None]
    assert torch.equal(dequantize(q).double(), codes.double() * scales)
    assert torch.equal(dequantize(q), codes * scales.float())


@pytest.mark.parametrize("format", BLOCKED)
def test_error_is_within_half_a_step_between_neighbours_100_times_apart(format: str) -> None:
    x = spread(2, 40, 256, seed=3)
    x[:, ::2] *= 100
    blocks_of(x, format)[..., ::2, :] *= 100
    error = blocks_of((dequantize(quantize(x, format)) - x).abs(), format)
    blocks = blocks_of(x, format).abs()
    largest = blocks.amax(-1, keepdim=True)
    if format == "int8":  # half a step; the scale is up to 2^-10 too large
        bound = largest / 254 * (1 + 2**-9)
    elif format == "fp8":  # half of 2^-3 relative, or half a subnormal step
        bound = torch.maximum(blocks * 2**-4, largest / 288 * 2**-10) * (1 + 2**-14)
    else:  # half a step is the scale at most: within 2^-4 of max / 6, or within half of 2^-9 where it is subnormal
        coarsest = x.abs().amax((1, 2)) / 896 * 6 * 2**-10
        bound = (largest / 6 * (1 + 2**-4) + coarsest[:, None, None, None]).expand_as(error)
    assert bool((error <= bound).all())


@pytest.mark.parametrize(
    ("format", "percent"),
    [("fp16", 0.0208), ("bf16", 0.167), ("int8", 0.701), ("fp8", 2.304), ("nvfp4", 8.68)],
)
def test_measured_error(format: str, percent: float) -> None:
    x = spread(16, 128, 128, seed=4)
    error = (dequantize(quantize(x, format)) - x).square().sum((1, 2)) / x.square().sum((1, 2))
    assert 100 * error.sqrt().mean().item() == pytest.approx(percent, rel=0.03)


@pytest.mark.parametrize(("format", "target"), [("fp8", 448), ("nvfp4", 6)])
def test_the_better_scale_is_taken(format: str, target: int) -> None:
    x = spread(2, 64, 128, seed=5)
    q = quantize(x, format)
    largest = blocks_of(x, format).abs().amax(-1, keepdim=True)
    if format == "fp8":
        plain = to_e4m3(blocks_of(x, format) / largest * 448).float() / 448 * largest
    else:
        assert q.global_scale is not None
        scale = to_e4m3(largest / 6 / q.global_scale[:, None, None, None]).float() * q.global_scale[:, None, None, None]
        plain = from_e2m1(to_e2m1(blocks_of(x, format) / scale)) * scale
    chosen = (blocks_of(dequantize(q) - x, format)).square().sum(-1)
    first = (plain - blocks_of(x, format)).square().sum(-1)
    assert bool((chosen <= first * (1 + 1e-3)).all())
    assert 0.2 < (chosen < first * 0.999).float().mean() < 0.8


def test_on_a_tie_the_first_scale_is_taken() -> None:
    x = torch.zeros(1, 64)
    x[0, 5] = 3.0
    assert int(quantize(x, "nvfp4").codes[0, 2]) == 0x70
    assert int(quantize(x, "fp8").codes.view(torch.uint8)[0, 5]) == 0x7E


def test_global_scale_is_the_smallest_power_of_two_with_room() -> None:
    largest = torch.tensor([1792, 1792.001, 1793, 1920, 2047, 896, 897, 1, 1.75, 1.8, 2.0**-95, 2.0**-80, 0])
    x = torch.zeros(len(largest), 2, 16)
    x[:, 1, 3] = -largest
    want = [1, 2, 2, 2, 2, 0.5, 1, 2.0**-10, 2.0**-10, 2.0**-9, 2.0**-100, 2.0**-90, 2.0**-100]
    got = quantize(x, "nvfp4").global_scale
    assert got is not None and got.tolist() == want


@pytest.mark.parametrize("format", FORMATS)
def test_quantizing_again_changes_nothing(format: str) -> None:
    first = dequantize(quantize(spread(4, 80, 128, seed=6), format))
    assert torch.equal(dequantize(quantize(first, format)), first)


def test_every_fp16_scale_comes_back() -> None:
    scales = torch.arange(1, 0x7C00).to(torch.int16).view(torch.float16)
    x = torch.zeros(1, len(scales), 32)
    x[0, :, 9] = 127 * scales.float()
    got = quantize(x, "int8").scales
    assert got is not None and torch.equal(got[0, :, 0], scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("format", FORMATS)
def test_other_inputs_count_as_fp32(format: str, dtype: torch.dtype) -> None:
    x = spread(2, 16, 64).to(dtype)
    assert_same_bits(quantize(x, format), quantize(x.float(), format))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: quantize(torch.zeros(2, 4, 64), "int4"), ["format", "int4", "nvfp4"]),
        (lambda: quantize(torch.zeros(2, 4, 64), "none"), ["format", "none", "int8"]),
        (lambda: quantize(torch.zeros(2, 4, 48), "int8"), ["int8", "K = 48", "divisible by 32"]),
        (lambda: empty("nvfp4", (4, 40)), ["nvfp4", "K = 40", "divisible by 16"]),
        (lambda: empty("fp8", (64,)), ["shape", "(64,)", "V and K"]),
        (lambda: quantize(torch.zeros(4, 64).int(), "int8"), ["state.dtype", "int32", "float"]),
        (lambda: quantize(torch.zeros(4, 64), "int8", words=torch.zeros(4, 64).long()), ["words", "int8", "fp16"]),
        (lambda: quantize(torch.zeros(4, 64), "fp8", words=torch.zeros(4, 32).long()), ["words", "[4, 32]", "[4, 64]"]),
        (lambda: quantize(torch.zeros(4, 64), "fp8", global_scale=torch.ones(())), ["global_scale", "fp8", "nvfp4"]),
        (lambda: quantize(torch.zeros(2, 4, 64), "nvfp4", global_scale=torch.ones(3)), ["global_scale", "[3]", "[2]"]),
    ],
)
def test_bad_input(call: Any, words: list[str]) -> None:
    with pytest.raises(ReplayError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_quantize_into_checks_before_it_writes() -> None:
    q = quantize(torch.ones(4, 2, 8, 64), "int8")
    with pytest.raises(ReplayError, match=r"\[2, 2, 8, 32\].*\[2, 2, 8, 64\]"):
        quantize_into(torch.zeros(2, 2, 8, 32), q, torch.tensor([0, 1]))
    assert_same_bits(q, quantize(torch.ones(4, 2, 8, 64), "int8"))


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_cuda_makes_the_same_bits_inside_a_graph(format: str) -> None:
    x, slots = spread(4, 2, 80, 128, seed=11), torch.tensor([3, 0, 5, 1])
    x[0, 0, 0, 0], x[1, 1] = torch.nan, 0.0
    q = empty(format, (6, 2, 80, 128), "cuda")
    state, index = torch.zeros_like(x, device="cuda"), slots.cuda()
    quantize_into(state, q, index)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantize_into(state, q, index)
        value = dequantize(q)
    state.copy_(x)
    graph.replay()
    want = quantize(x, format)
    assert_same_bits(QuantizedState(format, **{n: t.cpu() for n, t in q.gather(index).tensors().items()}), want)
    assert torch.equal(value[index].cpu().nan_to_num(7.0), dequantize(want).nan_to_num(7.0))
