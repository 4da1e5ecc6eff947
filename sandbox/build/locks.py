"""One builder of a thing at a time, across processes: locks that end with their holder, however it ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.05


@contextmanager
def build_lock(path: Path, timeout_s: float, pause: Callable[[float], None] = time.sleep) -> Iterator[bool]:
    """Holds the lock at `path` (made with its directory if missing) for the block.

    The kernel drops it when the holder dies, also by SIGKILL; the file stays, empty.

    Args:
      timeout_s: how long to wait for another holder.
      pause: called with a number of seconds between attempts; it may raise to give up.

    Yields:
      Whether the lock is held: False after `timeout_s`. Going on without is safe, since what is built is
      published in one step; it only does the work twice.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    held = False
                    break
                pause(POLL_S)
        yield held
    finally:
        os.close(fd)
