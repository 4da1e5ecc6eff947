"""Bounded reading of what a jailed process prints."""

from __future__ import annotations

import os

CAPTURE_BYTES = 16 * 1024
DRAIN_BYTES = 1 << 20


class Capture:
    """The first and last `kept_bytes` of what a process prints; the rest is read and thrown away."""

    def __init__(self, fd: int, kept_bytes: int = CAPTURE_BYTES):
        os.set_blocking(fd, False)
        self.fd: int | None = fd
        self._kept_bytes = kept_bytes
        self._head, self._tail, self._skipped = b"", b"", 0

    def drain(self) -> None:
        """Reads what is there now, at most `DRAIN_BYTES`: several writers may be faster than one reader. Closes at the end of
        the stream."""
        taken = 0
        while self.fd is not None and taken < DRAIN_BYTES:
            try:
                data = os.read(self.fd, 65536)
            except BlockingIOError:
                return
            taken += len(data)
            if not data:
                self.close()
                return
            room = self._kept_bytes - len(self._head)
            self._head += data[:room]
            joined = self._tail + data[room:]
            self._skipped += max(0, len(joined) - self._kept_bytes)
            self._tail = joined[-self._kept_bytes :]

    def text(self) -> str:
        gap = f"\n... {self._skipped} bytes left out ...\n".encode() if self._skipped else b""
        return (self._head + gap + self._tail).decode("utf-8", "replace")

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
