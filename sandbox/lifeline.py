"""Children that do not outlive the process that started them, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def ends_with_parent() -> Callable[[], None]:
    """A `preexec_fn`: the kernel sends the child SIGTERM when its parent ends, by SIGKILL too (prctl(2), PR_SET_PDEATHSIG).

    The kernel means the *thread* that starts the child, which must live as long as the child is wanted.
    """
    parent, libc = os.getpid(), ctypes.CDLL(None, use_errno=True)  # before the fork: afterwards locks may be held that nobody frees

    def tie() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has ended already
            os._exit(1)

    return tie
