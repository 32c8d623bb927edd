"""Storage formats: values and their errors, special values, layouts and bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from replayssm.checks import ReplayError
from replayssm.formats import CHECKPOINT_FORMATS, READ_FORMATS
from replayssm.quant import QuantizedState, dequantize, empty, layout, quantize, quantize_into
from replayssm.quant.encoders import to_e4m3
from replayssm.quant.nvfp4 import from_e2m1, to_e2m1

FORMATS = {**CHECKPOINT_FORMATS, **READ_FORMATS}
FORMATS.pop("none")
BLOCKED = ("int8", "fp8", "nvfp4")
BLOCK = {"int8": 32, "nvfp4": 16}


def spread(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random states whose rows spread by e and columns by its root."""
    g = torch.Generator().manual_seed(seed)
    *outer, V, K = shape
    rows, columns = torch.randn(*outer, V, 1, generator=g), torch.randn(*outer, 1, K, generator=g)
    return torch.randn(*shape, generator=g) * torch.exp(rows) * torch.exp(0.5 * columns)


def raw(q: QuantizedState) -> dict[str, torch.Tensor]:
    """The tensors as integers of their size: equal only if every bit is, save that any NaN equals any other.

    A cast gives the NaN that its device likes: to fp16 0x7E00 on a CPU, 0x7FFF on NVIDIA's GPUs.
    """
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    bits = {name: t.view(integers[t.element_size()]) for name, t in q.tensors().items()}
    return {name: torch.where(q.tensors()[name].float().isnan(), -1, b.int()) for name, b in bits.items()}


def assert_same_bits(a: QuantizedState, b: QuantizedState) -> None:
    assert a.format == b.format and a.tensors().keys() == b.tensors().keys()
    for name, t in raw(a).items():
        assert torch.equal(t, raw(b)[name]), name


def blocks_of(x: torch.Tensor, format: str) -> torch.Tensor:
    """[..., blocks, elements that share a scale]."""
    return x.unflatten(-1, (-1, BLOCK.get(format, x.shape[-1])))


class TestValues:
    @pytest.mark.parametrize("format", BLOCKED)
    def test_products_are_exact_in_any_order(self, format: str) -> None:
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
    def test_error_is_within_half_a_step_between_neighbours_100_times_apart(self, format: str) -> None:
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
    def test_measured_error(self, format: str, percent: float) -> None:
        x = spread(16, 128, 128, seed=4)
        error = (dequantize(quantize(x, format)) - x).square().sum((1, 2)) / x.square().sum((1, 2))
        assert 100 * error.sqrt().mean().item() == pytest.approx(percent, rel=0.03)

    @pytest.mark.parametrize(("format", "target"), [("fp8", 448), ("nvfp4", 6)])
    def test_the_better_scale_is_taken(self, format: str, target: int) -> None:
        x = spread(2, 64, 128, seed=5)
        q = quantize(x, format)
        largest = blocks_of(x, format).abs().amax(-1, keepdim=True)
        if format == "fp8":
            plain = to_e4m3(blocks_of(x, format) / largest * 448).float() / 448 * largest
        else:
            assert q.global_scale is not None
            scale = (
                to_e4m3(largest / 6 / q.global_scale[:, None, None, None]).float() * q.global_scale[:, None, None, None]
            )
            plain = from_e2m1(to_e2m1(blocks_of(x, format) / scale)) * scale
        chosen = (blocks_of(dequantize(q) - x, format)).square().sum(-1)
        first = (plain - blocks_of(x, format)).square().sum(-1)
        assert bool((chosen <= first * (1 + 1e-3)).all())
        assert 0.2 < (chosen < first * 0.999).float().mean() < 0.8

    def test_on_a_tie_the_first_scale_is_taken(self) -> None:
        x = torch.zeros(1, 64)
        x[0, 5] = 3.0
        assert int(quantize(x, "nvfp4").codes[0, 2]) == 0x70
        assert int(quantize(x, "fp8").codes.view(torch.uint8)[0, 5]) == 0x7E

    def test_global_scale_is_the_smallest_power_of_two_with_room(self) -> None:
        largest = torch.tensor([1792, 1792.001, 1793, 1920, 2047, 896, 897, 1, 1.75, 1.8, 2.0**-95, 2.0**-80, 0])
        x = torch.zeros(len(largest), 2, 16)
        x[:, 1, 3] = -largest
        want = [1, 2, 2, 2, 2, 0.5, 1, 2.0**-10, 2.0**-10, 2.0**-9, 2.0**-100, 2.0**-90, 2.0**-100]
        got = quantize(x, "nvfp4").global_scale
        assert got is not None and got.tolist() == want

    @pytest.mark.parametrize("format", FORMATS)
    def test_quantizing_again_changes_nothing(self, format: str) -> None:
        first = dequantize(quantize(spread(4, 80, 128, seed=6), format))
        assert torch.equal(dequantize(quantize(first, format)), first)

    def test_every_fp16_scale_comes_back(self) -> None:
        scales = torch.arange(1, 0x7C00).to(torch.int16).view(torch.float16)
        x = torch.zeros(1, len(scales), 32)
        x[0, :, 9] = 127 * scales.float()
        got = quantize(x, "int8").scales
        assert got is not None and torch.equal(got[0, :, 0], scales)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize("format", FORMATS)
    def test_other_inputs_count_as_fp32(self, format: str, dtype: torch.dtype) -> None:
        x = spread(2, 16, 64).to(dtype)
        assert_same_bits(quantize(x, format), quantize(x.float(), format))


