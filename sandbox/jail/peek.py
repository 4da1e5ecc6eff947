"""Reads memory of other processes from outside, and writes it: outputs where a call has left them, inputs for the next.

Nothing runs in the process meanwhile and nothing there can tell. For processes that the caller may trace (its own
descendants, or as root), as in `sandbox.jail.pointers`. Linux only.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable

import torch

from sandbox.jail.syscalls import libc

MOST_PIECES = 1024
"""Pieces that the kernel reads at once."""
MOST_BYTES = 1 << 30


class Span(ctypes.Structure):
    """Memory: where it begins, and its bytes (`struct iovec`)."""

    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]


read_memory = libc["process_vm_readv"]
"""The system call; an object of its own, so that its types are nobody else's."""
read_memory.restype = ctypes.c_ssize_t
read_memory.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]

write_memory = libc["process_vm_writev"]
write_memory.restype, write_memory.argtypes = read_memory.restype, read_memory.argtypes


def gather(pid: int, addresses: torch.Tensor, size: int) -> torch.Tensor:
    """Copies of pieces of `size` bytes (at most `MOST_BYTES`), one after the other.

    Args:
      addresses: int64 [n], where the pieces begin.

    Returns:
      uint8 [n * size].

    Raises:
      OSError: one of them is not there (EFAULT), the process has ended, or it may not be read.
    """
    count = len(addresses)
    found = torch.empty(count * size, dtype=torch.uint8)
    if not found.numel():
        return found
    pieces = torch.stack([addresses, torch.full_like(addresses, size)], dim=1).contiguous()
    together = max(1, min(MOST_PIECES, MOST_BYTES // size))
    for first in range(0, count, together):
        number = min(together, count - first)
        ours = Span(found.data_ptr() + first * size, number * size)
        theirs = pieces.data_ptr() + first * ctypes.sizeof(Span)
        done = read_memory(pid, ctypes.byref(ours), 1, theirs, number, 0)
        if done != number * size:
            code = ctypes.get_errno() if done < 0 else errno.EFAULT
            raise OSError(code, f"memory of another process cannot be read: {os.strerror(code)}")
    return found


def read(pid: int, address: int, size: int) -> torch.Tensor:
    """A copy of `size` bytes: uint8 [size]. Raises OSError like `gather`."""
    parts = [
        gather(pid, torch.tensor([address + start]), min(MOST_BYTES, size - start))
        for start in range(0, size, MOST_BYTES)
    ]
    return torch.cat(parts) if len(parts) != 1 else parts[0]


def write(pid: int, address: int, data: torch.Tensor) -> None:
    """Writes `data`, uint8 [n], to memory of another process. Raises OSError like `gather`."""
    done = 0
    while done < len(data):
        size = min(MOST_BYTES, len(data) - done)
        ours, theirs = Span(data.data_ptr() + done, size), Span(address + done, size)
        if write_memory(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0) != size:
            code = ctypes.get_errno() or errno.EFAULT
            raise OSError(code, f"memory of another process cannot be written: {os.strerror(code)}")
        done += size


def may_read(pid: int) -> bool:
    """Whether this process may read the memory of another one, which is asked before whether there is any."""
    try:
        gather(pid, torch.tensor([0]), 1)
    except PermissionError:
        return False
    except OSError as error:
        return error.errno == errno.EFAULT
    return True


def inside(pids: Iterable[int], number: int) -> int | None:
    """The one of some processes that calls itself `number` (os.getpid() in it); None if none does."""
    for pid in sorted(pids):
        try:
            with open(f"/proc/{pid}/status", "rb") as status:
                names = next((line.split()[1:] for line in status if line.startswith(b"NSpid:")), [b"%d" % pid])
        except OSError:
            continue
        if int(names[-1]) == number:
            return pid
    return None
