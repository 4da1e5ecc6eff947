"""Does the candidate rest while its opponent is timed? Its processes' CPU time, read from outside."""

from __future__ import annotations

import time
from collections.abc import Callable

from sandbox.jail.frames import Message
from sandbox.jail.processes import processes

ALLOWED_SHARE = 0.1
ALLOWED_S = 0.004
"""What threads that go to sleep, and a garbage collector, may use."""
_PROCESS_CLOCK = 2


class BaselineWatch:
    """Orders for the reference, with a look at the candidate's CPU time before and after each.

    Args:
      order: sends an order to the reference's runner.
      pid: of the candidate's runner.
    """

    def __init__(self, order: Callable[..., Message], pid: int):
        self._order, self._pid = order, pid
        self._known = family(pid)
        self.busy_s = self.watched_s = 0.0

    def __call__(self, command: str, timeout_s: float, **order) -> Message:
        start, busy_s = time.perf_counter(), self._used_s()
        message = self._order(command, timeout_s, **order)
        self.busy_s += max(0.0, self._used_s() - busy_s)
        self.watched_s += time.perf_counter() - start
        return message

    def _used_s(self) -> float:
        return sum(map(_cpu_s, self._known))

    def excess(self) -> str:
        """Evidence that the candidate worked meanwhile, or "".

        Processes that it has started since are not told apart by block: all their time counts, because a
        kernel has no use for them.
        """
        busy_s = self.busy_s + sum(map(_cpu_s, family(self._pid) - self._known))
        if busy_s <= ALLOWED_SHARE * self.watched_s + ALLOWED_S:
            return ""
        return (
            f"its processes used {1000 * busy_s:.0f} ms of processor time in the "
            f"{1000 * self.watched_s:.0f} ms in which only the baseline had to work"
        )


def _cpu_s(pid: int) -> float:
    """Processor time of all threads of a process so far; 0 for one that has ended."""
    try:
        return time.clock_gettime((~pid << 3) | _PROCESS_CLOCK)
    except OSError:
        return 0.0


def family(pid: int) -> set[int]:
    """A process, its living descendants, and the other members of their sessions."""
    everybody, members, grown = processes(), {pid}, True
    while grown:
        more = {one.pid for one in everybody if one.parent in members or one.session in members} - members
        grown = bool(more)
        members |= more
    return members
