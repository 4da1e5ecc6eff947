"""How fast the machine itself is just now: work of this process that takes the same time whenever nobody disturbs it.

On a virtual machine the same arithmetic takes half as long again for seconds on end when the host gives the other half of a core to
somebody else, and no clock of the guest shows it: reference and candidate are slower together, not alike, and each is as steady as
ever. So while a CPU is timed this process does a product of small matrices and copies some memory on each core, and compares the
times with what they are when it is calm.

One oracle, one yardstick: its memory outlives references.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

REMEMBERED = 512
CALM_TENTH = 10
"""Of the remembered times the fastest one in ten is what calm work takes."""
SIZE, COPIED_BYTES = 96, 2 << 20
"""A product of matrices of this size takes a twentieth of a millisecond, and its parts stay in the first cache; the copy goes through the
second."""
EVERY, RUNS = 5, 6
"""It is looked at before one pair of blocks in so many (an odd number, so that the block after it is now the one side's and now the
other's), each time the fastest of so many runs: the first ones find others' data in the
caches and wide arithmetic units asleep."""


class Yardstick:
    """The times of the machine's own work, now and when it was calm.

    Args:
      clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        one = torch.ones(SIZE, SIZE)
        product, source = torch.empty(SIZE, SIZE), torch.zeros(COPIED_BYTES // 4)
        target = torch.empty_like(source)
        self._works: tuple[Callable[[], object], ...] = (lambda: torch.mm(one, one, out=product), lambda: target.copy_(source))
        self._calm: list[deque[float]] = [deque(maxlen=REMEMBERED) for _ in self._works]
        self._now: dict[tuple[int, int], list[float]] = {}
        self._pairs = 0

    def begin(self) -> None:
        """Before a timing: the next look is its first."""
        self._now, self._pairs = {}, 0

    def look(self, cores: Sequence[int]) -> None:
        """Between two blocks: times each work on each core, once in `EVERY` calls."""
        self._pairs += 1
        if self._pairs % EVERY != 1:
            return
        thread = threading.get_native_id()
        before = os.sched_getaffinity(thread)
        try:
            for core in cores:
                os.sched_setaffinity(thread, {core})
                for number, work in enumerate(self._works):
                    self._now.setdefault((core, number), []).append(min(self._timed(work) for _ in range(RUNS)))
        finally:
            os.sched_setaffinity(thread, before)

    def _timed(self, work: Callable[[], object]) -> float:
        start = self._clock()
        work()
        return self._clock() - start

    def slowdown(self) -> float:
        """How many times longer the slowest kind of work has taken on the slowest core since the last call than it does when it
        is calm; 1 without a look. What was seen is remembered."""
        worst = 1.0
        for (_, number), times in sorted(self._now.items()):
            took, calm = statistics.median(times), self._calm[number]
            calm.append(took)
            usual = sorted(calm)[(len(calm) - 1) // CALM_TENTH]
            worst = max(worst, took / usual)
        self.begin()
        return worst
