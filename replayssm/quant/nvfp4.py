"""nvfp4: E2M1 codes in blocks of 16 along K with an E4M3 scale, and an fp32 scale a head."""

from __future__ import annotations

import torch

from replayssm.quant.encoders import max_magnitude, squared_error, to_e4m3

BLOCK = 16
TARGETS = (6.0, 4.0)
_SMALLEST_E4M3 = 2.0**-9
_MIN_GLOBAL_EXPONENT = 127 - 100


def encode(
    x: torch.Tensor, global_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed codes, block scales and global scale; y = x / global, exact since global is a power of two.

    global: the smallest power of two, at least 2^-100, that brings the head's maximum to 1792 = 448 * 4 or less. Block
    scale: e4m3(max |y| * fp32(1 / 6)) or e4m3(max |y| / 4), at least 2^-9, whichever has the lower squared error; the
    first on a tie. code = e2m1(y (1 / scale)). The errors are compared in steps of the first scale, each square rounded
    to a multiple of 2^-20, as sums of integers: no order of summation changes the choice. A block with a NaN or
    infinity gets a NaN scale, and does not count in the head's maximum. With a given global, larger blocks saturate.
    """
    blocks = x.unflatten(-1, (-1, BLOCK))
    largest, finite = max_magnitude(blocks)
    largest = torch.where(finite, largest, 0.0)
    if global_scale is None:
        global_scale = _global_scale(largest.amax((-2, -1)))
    inverse_global = (1.0 / global_scale)[..., None, None]
    y = torch.where(finite[..., None], blocks, 0.0) * inverse_global[..., None]
    scales, codes, errors = zip(*(_try(y, largest * inverse_global, target) for target in TARGETS), strict=True)
    unit = (1.0 / scales[0])[..., None]
    first, second = (squared_error(error * unit, 2.0**20) for error in errors)
    better = second < first
    scale = torch.where(better, scales[1], scales[0])
    code = torch.where(better[..., None], codes[1], codes[0]).flatten(-2)
    packed = code[..., 0::2] | (code[..., 1::2] << 4)
    return packed, torch.where(finite, scale, torch.nan).to(torch.float8_e4m3fn), global_scale


def decode(codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """(code x scale) x global_scale."""
    unpacked = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)
    values = from_e2m1(unpacked).unflatten(-1, (-1, BLOCK)) * scales.float()[..., None]
    return values.flatten(-2) * global_scale[..., None, None]


def to_e2m1(y: torch.Tensor) -> torch.Tensor:
    """Code (sign in bit 3, then two exponent bits and one of mantissa) of the nearest of 0, .5, 1, 1.5, 2, 3, 4, 6.

    Ties go to the even code, larger values saturate.
    """
    a = y.abs()
    bounds = (a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0)
    magnitude = sum((bound.to(torch.uint8) for bound in bounds), torch.zeros_like(a, dtype=torch.uint8))
    return magnitude | (y.signbit().to(torch.uint8) << 3)


def from_e2m1(code: torch.Tensor) -> torch.Tensor:
    """fp32 value of a code: its bits, as the sign, low exponent and high mantissa bits of an fp16, times 2^14."""
    bits = ((code & 0x8).to(torch.int32) << 12) | ((code & 0x7).to(torch.int32) << 9)
    return bits.to(torch.int16).view(torch.float16).float() * 2.0**14


def _try(y: torch.Tensor, largest: torch.Tensor, target: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale = to_e4m3(largest * (1.0 / target)).float().clamp(min=_SMALLEST_E4M3)
    code = to_e2m1(y * (1.0 / scale)[..., None])
    return scale, code, y - from_e2m1(code) * scale[..., None]


def _global_scale(largest: torch.Tensor) -> torch.Tensor:
    """2^ceil(log2(largest / 1792)): the addition carries into the exponent where the mantissa is above 1.75."""
    exponent = (largest.view(torch.int32) + 0x1FFFFF) >> 23
    return ((exponent - 10).clamp(min=_MIN_GLOBAL_EXPONENT) << 23).view(torch.float32)
