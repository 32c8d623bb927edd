"""Random states for the tests of storage formats, and how stored ones are compared."""

from __future__ import annotations

import torch

from replayssm.formats import CHECKPOINT_FORMATS, READ_FORMATS
from replayssm.quant import QuantizedState

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
