"""Part of an arena as memory of PyTorch's allocator: what calls return lies where the oracle can read it, uncopied.

A copy for the oracle takes about as long as a short kernel and would have to be forgiven, so a candidate that writes
straight to where the copy goes could hide as much work. With a pool nobody has to copy: PyTorch takes the memory of
tensors that are made meanwhile from here, and what does not fit from the driver.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from sandbox.jail.arena import ArenaError

ALIGN_BYTES = 512
"""PyTorch takes the beginning of a segment to be aligned so."""
_RELAXED = 2
"""Mode of a capture in which memory may be taken from the driver."""

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


class Segments:
    """Which parts of a stretch of addresses are taken: first fit.

    Args:
      first, last: the stretch; `last` does not belong to it.
    """

    def __init__(self, first: int, last: int):
        self.first, self.last = first, last
        self._taken: dict[int, int] = {}

    def take(self, n_bytes: int) -> int | None:
        """Address of `n_bytes` that nobody has, aligned; None if there are none."""
        start = _aligned(self.first)
        for taken, end in sorted(self._taken.items()):
            if start + n_bytes <= taken:
                break
            start = _aligned(end)
        if start + n_bytes > self.last:
            return None
        self._taken[start] = start + n_bytes
        return start

    def give_back(self, address: int) -> bool:
        """Whether the address was one that `take` gave; free from now on."""
        return self._taken.pop(address, None) is not None


class ArenaPool:
    """A memory pool of PyTorch's CUDA allocator in an area of a GPU's memory.

    It has to live as long as any tensor in it, so a process has one and keeps it.

    Args:
      area: uint8, on a GPU.
    """

    def __init__(self, area: torch.Tensor):
        self._segments = Segments(area.data_ptr(), area.data_ptr() + area.numel())
        self._functions = _ALLOCATE(self._allocate), _RELEASE(self._release)
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in self._functions]
        self._allocator = torch._C._cuda_customAllocator(*addresses)
        self.pool = torch.cuda.MemPool(self._allocator)

    def renew(self) -> None:
        """Goes on with another pool of PyTorch's in the same area: each takes one capture and no more.

        What recordings have made in the one before must be gone; its memory is free again then.
        """
        self.pool = None
        self.pool = torch.cuda.MemPool(self._allocator)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether all of a tensor's memory lies in the area."""
        storage = tensor.untyped_storage()
        first = storage.data_ptr()
        return self._segments.first <= first and first + storage.nbytes() <= self._segments.last

    def _allocate(self, n_bytes: int, device: int, stream: int | None) -> int | None:
        """Called by PyTorch's allocator; None makes it report that memory is out."""
        address = self._segments.take(n_bytes)
        return address if address is not None else _from_driver(n_bytes)

    def _release(self, address: int, n_bytes: int, device: int, stream: int | None) -> None:
        if not self._segments.give_back(address):
            ctypes.CDLL("libcuda.so.1").cuMemFree_v2(ctypes.c_ulonglong(address))


def _from_driver(n_bytes: int) -> int | None:
    """Other device memory, also while work is being captured."""
    driver, mode, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(_RELAXED), ctypes.c_ulonglong()
    _exchange(driver, mode)
    try:
        refused = driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(n_bytes))
    finally:
        _exchange(driver, mode)
    return None if refused else address.value


def _exchange(driver: Any, mode: ctypes.c_int) -> None:
    code = driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if code:
        raise ArenaError(f"cuThreadExchangeStreamCaptureMode answers {code}")


def _aligned(address: int) -> int:
    return -(-address // ALIGN_BYTES) * ALIGN_BYTES
