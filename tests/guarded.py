"""Tensors that begin or end where memory does: reading on is an illegal access, and the end of the process."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
ENDS = ("start", "end")
Place = Callable[[torch.Tensor], torch.Tensor]
_MAPPED: list[tuple[int, int]] = []  # address and size of all guarded memory


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


def _on_gpu(nbytes: int, index: int) -> tuple[int, int]:
    """Address and size of memory for `nbytes`, before and behind which nothing is mapped."""
    torch.cuda.synchronize()
    place = _Place(1, index)  # a device
    properties = _Properties(type=1, place=place)  # pinned
    step, zero = ctypes.c_size_t(), ctypes.c_size_t(0)
    _call("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(properties), 0)
    mapped = -(-nbytes // step.value) * step.value
    address, handle, access = ctypes.c_uint64(), ctypes.c_uint64(), _Access(place, 3)  # reads and writes
    size, reserved = ctypes.c_size_t(mapped), ctypes.c_size_t(mapped + 2 * step.value)
    _call("cuMemAddressReserve", ctypes.byref(address), reserved, zero, ctypes.c_uint64(0), ctypes.c_uint64(0))
    address.value += step.value
    _call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), ctypes.c_uint64(0))
    _call("cuMemMap", address, size, zero, handle, ctypes.c_uint64(0))
    _call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
    _call("cuMemRelease", handle)  # once it is no longer mapped
    return address.value, mapped


def _on_cpu(nbytes: int) -> tuple[int, int]:
    """As `_on_gpu`."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    page = mmap.PAGESIZE
    mapped = -(-nbytes // page) * page
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    size = ctypes.c_size_t(mapped + 2 * page)
    address = libc.mmap(None, size, 0, flags, -1, ctypes.c_long(0)) + page
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mapped), mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), "mprotect")
    return address, mapped


def guarded(tensor: torch.Tensor, end: str = "end") -> torch.Tensor:
    """A contiguous copy in memory of its own, before whose start or behind whose end nothing is mapped.

    `release` gives the memory back. Both ends leave the address as many bytes past a multiple of 16, which kernels are
    compiled for: so up to 12 bytes before the start of a tensor whose size is no such multiple are mapped.
    """
    if tensor.numel() == 0:
        return tensor.clone()
    nbytes, gpu = tensor.numel() * tensor.element_size(), tensor.is_cuda
    address, mapped = _on_gpu(nbytes, tensor.device.index or 0) if gpu else _on_cpu(nbytes)
    _MAPPED.append((address, mapped))
    first = address + (-nbytes % 16 if end == "start" else mapped - nbytes)
    if gpu:
        memory = torch.as_tensor(_Bytes(first, nbytes), device=tensor.device)
    else:
        memory = torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(first), dtype=torch.uint8)
    assert memory.data_ptr() == first
    return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def release() -> None:
    """Give the memory of all guarded tensors back; none may be used any more. Their addresses stay taken."""
    while _MAPPED:
        address, size = _MAPPED.pop()
        if INTERPRETED:
            ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
        else:
            _call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))


def check(run: Callable[[Place], list[torch.Tensor]]) -> None:
    """The same from tensors at either end of their memory."""
    results = [run(lambda tensor, end=end: guarded(tensor, end)) for end in ENDS]
    if not INTERPRETED:
        torch.cuda.synchronize()
    assert all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(*results, strict=True))
    results.clear()
    release()
