"""What launchers ask about the device and the arguments."""

from __future__ import annotations

from functools import cache

import torch

from replayssm.checks import fail

GLUON_ARCHS = ("sm90", "sm100", "sm103", "sm120")


@cache
def device_arch(device: torch.device) -> str:
    """ "sm90" and so on; "hip" or the device's type where it is not NVIDIA's."""
    if device.type != "cuda" or torch.version.hip:
        return device.type if device.type != "cuda" else "hip"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether every head of [slots, heads, ...] starts at a multiple of 16 bytes."""
    size = tensor.element_size()
    return tensor.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in tensor.stride()[:2])


def check_one_token(query_start_loc: torch.Tensor | None, max_window_len: int) -> None:
    """Raise unless every row has one token."""
    if max_window_len != 1:
        raise fail("max_window_len", max_window_len, "1 without query_start_loc")
    if query_start_loc is not None:
        raise fail("query_start_loc", tuple(query_start_loc.shape), "None for stepwise decoding on a GPU")
