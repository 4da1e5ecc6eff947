"""Where the threads of other processes execute at this moment: instruction pointers, taken from outside.

A thread that runs is stopped by ptrace for some ten microseconds, its instruction pointer read, and let go
again; between two looks nobody is traced. Threads that sleep are left alone. Where a pointer lies is told by
/proc/PID/maps. Linux on x86_64 and aarch64, for processes that the caller may trace (its own descendants, or as
root).

With the pointer come the words on top of the stack (and the link register, where there is one): the return
address of a function that keeps nothing on the stack is among them, as that of memcpy or expf is.

Not seen: code that runs in the kernel (the pointer is then that of the call or of the memory access that led
there), and the callers of a function that has a frame of its own.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import platform
import signal
import time
from dataclasses import dataclass

from sandbox.jail.peek import Span, read_memory
from sandbox.jail.syscalls import checked, libc

SEIZE, INTERRUPT, DETACH, GETREGSET = 0x4206, 0x4207, 17, 0x4204
NT_PRSTATUS = 1
WALL = 0x4000_0000
EVENT_STOP = 128
STOP_S = 0.1
"""A running thread stops at its next return from the kernel, or at once."""
STACK_WORDS = 6


@dataclass(frozen=True)
class Registers:
    """Where a machine's registers hold the instruction pointer, the stack pointer and (None: nowhere) the return
    address of a function that has just been called."""

    pointer: int
    stack: int
    link: int | None


REGISTERS = {"x86_64": Registers(16, 19, None), "aarch64": Registers(32, 31, 30)}


@dataclass(frozen=True)
class Place:
    """Where a thread executes, and words that may be return addresses, the likeliest first."""

    pointer: int
    words: tuple[int, ...]


@dataclass(frozen=True, order=True)
class Region:
    """Executable memory of a process: addresses `start` to `end`, the file mapped there as (device, inode), and
    its path ("" for memory without a file)."""

    start: int
    end: int
    file: tuple[int, int]
    path: str


class Regions:
    """The executable memory of one process, as it was when this was made. Raises OSError."""

    def __init__(self, pid: int):
        self._regions = []
        with open(f"/proc/{pid}/maps", "rb") as maps:
            # Split here alone: a name may hold every other sign that text mode takes for the end of a line.
            for line in os.fsdecode(maps.read()).split("\n"):
                fields = line.split(maxsplit=5)
                if len(fields) > 1 and "x" in fields[1]:
                    start, end = (int(word, 16) for word in fields[0].split("-"))
                    major, minor = (int(word, 16) for word in fields[3].split(":"))
                    path = fields[5].strip().removesuffix(" (deleted)") if len(fields) == 6 else ""
                    file = (os.makedev(major, minor), int(fields[4]))
                    self._regions.append(Region(start, end, file, path))
        self._regions.sort()
        self._starts = [region.start for region in self._regions]

    @property
    def files(self) -> set[tuple[int, int]]:
        """(Device, inode) of all files that are mapped here."""
        return {region.file for region in self._regions}

    def at(self, pointer: int) -> Region | None:
        """The region that an address lies in."""
        index = bisect.bisect_right(self._starts, pointer) - 1
        return self._regions[index] if index >= 0 and pointer < self._regions[index].end else None


_ptrace = libc["ptrace"]  # an object of its own: another user's argument types are not changed
_ptrace.restype = ctypes.c_long
_ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def running(pid: int) -> list[int]:
    """Threads of a process that run or wait for a processor; none of a process that has ended."""
    found = []
    try:
        for name in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{name}/stat", "rb") as file:
                text = file.read()
            if text[text.rindex(b")") + 2 :][:1] == b"R":
                found.append(int(name))
    except OSError:
        pass
    return found


def places(threads: list[int]) -> dict[int, Place]:
    """Where threads execute, all stopped before the first is let go; without those that have ended.

    Raises:
      OSError: this process may not trace one of them, or the machine is unknown.
    """
    registers = REGISTERS.get(platform.machine())
    if registers is None:
        raise OSError(f"registers of {platform.machine()} are not known here")
    seized, found = [], {}
    try:
        for thread in threads:
            try:
                checked("ptrace", _ptrace(SEIZE, thread, None, None))
            except ProcessLookupError:
                continue
            seized.append(thread)
            _ptrace(INTERRUPT, thread, None, None)
    finally:
        deadline = time.monotonic() + STOP_S
        stopped = {thread: _await_stop(thread, deadline) for thread in seized}
        for thread, pending in stopped.items():
            if pending is not None:
                place = _place(thread, registers)
                _ptrace(DETACH, thread, None, pending or None)
                if place is not None:
                    found[thread] = place
    return found


def _await_stop(thread: int, deadline: float) -> int | None:
    """Waits until a thread has stopped; returns the signal that it is to get when it is let go (0: none), or None
    for one that has ended. One that does not stop in time stays seized, which it will not notice, and is let go
    when this thread ends."""
    while True:
        try:
            changed, status = os.waitpid(thread, WALL | os.WNOHANG)
        except OSError:
            return None
        if changed:
            if not os.WIFSTOPPED(status):
                return None
            by_trace = status >> 16 == EVENT_STOP or os.WSTOPSIG(status) == signal.SIGTRAP
            return 0 if by_trace else os.WSTOPSIG(status)
        if time.monotonic() > deadline:
            return None
        os.sched_yield()


def _place(thread: int, registers: Registers) -> Place | None:
    values = (ctypes.c_uint64 * 64)()
    span = Span(ctypes.addressof(values), ctypes.sizeof(values))
    if _ptrace(GETREGSET, thread, NT_PRSTATUS, ctypes.addressof(span)) == -1:
        return None
    words = () if registers.link is None else (values[registers.link],)
    top = (ctypes.c_uint64 * STACK_WORDS)()
    ours = Span(ctypes.addressof(top), ctypes.sizeof(top))
    theirs = Span(values[registers.stack], ctypes.sizeof(top))
    if read_memory(thread, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0) == ctypes.sizeof(top):
        words += tuple(top)
    return Place(values[registers.pointer], words)
