"""int8 in blocks of 32 along K with an fp16 scale, and fp8-e4m3 with an fp32 scale a row."""

from __future__ import annotations

import torch

from replayssm.rounding import round_stochastic

INT8_BLOCK = 32
INT8_MAX = 127.0
E4M3_MAX = 448.0
FP8_TARGETS = (448.0, 288.0)
MIN_SCALE = 2.0**-100
_SMALLEST_HALF = 2.0**-24


def max_magnitude(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest |x| of the last dimension (1 if anything there is NaN or infinite), and whether all of it is finite.

    As integers the bits of |x| are in the order of the values, infinity and NaN last: one integer maximum does both.
    """
    bits = x.abs().view(torch.int32).amax(-1)
    finite = bits < 0x7F800000
    return torch.where(finite, bits, 0x3F800000).view(torch.float32), finite


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Nearest e4m3 number, ties to even, saturating at +-448; NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def encode_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales: scale = max * fp32(1 / 127) rounded up to fp16, at least 2^-24; code = round(x (1 / scale)).

    Rounding up costs nothing that can be measured and keeps blocks under 127 * 2^-14, whose scale is subnormal, from
    being clipped. A block with a NaN or infinity gets a NaN scale. Blocks past 127 * 65504 saturate.
    """
    blocks = x.unflatten(-1, (-1, INT8_BLOCK))
    largest, finite = max_magnitude(blocks)
    scales = _half_not_below((largest * (1.0 / INT8_MAX)).clamp(_SMALLEST_HALF, torch.finfo(torch.float16).max))
    codes = torch.round(_where(finite, blocks) * (1.0 / scales.float())[..., None]).clamp(-INT8_MAX, INT8_MAX)
    return codes.to(torch.int8).flatten(-2), torch.where(finite, scales, torch.nan)


def decode_int8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """code x scale."""
    return (codes.unflatten(-1, (-1, INT8_BLOCK)).float() * scales.float()[..., None]).flatten(-2)


def encode_fp8(x: torch.Tensor, words: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and row scales: the row's maximum goes to 448 or to 288, whichever has the lower squared error.

    scale = max * fp32(1 / target), at least 2^-100, rounded to 16 significant bits; code = e4m3(x (1 / scale)). The
    errors are compared in steps of the first scale, each square rounded to a multiple of 2^-12, as sums of integers: no
    order of summation changes the choice. With `words` the codes are rounded stochastically at the scale so chosen. A
    row with a NaN or infinity gets a NaN scale.
    """
    largest, finite = max_magnitude(x)
    x = _where(finite, x)
    scale, inverse = _row_scale(largest, FP8_TARGETS[0])
    other, other_inverse = _row_scale(largest, FP8_TARGETS[1])
    errors = [
        squared_error((x - to_e4m3(x * i[..., None]).float() * s[..., None]) * inverse[..., None], 2.0**12)
        for s, i in ((scale, inverse), (other, other_inverse))
    ]
    better = errors[1] < errors[0]
    scale, inverse = torch.where(better, other, scale), torch.where(better, other_inverse, inverse)
    scaled = x * inverse[..., None]
    codes = to_e4m3(scaled) if words is None else round_stochastic(scaled, words, torch.float8_e4m3fn)
    return codes, torch.where(finite, scale, torch.nan)


def squared_error(difference: torch.Tensor, resolution: float) -> torch.Tensor:
    """Sum over the last dimension of the squares, each a whole number of 1 / resolution."""
    return torch.round(difference * difference * resolution).to(torch.int32).sum(-1)


def _row_scale(largest: torch.Tensor, target: float) -> tuple[torch.Tensor, torch.Tensor]:
    bits = (largest * (1.0 / target)).clamp(min=MIN_SCALE).view(torch.int32)
    scale = ((bits + 0x80) & ~0xFF).view(torch.float32)
    return scale, 1.0 / scale


def _half_not_below(x: torch.Tensor) -> torch.Tensor:
    nearest = x.half()
    return (nearest.view(torch.int16) + (nearest.float() < x).short()).view(torch.float16)


def _where(finite: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`x` with what is not finite, as a whole block, replaced by zeros."""
    return torch.where(finite[..., None], x, 0.0)
