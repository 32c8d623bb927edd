"""CUDA tensors that end where mapped memory ends: reading on is an illegal access, and the end of the process."""

from __future__ import annotations

import ctypes
from typing import Any

import torch


class _Place(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("place", _Place),
        ("security", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("place", _Place), ("flags", ctypes.c_int))


class _Bytes:
    """Memory as torch takes it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}


def _call(name: str, *arguments: Any) -> None:
    code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if code != 0:
        raise RuntimeError(f"{name} returned {code}")


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy in memory of its own, behind which nothing is mapped; it is never given back."""
    torch.cuda.synchronize()
    place = _Place(1, tensor.device.index or 0)  # a device
    properties = _Properties(type=1, place=place)  # pinned
    step = ctypes.c_size_t()
    _call("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(properties), 0)
    nbytes = tensor.numel() * tensor.element_size()
    mapped = -(-nbytes // step.value) * step.value
    address, handle, access = ctypes.c_uint64(), ctypes.c_uint64(), _Access(place, 3)  # reads and writes
    size, zero = ctypes.c_size_t(mapped), ctypes.c_size_t(0)
    reserved = ctypes.c_size_t(mapped + step.value)
    _call("cuMemAddressReserve", ctypes.byref(address), reserved, zero, ctypes.c_uint64(0), ctypes.c_uint64(0))
    _call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), ctypes.c_uint64(0))
    _call("cuMemMap", address, size, zero, handle, ctypes.c_uint64(0))
    _call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
    first = address.value + mapped - nbytes
    memory = torch.as_tensor(_Bytes(first, nbytes), device=tensor.device)
    assert memory.data_ptr() == first
    return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def all_guarded(tensors: dict[str, Any]) -> dict[str, Any]:
    """Every tensor of a layer or of its tokens."""
    return {name: None if tensor is None else guarded(tensor) for name, tensor in tensors.items()}
