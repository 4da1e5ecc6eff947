"""Large payloads in shared memory: written and sealed by the sender, checked and mapped privately by the
receiver.

Through a stream socket a payload is copied twice. Here it is copied once, into a memfd; the receiver maps
the sender's pages, and what it changes is its own copy. It believes nothing about the descriptor: before it
maps, the kernel has to say that this is ordinary memory of no file system (no huge pages, file, pipe or
device), which nobody can shrink, grow, write or unseal any more, of exactly the announced size, with every
page there. So the contents stand still, reading them allocates nothing, and no access ends in SIGBUS.

Memory. A page is charged to who wrote it, for as long as anybody maps it: what a jail sends counts among its
own memory. A jail sends at most `MAX_JAIL_BYTES` a message this way, the trusted side keeps no more than that
of it mapped (it copies what comes on top), and the bounds of a jail leave room for both.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import sys
import weakref
from collections.abc import Iterable

MIN_BYTES = 4 << 20
"""Smaller payloads go through the stream: to allocate pages for each costs about what the second copy would
(scripts/bench/transport.py)."""
MAX_JAIL_BYTES = 256 << 20
"""Largest payload of a jail that travels in shared memory, and most of its memory that stays mapped outside."""
UNBOUNDED = sys.maxsize
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
BLOCK_BYTES = 512
"""Unit of `st_blocks`."""

_map = ctypes.CDLL(None, use_errno=True).mmap
_map.restype = ctypes.c_void_p
_map.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value


class BulkError(RuntimeError):
    """The peer passed something else than sealed memory of the announced size; the text says what."""


def share(pieces: Iterable[tuple[int, memoryview]], size: int) -> int | None:
    """Descriptor of sealed memory of `size` bytes with copies of `pieces`, (offset, contiguous bytes) each.

    The gaps between pieces must not hold a whole page. None where such memory cannot be had: no memfd here,
    a limit on descriptors, file sizes or memory.
    """
    try:
        fd = os.memfd_create("payload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return None
    good = False
    try:
        for offset, piece in pieces:
            # Not through a mapping: that would zero every page before it is written.
            while piece.nbytes:
                written = os.pwrite(fd, piece, offset)
                piece, offset = piece[written:], offset + written
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        good = _problem(fd, size) is None
    except OSError:
        pass  # EFBIG, ENOMEM, EPERM, ...
    finally:
        if not good:
            os.close(fd)
    return fd if good else None


class Mappings:
    """The peer's memory that is mapped in this process, by one channel.

    Args:
      max_held_bytes: most that stays mapped while views of it live; further payloads are copied.
    """

    def __init__(self, max_held_bytes: int):
        self._max_held_bytes = max_held_bytes
        self._areas: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    @property
    def held_bytes(self) -> int:
        """Mapped now; views that are gone have unmapped what they showed."""
        return sum(map(len, self._areas))

    def take(self, fd: int, size: int) -> memoryview:
        """A private, writable view of a received payload of `size` bytes (positive); closes `fd`.

        Raises:
          BulkError: the descriptor is not what it has to be.
          MemoryError: there is no room to map it.
        """
        try:
            problem = _problem(fd, size)
            if problem:
                raise BulkError(problem)
            area = _mapped(fd, size)
        finally:
            os.close(fd)
        if self.held_bytes + size > self._max_held_bytes:
            copy = memoryview(_anonymous(size))
            copy[:] = memoryview(area)
            return copy
        self._areas.add(area)
        return memoryview(area)


def _anonymous(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise MemoryError(f"no room for a payload of {size} bytes") from error


def _mapped(fd: int, size: int) -> mmap.mmap:
    """Maps the pages over anonymous ones: a mapping that Python makes of `fd` would keep a descriptor open."""
    area = _anonymous(size)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    rights, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    if _map(start, size, rights, kind, fd, 0) == _MAP_FAILED:
        code = ctypes.get_errno()
        if code == errno.ENOMEM:
            raise MemoryError(f"no room for a payload of {size} bytes")
        raise BulkError(f"it cannot be mapped ({os.strerror(code)})")
    return area


def _problem(fd: int, size: int) -> str | None:
    """Why `fd` is not sealed memory of `size` bytes, or None if it is. Sealed is asked first: what comes after stays true."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        rights = fcntl.fcntl(fd, fcntl.F_GETFL)
        status = os.fstat(fd)
    except OSError:
        return "it is no memory that could be sealed"
    if seals & SEALS != SEALS:
        return "it is not sealed"
    if status.st_dev != _device():
        return "it is memory of another kind"
    if rights & os.O_ACCMODE == os.O_WRONLY:
        return "it cannot be read"
    if status.st_size != size:
        return f"it holds {status.st_size} bytes and not {size}"
    if status.st_blocks * BLOCK_BYTES < size:
        return "it has holes"
    return None


@functools.cache
def _device() -> int:
    """Number of the kernel's own mount that plain memfds lie on; those of huge pages and files of any file system lie
    elsewhere. Raises OSError."""
    fd = os.memfd_create("payload", os.MFD_CLOEXEC)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)