class TestSpecialValues:
    @pytest.mark.parametrize("format", FORMATS)
    def test_zero_state_and_zero_memory(self, format: str) -> None:
        q = quantize(torch.zeros(2, 8, 64), format)
        assert all(bool((t.float() > 0).all()) for name, t in q.tensors().items() if name != "codes")
        assert bool((dequantize(q) == 0).all())
        memory = empty(format, (2, 8, 64))
        for tensor in memory.tensors().values():
            tensor.view(torch.uint8).zero_()
        assert bool((dequantize(memory) == 0).all())

    @pytest.mark.parametrize("format", BLOCKED)
    def test_zero_blocks_beside_others(self, format: str) -> None:
        x = spread(2, 8, 128)
        x[:, ::2] = 0
        blocks_of(x, format)[:, 1, 0] = 0
        value = dequantize(quantize(x, format))
        assert bool((value[x == 0] == 0).all()) and bool(value.isfinite().all())

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize("format", BLOCKED)
    def test_a_block_with_nan_or_infinity_reads_as_nan_and_no_other_does(self, format: str, bad: float) -> None:
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
    def test_dtypes_keep_nan_and_infinity_and_overflow_to_infinity(self, format: str) -> None:
        x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 3.4e38, -3.4e38, 65504.0, 65519.0, 65520.0]])
        dtype = FORMATS[format].dtype
        assert dtype is not None
        assert torch.equal(dequantize(quantize(x, format)).nan_to_num(7.0), x.to(dtype).float().nan_to_num(7.0))

    @pytest.mark.parametrize("magnitude", [1e-4, 3e-6, 1e-7, 1e-9])
    def test_int8_with_subnormal_scales_saturates_nowhere(self, magnitude: float) -> None:
        x = spread(1, 32, 64, seed=7) * magnitude
        q = quantize(x, "int8")
        assert q.scales is not None and float(q.scales.float().min()) >= 2.0**-24
        step = blocks_of(torch.empty_like(x), "int8") * 0 + q.scales.float()[..., None]
        assert bool((blocks_of(dequantize(q) - x, "int8").abs() <= step * (0.5 + 2**-15)).all())

    def test_int8_and_given_global_scale_saturate(self) -> None:
        x = torch.zeros(1, 1, 32)
        x[..., 0], x[..., 1] = 1e8, -1e3
        assert dequantize(quantize(x, "int8"))[0, 0, :2].tolist() == [127 * 65504.0, 0.0]
        q = quantize(x, "nvfp4", global_scale=torch.tensor([2.0**-4]))
        assert dequantize(q)[0, 0, :2].tolist() == [6 * 448 / 16, -6 * 448 / 16]

    @pytest.mark.parametrize("exponent", [-140, -120, -100, -60, 0, 60, 120])
    @pytest.mark.parametrize("format", ["fp8", "nvfp4"])
    def test_wide_scales_reach_from_2_to_the_minus_100_to_2_to_the_120(self, format: str, exponent: int) -> None:
        x = torch.randn(2, 4, 64)
        x = x / x.abs().amax((1, 2), keepdim=True)
        scaled = (x.double() * 2.0**exponent).float()
        value = dequantize(quantize(scaled, format))
        assert bool(value.isfinite().all())
        if exponent > -90:
            assert torch.equal(value.double() * 2.0**-exponent, dequantize(quantize(x, format)).double())
        else:  # what is below the smallest scale is rounded to multiples of it
            assert float((value.double() - scaled.double()).abs().max()) <= 2.0**-100

    def test_small_blocks_of_nvfp4_beside_a_large_one(self) -> None:
        x = torch.randn(1, 16, 64)
        x[0, 0, 0], x[0, 1:] = 1000.0, x[0, 1:] * 1e-4
        q = quantize(x, "nvfp4")
        assert q.scales is not None and q.global_scale is not None
        assert float(q.scales[:, 1:].float().max()) < 2.0**-6  # subnormal scales
        error = blocks_of((dequantize(q) - x).abs(), "nvfp4")[0, 1:]
        step = q.scales.float()[0, 1:, :, None] * q.global_scale
        assert bool((error <= step * 3).all())  # the scale may be rounded down by a third; 9 units at most, read as 6


