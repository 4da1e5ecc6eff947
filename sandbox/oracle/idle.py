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
        self._children_s = _cpu_of_children_s(pid)
        self.busy_s = self.watched_s = 0.0

    def __call__(self, command: str, timeout_s: float, **order) -> Message:
        start, busy_s = time.perf_counter(), _cpu_s(self._pid)
        message = self._order(command, timeout_s, **order)
        self.busy_s += max(0.0, _cpu_s(self._pid) - busy_s)
        self.watched_s += time.perf_counter() - start
        return message

    def excess(self) -> str:
        """Evidence that the candidate worked meanwhile, or "". Its children are not told apart by block: all their
        time counts, because a kernel has no use for them."""
        busy_s = self.busy_s + max(0.0, _cpu_of_children_s(self._pid) - self._children_s)
        if busy_s <= ALLOWED_SHARE * self.watched_s + ALLOWED_S:
            return ""
        return (
            f"its processes used {1000 * busy_s:.0f} ms of processor time in the {1000 * self.watched_s:.0f} ms in "
            "which only the baseline had to work"
        )


def _cpu_s(pid: int) -> float:
    """Processor time of all threads of a process so far; 0 for one that has ended."""
    try:
        return time.clock_gettime((~pid << 3) | _PROCESS_CLOCK)
    except OSError:
        return 0.0


def _cpu_of_children_s(pid: int) -> float:
    """Processor time of all living descendants, and of the session's other members."""
    everybody = processes()
    family, grown = {pid}, True
    while grown:
        more = {one.pid for one in everybody if one.parent in family or one.session in family} - family
        grown = bool(more)
        family |= more
    return sum(_cpu_s(one) for one in family - {pid})
