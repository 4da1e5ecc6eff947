"""A CPU that holds still while something is timed on it: cores that stay awake, threads that stay where they are.

A core without work halts, and it takes tens of microseconds until it runs again, on a virtual machine most of all: as much as a
short kernel, paid by whichever side hands work from one thread to another, and more or less of it from one second to the
next. Linux lets a process ask for a shorter time (PM QoS): while `/dev/cpu_dma_latency` is open with 0 written to it, cores poll
instead of halting. The wish ends with the file, so nothing is left behind whatever becomes of the process. (Processes of the
lowest priority that spin keep cores awake too, but then the scheduler finds no idle core for a thread that wakes up.)

And a scheduler may leave both threads of a kernel on one core, for as long as an evaluation takes.

Seen on a virtual machine of two cores, medians of windows of 0.4 s in which two processes took turns in blocks of 1 ms, two threads
each: a product of 192 x 192 matrices 0.10 to 0.18 ms with cores awake, 0.100 to 0.109 ms with threads placed as well; sums of 512 rows of
1024 numbers 0.034 to 0.050 and 0.030 to 0.035 ms.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from sandbox.oracle.idle import family

WORKER_SHARE = 0.05
"""A thread works that takes as much of the busiest one's processor time."""
HANDING_OVER = 1.25
"""By this factor threads are held up where nobody disturbs them (1.0 to 1.3 seen of two threads of short calls, 1.7 to 2.5 beside other
programs): a core that one thread has just finished with is not at once the other's."""
LATENCY = Path("/dev/cpu_dma_latency")
"""Where the wish is made; for root alone, unless a machine's owner has given others the right to it."""


@contextlib.contextmanager
def steady() -> Iterator[list[int]]:
    """Within it cores do not halt, as far as this process may see to it, and this thread stays on the last core, so that it is
    seldom in the way of the first threads of those that it orders about. Yields the cores that it could use before."""
    thread, cores = threading.get_native_id(), os.sched_getaffinity(0)
    with awake():
        os.sched_setaffinity(thread, {max(cores)})
        try:
            yield sorted(cores)
        finally:
            os.sched_setaffinity(thread, cores)


@contextlib.contextmanager
def awake(device: Path = LATENCY) -> Iterator[bool]:
    """Within it the cores of this machine do not halt. Yields whether the kernel has been told so."""
    try:
        file = os.open(device, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        yield os.write(file, struct.pack("i", 0)) == 4
    finally:
        os.close(file)


class Placement:
    """The threads of a process and its descendants, on a core each or wherever the scheduler puts them: there when it is left.

    Threads that are started later inherit the core of the one that starts them, so a process that starts some in every call
    must be let free (`Side.settle` finds out by timing both). Nothing is placed where more threads work than there are cores.

    Args:
      pid: of the process.
      cores: that it may use, ascending; none on a device of another kind, where nothing is placed.
    """

    def __init__(self, pid: int, cores: Sequence[int]):
        self._pid, self._cores = pid, list(cores)
        self._before_ns = {thread: worked for thread, (worked, _) in self._clocks_ns().items()} if cores else {}
        self._seen_ns: tuple[int, int] = (0, 0)
        self._places: dict[int, int] | None = None
        self._placed = False
        self.workers = 0
        """How many threads have worked, once that has been looked at."""

    def __enter__(self) -> Placement:
        return self

    def __exit__(self, *_: object) -> None:
        self.use(False)

    def use(self, placed: bool) -> None:
        """Puts every thread that has worked since this object was made (those that had by the first such call) on its core, or
        lets all of them go."""
        if placed and self._places is None and self._cores:
            self._places = self._choose()
        self._placed = placed
        for thread, core in (self._places or {}).items():
            with contextlib.suppress(OSError):  # it has ended, or is not ours to move
                os.sched_setaffinity(thread, {core} if placed else self._cores)

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Within it all threads are let go; then they are as they were."""
        placed = self._placed
        self.use(False)
        try:
            yield
        finally:
            self.use(placed)

    def _choose(self) -> dict[int, int]:
        """A process may have thread pools that rest, of a second OpenMP runtime for one: only those that work get a core."""
        worked_ns = {thread: worked - self._before_ns.get(thread, 0) for thread, (worked, _) in self._clocks_ns().items()}
        least_ns = WORKER_SHARE * max(worked_ns.values(), default=0)
        workers = [thread for thread, ns in worked_ns.items() if ns > least_ns]
        self.workers = len(workers)
        return dict(zip(workers, self._cores, strict=False)) if len(workers) <= len(self._cores) else {}

    def held_up(self) -> float:
        """By what factor the threads have taken longer since the last call (the first one begins) than they have worked, because others
        had their cores: 1 where they could always go on."""
        clocks = self._clocks_ns().values() if self._cores else ()
        seen = (sum(worked for worked, _ in clocks), sum(waited for _, waited in clocks))
        worked, waited = (max(0, now - before) for now, before in zip(seen, self._seen_ns, strict=True))
        self._seen_ns = seen
        return (worked + waited) / worked if worked else 1.0

    def _clocks_ns(self) -> dict[int, tuple[int, int]]:
        """Of each thread so far, a process's first thread first: processor time, and time in which it could have run but had no core."""
        found = {}
        for member in sorted(family(self._pid)):
            with contextlib.suppress(OSError):
                for name in sorted(os.listdir(f"/proc/{member}/task"), key=int):
                    with contextlib.suppress(OSError), open(f"/proc/{member}/task/{name}/schedstat") as file:
                        worked, waited, _ = file.read().split()
                        found[int(name)] = (int(worked), int(waited))
        return found
