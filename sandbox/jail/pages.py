"""Memory of the processes that jails are forked from, and of these: cheap forks, freed memory that is kept, huge pages.

A fork copies one page table entry for each page that was ever written, and the end of the child takes each back: for a
process with PyTorch imported that is most of the price of a jail. On huge pages it is one entry for 2 MiB. What a child
writes to is split off and copied in pages of the usual size, so it takes no more memory than before.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

from sandbox.jail.syscalls import libc

if TYPE_CHECKING:
    import torch

HUGE_BYTES = 2 << 20
SETTLED_BYTES = 1 << 20
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_KEPT_BYTES = 32 << 20
"""Larger blocks are new pages each time; glibc allows no more."""
MOST_KEPT_BYTES = 128 << 20
"""Freed memory beyond this at the end of the heap is given back."""


def collapse_memory() -> int:
    """Moves this process's private memory to huge pages as far as the kernel will; returns how many there are.

    Nothing changes for memory that comes later. 0 before Linux 6.1 and where there are no huge pages.
    """
    collapsed = 0
    with open("/proc/self/maps") as file:
        lines = file.read().splitlines()
    for line in lines:
        span, rights, _, _, _, *path = line.split()
        if rights != "rw-p" or path not in ([], ["[heap]"]):
            continue
        start, end = (int(address, 16) for address in span.split("-"))
        for address in range(-(-start // HUGE_BYTES) * HUGE_BYTES, end - HUGE_BYTES + 1, HUGE_BYTES):
            area = ctypes.c_void_p(address), ctypes.c_size_t(HUGE_BYTES)
            collapsed += libc.madvise(*area, MADV_COLLAPSE) == 0
    return collapsed


def huge_zeros(n_bytes: int) -> torch.Tensor:
    """Zeroed memory, uint8 [n_bytes], on huge pages where the kernel has them to give: a stop of the process, or another one's turn,
    can cost it the translations of its addresses, and those of 2 MiB in usual pages take longer to find again than the sum of the
    numbers there."""
    return _huge(n_bytes).zero_()


def settled_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor on a CPU whose place in memory does not depend on what a process has allocated before: a large contiguous one
    lies on huge pages of its own. (In the heap its pages are huge or not as it happens, and stay so: one process in thirty took 0.052 ms
    for the sums of a matrix of 2 MiB, the others 0.030.)"""
    n_bytes = tensor.numel() * tensor.element_size()
    if n_bytes < SETTLED_BYTES or not tensor.is_contiguous():
        return tensor.clone()
    return _huge(n_bytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _huge(n_bytes: int) -> torch.Tensor:
    """Memory that nothing was written to yet, uint8 [n_bytes]."""
    import torch

    area = mmap.mmap(-1, (n_bytes // HUGE_BYTES + 2) * HUGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(area, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_BYTES
    whole = -(-n_bytes // HUGE_BYTES) * HUGE_BYTES  # the last page is to be a huge one too
    libc.madvise(ctypes.c_void_p(memory.data_ptr() + start), ctypes.c_size_t(whole), MADV_HUGEPAGE)
    return memory[start : start + n_bytes]


def keep_memory() -> None:
    """Has the C library of this process, and of those forked from it, keep freed memory for the next block of its size.

    By default it learns from the largest block that was freed when to give memory back. A candidate's process is new and
    has freed little, so each output of some megabytes would be new pages in every call, while a reference that has been through
    float64 keeps them: the same multiplication of 2 MiB took 0.48 ms in the one and 0.21 ms in the other. Does
    nothing where the C library has no such settings.
    """
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, MOST_KEPT_BYTES)
