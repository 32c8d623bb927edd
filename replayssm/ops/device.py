"""What launchers ask about the device and the tensors."""

from __future__ import annotations

from functools import cache

import torch


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
