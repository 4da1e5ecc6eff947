"""Cheap forks of a large process: its private memory moves to huge pages.

A fork copies one page table entry for each page that was ever written, and the end of the child takes each back:
for a process with PyTorch imported that is most of the price of a jail. On huge pages it is one entry for 2 MiB. What
a child writes to is split off and copied in pages of the usual size, so it takes no more memory than before.
"""

from __future__ import annotations

import ctypes

from sandbox.jail.syscalls import libc

HUGE_BYTES = 2 << 20
MADV_COLLAPSE = 25


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
