"""Limits that a process puts on itself between fork and the first line of untrusted code."""

from __future__ import annotations

import os
import resource
import signal
from dataclasses import dataclass

from sandbox.jail.syscalls import PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, prctl


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one untrusted process.

    Attributes:
      memory_bytes: address space beyond what the process has at the fork; None where a device driver reserves
        large ranges (the caller must then watch resident memory).
      file_bytes: largest file it may write.
      directory_bytes: all that it may keep in its private directory and in /dev/shm together, where the
        directory is its own memory (runners at level strict).
      open_files: as RLIMIT_NOFILE.
      processes: threads and processes beyond those its user has at the fork (RLIMIT_NPROC; it does not
        bind root).
      gpu: it needs NVIDIA devices, and what their driver reads and writes in /dev, /proc and /sys.
    """

    memory_bytes: int | None
    file_bytes: int = 2 << 30
    open_files: int = 256
    processes: int = 256
    directory_bytes: int = 1 << 30
    gpu: bool = False


def die_with_parent(parent_pid: int) -> None:
    """Asks for SIGKILL when the parent dies; leaves at once if that has already happened."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def address_space_bytes() -> int:
    """Size of this process's address space."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def tasks_of_user() -> int:
    """Number of threads that this process's user runs now: what RLIMIT_NPROC counts."""
    total, uid = 0, os.getuid()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    total += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
    return total


def apply(limits: Limits) -> None:
    """Puts `limits` on the calling process and its future children; never raises an existing hard limit."""
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, limits.file_bytes)
    _lower(resource.RLIMIT_NOFILE, limits.open_files)
    if os.getuid() != 0:
        _lower(resource.RLIMIT_NPROC, tasks_of_user() + limits.processes)
    if limits.memory_bytes is not None:
        _lower(resource.RLIMIT_AS, address_space_bytes() + limits.memory_bytes)
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def _lower(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (bound, bound))