class TestLayout:
    @pytest.mark.parametrize("format", FORMATS)
    @pytest.mark.parametrize("shape", [(3, 80, 128), (2, 5, 64, 256), (7, 64)])
    def test_shapes_and_bytes(self, format: str, shape: tuple[int, ...]) -> None:
        q, memory = quantize(torch.randn(shape), format), empty(format, shape)
        for made in (q, memory):
            assert {n: (tuple(t.shape), t.dtype) for n, t in made.tensors().items()} == layout(format, shape)
            assert made.shape == shape
        heads = int(np.prod(shape[:-2]))
        assert q.nbytes == memory.nbytes == heads * FORMATS[format].head_nbytes(*shape[-2:])

    def test_nibbles(self) -> None:
        x = torch.zeros(1, 16)
        x[0, 0], x[0, 1], x[0, 15] = 0.5, 6.0, -6.0
        q = quantize(x, "nvfp4")
        assert q.codes[0].tolist() == [0x71, 0, 0, 0, 0, 0, 0, 0xF0]

    @pytest.mark.parametrize("format", FORMATS)
    def test_heads_do_not_depend_on_each_other_or_on_strides(self, format: str) -> None:
        x = spread(3, 2, 20, 128, seed=8)
        whole = quantize(x, format)
        for n, h in ((0, 0), (2, 1)):
            part = quantize(x[n, h], format)
            for name, t in raw(part).items():
                assert torch.equal(t, raw(whole)[name][n, h]), name
        pages = torch.full((3, 2 * 20 * 128 + 96), torch.nan)
        view = pages[:, : 2 * 20 * 128].unflatten(1, (2, 20, 128))
        view.copy_(x)
        assert_same_bits(quantize(view, format), whole)
        assert_same_bits(quantize(x.transpose(-1, -2).contiguous().transpose(-1, -2), format), whole)

    def test_tiles_of_a_head_with_its_global_scale_make_the_same_bytes(self) -> None:
        x = spread(2, 64, 128, seed=9)
        whole = quantize(x, "nvfp4")
        assert whole.global_scale is not None
        tile = quantize(x[:, 16:32], "nvfp4", global_scale=whole.global_scale)
        for name in ("codes", "scales"):
            assert torch.equal(raw(tile)[name], raw(whole)[name][:, 16:32])

    @pytest.mark.parametrize("format", FORMATS)
    def test_quantize_into_writes_the_given_slots_of_padded_pages(self, format: str) -> None:
        sizes = layout(format, (6, 2, 12, 64))
        pages, views = {}, {}
        for name, (size, dtype) in sizes.items():
            count, item = int(np.prod(size[1:])), torch.empty(0, dtype=dtype).element_size()
            pages[name] = torch.full((6, count * item + 64), 0xAB, dtype=torch.uint8)
            views[name] = pages[name][:, : count * item].view(dtype).unflatten(1, size[1:])
        q = QuantizedState(format, **views)
        x, slots = spread(3, 2, 12, 64, seed=10), torch.tensor([4, 0, 2])
        quantize_into(x, q, slots)
        assert_same_bits(q.gather(slots), quantize(x, format))
        for name, page in pages.items():
            written = views[name][0].numel() * views[name].element_size()
            assert bool((page[[1, 3, 5]] == 0xAB).all()) and bool((page[:, written:] == 0xAB).all())

    def test_fp32_is_a_copy(self) -> None:
        x = torch.randn(2, 4, 64)
        q = quantize(x, "fp32")
        x.zero_()
        assert bool((dequantize(q) != 0).any())


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
