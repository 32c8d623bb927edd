"""QuantizedState: a state in one of the storage formats, made from it, read back and written in place.

Every function is elementwise torch and reductions over K: no host synchronisation, any device, capturable.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm.checks import check_choice, check_tensor, fail
from replayssm.formats import CHECKPOINT_FORMATS, READ_FORMATS, Format
from replayssm.quant import encoders, nvfp4
from replayssm.rounding import round_stochastic

_FORMATS: dict[str, Format] = {**CHECKPOINT_FORMATS, **{name: f for name, f in READ_FORMATS.items() if name != "none"}}
_STOCHASTIC = ("fp16", "bf16", "fp8")


@dataclass(frozen=True)
class QuantizedState:
    """The tensors of a state [..., V, K] in `format`; leading dimensions are slots and heads.

    | format | codes | scales | global_scale |
    |---|---|---|---|
    | fp32, fp16, bf16 | [..., V, K] of that dtype | | |
    | int8 | [..., V, K] int8, -127 to 127 | [..., V, K / 32] fp16 | |
    | fp8 | [..., V, K] float8_e4m3fn | [..., V] fp32 | |
    | nvfp4 | [..., V, K / 2] uint8 | [..., V, K / 16] float8_e4m3fn | [...] fp32 |

    An nvfp4 byte j of a row holds element 2j in its low half and element 2j + 1 in its high half.
    A value is code x scale, nvfp4's (code x scale) x global_scale, in fp32. These products are exact (int8 has 8 + 11
    significant bits, fp8 4 + 16, nvfp4 2 + 4 and a power of two), so neither their order nor a fused multiply-add
    matters. A block (fp8: a row) that held a NaN or infinity has codes of zero and a NaN scale. Memory of zeros is a
    state of zeros. Any slot stride will do.
    """

    format: str
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that this format has, by name."""
        named = {"codes": self.codes, "scales": self.scales, "global_scale": self.global_scale}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [..., V, K] of the state."""
        *outer, last = self.codes.shape
        return (*outer, last * 2 if self.format == "nvfp4" else last)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def gather(self, slots: torch.Tensor) -> QuantizedState:
        """A copy of the states of `slots` [n], in that order."""
        gathered = {name: as_indexable(tensor)[slots].view(tensor.dtype) for name, tensor in self.tensors().items()}
        return QuantizedState(self.format, **gathered)


def layout(format: str, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor of a state of `shape` [..., V, K]."""
    check_choice("format", format, _FORMATS)
    if len(shape) < 2:
        raise fail("shape", tuple(shape), "at least V and K")
    *outer, V, K = shape
    _FORMATS[format].check_dims("format", K)
    if format == "int8":
        return {"codes": (tuple(shape), torch.int8), "scales": ((*outer, V, K // encoders.INT8_BLOCK), torch.float16)}
    if format == "fp8":
        return {"codes": (tuple(shape), torch.float8_e4m3fn), "scales": ((*outer, V), torch.float32)}
    if format == "nvfp4":
        return {
            "codes": ((*outer, V, K // 2), torch.uint8),
            "scales": ((*outer, V, K // nvfp4.BLOCK), torch.float8_e4m3fn),
            "global_scale": (tuple(outer), torch.float32),
        }
    dtype = _FORMATS[format].dtype
    assert dtype is not None
    return {"codes": (tuple(shape), dtype)}


def empty(format: str, shape: tuple[int, ...], device: torch.device | str | None = None) -> QuantizedState:
    """Uninitialised memory for a state of `shape` [..., V, K]."""
    sizes = layout(format, shape)
    tensors = {name: torch.empty(size, dtype=dtype, device=device) for name, (size, dtype) in sizes.items()}
    return QuantizedState(format, **tensors)


def quantize(
    state: torch.Tensor,
    format: str,
    *,
    words: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
) -> QuantizedState:
    """`state` [..., V, K] of any float dtype, rounded to fp32 first, in `format`.

    words: random words in the state's shape (`rounding.random_words`) for stochastic rounding to fp16, bf16 or fp8;
    without them every code is the nearest, ties to even. global_scale: [...] powers of two for nvfp4 in place of those
    that follow from the heads' maxima, for writers that see a part of a head; blocks that do not fit saturate.
    """
    sizes = layout(format, tuple(state.shape))
    if not state.is_floating_point():
        raise fail("state.dtype", state.dtype, "a float dtype")
    if words is not None:
        check_choice("format with words", format, _STOCHASTIC)
        check_tensor("words", words, tuple(state.shape), (torch.int64,), state.device, inner_contiguous=0)
    if global_scale is not None:
        check_choice("format with global_scale", format, ("nvfp4",))
        shape, dtype = sizes["global_scale"]
        check_tensor("global_scale", global_scale, shape, (dtype,), state.device, inner_contiguous=0)
    x = state.float()
    if format == "int8":
        return QuantizedState(format, *encoders.encode_int8(x))
    if format == "fp8":
        return QuantizedState(format, *encoders.encode_fp8(x, words))
    if format == "nvfp4":
        return QuantizedState(format, *nvfp4.encode(x, global_scale))
    dtype = sizes["codes"][1]
    return QuantizedState(format, x.to(dtype, copy=True) if words is None else round_stochastic(x, words, dtype))


def quantize_into(
    state: torch.Tensor,
    q: QuantizedState,
    slots: torch.Tensor,
    *,
    words: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
) -> None:
    """Write `state` [n, ..., V, K] to the entries `slots` [n] of `q`, in place; each slot at most once, no padding."""
    if tuple(state.shape) != (len(slots), *q.shape[1:]):
        raise fail("state.shape", list(state.shape), f"[{len(slots)}, {', '.join(map(str, q.shape[1:]))}]")
    new = quantize(state, q.format, words=words, global_scale=global_scale).tensors()
    for name, tensor in q.tensors().items():
        as_indexable(tensor)[slots] = as_indexable(new[name])


def dequantize(q: QuantizedState) -> torch.Tensor:
    """The fp32 state [..., V, K] that `q` stands for; NaN where a scale is."""
    if q.scales is None:
        return q.codes.float()
    if q.global_scale is not None:
        return nvfp4.decode(q.codes, q.scales, q.global_scale)
    if q.format == "int8":
        return encoders.decode_int8(q.codes, q.scales)
    return q.codes.float() * q.scales[..., None]


def as_indexable(t: torch.Tensor) -> torch.Tensor:
    """8-bit floats as bytes, which can be indexed on every device."""
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t
