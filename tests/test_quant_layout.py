"""Storage formats: shapes and bytes, slots of padded pages, and what must not change a byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quant_case import FORMATS, assert_same_bits, raw, spread

from replayssm.quant import QuantizedState, dequantize, empty, layout, quantize, quantize_into


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(3, 80, 128), (2, 5, 64, 256), (7, 64)])
def test_shapes_and_bytes(format: str, shape: tuple[int, ...]) -> None:
    q, memory = quantize(torch.randn(shape), format), empty(format, shape)
    for made in (q, memory):
        assert {n: (tuple(t.shape), t.dtype) for n, t in made.tensors().items()} == layout(format, shape)
        assert made.shape == shape
    heads = int(np.prod(shape[:-2]))
    assert q.nbytes == memory.nbytes == heads * FORMATS[format].head_nbytes(*shape[-2:])


def test_nibbles() -> None:
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1], x[0, 15] = 0.5, 6.0, -6.0
    q = quantize(x, "nvfp4")
    assert q.codes[0].tolist() == [0x71, 0, 0, 0, 0, 0, 0, 0xF0]


@pytest.mark.parametrize("format", FORMATS)
def test_heads_do_not_depend_on_each_other_or_on_strides(format: str) -> None:
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


def test_tiles_of_a_head_with_its_global_scale_make_the_same_bytes() -> None:
    x = spread(2, 64, 128, seed=9)
    whole = quantize(x, "nvfp4")
    assert whole.global_scale is not None
    tile = quantize(x[:, 16:32], "nvfp4", global_scale=whole.global_scale)
    for name in ("codes", "scales"):
        assert torch.equal(raw(tile)[name], raw(whole)[name][:, 16:32])


@pytest.mark.parametrize("format", FORMATS)
def test_quantize_into_writes_the_given_slots_of_padded_pages(format: str) -> None:
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


def test_fp32_is_a_copy() -> None:
    x = torch.randn(2, 4, 64)
    q = quantize(x, "fp32")
    x.zero_()
    assert bool((dequantize(q) != 0).any())
