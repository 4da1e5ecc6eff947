"""Device memory that two processes share: made by the oracle, lent to one runner as a descriptor.

Inputs and outputs of a GPU's evaluation need not pass through the host. An arena is physical device memory of the
driver's virtual memory management (cuMemCreate), exported as a POSIX descriptor, which the runner imports and maps. It
belongs to one runner alone, so a candidate sees nothing in it but its own inputs and outputs; whoever holds it may
write it at any time, so the oracle copies what it takes before it looks at it. Its first quarter carries what goes to
the runner, the second what is copied for the oracle; in the other half the runner's allocator may place what its calls
return (`sandbox.jail.arena_pool`).

Talks to libcuda through ctypes, beside PyTorch, in whose primary context the memory is mapped.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import torch

from sandbox.jail.tensors import DTYPES, describe

ALIGN_BYTES = 256
_PINNED, _POSIX_FD, _DEVICE, _READ_WRITE, _MINIMUM = 1, 1, 1, 3, 0


class ArenaError(RuntimeError):
    """The driver refused a step; the text names the call and what it answered."""


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Flags(ctypes.Structure):
    _fields_ = [
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _Flags),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


def _driver(name: str, *arguments: Any) -> None:
    code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        ctypes.CDLL("libcuda.so.1").cuGetErrorName(code, ctypes.byref(text))
        raise ArenaError(f"{name} answers {code} ({(text.value or b'?').decode()})")


def _properties(index: int) -> _Properties:
    return _Properties(type=_PINNED, handle_types=_POSIX_FD, location=_Location(type=_DEVICE, id=index))


class _Bytes:
    """What PyTorch takes as memory that others own."""

    def __init__(self, address: int, n_bytes: int):
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (n_bytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


class Arena:
    """Shared device memory, mapped in this process.

    Attributes:
      bytes: its size.
      memory: all of it, uint8[bytes].
    """

    def __init__(self, handle: ctypes.c_ulonglong, n_bytes: int, index: int):
        self.bytes = n_bytes
        self._handle, self._address = handle, ctypes.c_ulonglong()
        self._mapped = False
        size = ctypes.c_size_t(n_bytes)
        try:
            _driver("cuMemAddressReserve", ctypes.byref(self._address), size, ctypes.c_size_t(0), ctypes.c_ulonglong(0), ctypes.c_ulonglong(0))
            _driver("cuMemMap", self._address, size, ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0))
            self._mapped = True
            access = _Access(location=_Location(type=_DEVICE, id=index), flags=_READ_WRITE)
            _driver("cuMemSetAccess", self._address, size, ctypes.byref(access), ctypes.c_size_t(1))
            self.memory = torch.as_tensor(_Bytes(self._address.value, n_bytes), device=f"cuda:{index}")
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, index: int, n_bytes: int) -> tuple[Arena, int]:
        """A new arena on CUDA device `index` of at least `n_bytes`, and a descriptor of it for another process.

        Raises:
          ArenaError: the driver cannot share memory, or has none left.
        """
        _enter(index)
        properties, granularity = _properties(index), ctypes.c_size_t()
        _driver(
            "cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(properties), ctypes.c_int(_MINIMUM)
        )
        n_bytes = -(-n_bytes // granularity.value) * granularity.value
        handle = ctypes.c_ulonglong()
        _driver("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(n_bytes), ctypes.byref(properties), ctypes.c_ulonglong(0))
        fd = ctypes.c_int(-1)
        try:
            _driver("cuMemExportToShareableHandle", ctypes.byref(fd), handle, ctypes.c_int(_POSIX_FD), ctypes.c_ulonglong(0))
        except ArenaError:
            _driver("cuMemRelease", handle)
            raise
        try:
            return cls(handle, n_bytes, index), fd.value
        except BaseException:
            os.close(fd.value)
            raise

    @classmethod
    def open(cls, index: int, fd: int, n_bytes: int) -> Arena:
        """The arena behind a descriptor of `create`; the descriptor stays the caller's.

        Raises:
          ArenaError: it is none, or may not be mapped here.
        """
        _enter(index)
        handle = ctypes.c_ulonglong()
        _driver("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), ctypes.c_int(_POSIX_FD))
        return cls(handle, n_bytes, index)

    def close(self) -> None:
        """Unmaps it; tensors over it must be gone."""
        self.memory = None
        size = ctypes.c_size_t(self.bytes)
        if self._mapped:
            torch.cuda.synchronize()
            _driver("cuMemUnmap", self._address, size)
            self._mapped = False
        if self._address.value:
            _driver("cuMemAddressFree", self._address, size)
            self._address = ctypes.c_ulonglong()
        if self._handle.value:
            _driver("cuMemRelease", self._handle)
            self._handle = ctypes.c_ulonglong()

    def part(self, name: str) -> torch.Tensor:
        """Memory for "inputs", "outputs" or the runner's "pool"."""
        return part(self.memory, name)


def _enter(index: int) -> None:
    """Makes PyTorch's primary context current, in which all mappings are made."""
    torch.cuda.set_device(index)
    torch.cuda.current_stream().synchronize()


def part(memory: torch.Tensor, name: str) -> torch.Tensor:
    """The part of an arena's memory for "inputs" (a quarter), "outputs" (a quarter) or the runner's "pool" (the rest).

    Raises:
      KeyError: another name.
    """
    quarter = len(memory) // 4 // ALIGN_BYTES * ALIGN_BYTES
    first, last = {"inputs": (0, quarter), "outputs": (quarter, 2 * quarter), "pool": (2 * quarter, len(memory))}[name]
    return memory[first:last]


def padded(n_bytes: int) -> int:
    """Room that a tensor of `n_bytes` takes in an area."""
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES


def write(area: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[dict[str, Any]] | None:
    """Copies tensors into an area and returns their header entries, {dtype, shape, offset}; None if they do not fit.

    Raises:
      TypeError: a data type that cannot be sent.
    """
    entries, offset = [], 0
    for tensor in tensors:
        entries.append({**describe(tensor), "offset": offset})
        offset += padded(tensor.nbytes)
    if offset > area.numel():
        return None
    for entry, tensor in zip(entries, tensors, strict=True):
        if tensor.numel():
            _view(area, entry).copy_(tensor.detach())
    return entries


def read(area: torch.Tensor, entries: Any) -> list[torch.Tensor]:
    """Tensors over an area, as `write` described them (no copy).

    Raises:
      ValueError: the entries are malformed or reach beyond the area.
    """
    if not isinstance(entries, list):
        raise ValueError("malformed tensor descriptions")
    tensors = [_view(area, entry) for entry in entries]
    if sum(tensor.nbytes for tensor in tensors) > area.numel():
        raise ValueError("tensors that overlap")
    return tensors


def _view(area: torch.Tensor, entry: Any) -> torch.Tensor:
    dtype = DTYPES.get(entry.get("dtype")) if isinstance(entry, dict) else None
    shape, offset = (entry.get("shape"), entry.get("offset")) if dtype else (None, None)
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 1 << 40 for size in shape):
        raise ValueError("malformed tensor description")
    count = 1
    for size in shape:
        count *= size
    n_bytes = count * dtype.itemsize
    if type(offset) is not int or offset < 0 or offset % ALIGN_BYTES or offset + n_bytes > area.numel():
        raise ValueError(f"a tensor of {n_bytes} bytes at {offset} does not lie in the {area.numel()} shared")
    return area[offset : offset + n_bytes].view(dtype).reshape(shape)
