"""Which waiting evaluation a free oracle takes: one whose task it knows already, if that delays nobody for long.

A task's reference is costly to make (a process, on a GPU a context of its own, rounding, fresh inputs for the audit),
and every oracle keeps those that it used last. So candidates of one task go to few oracles, and different tasks to
different ones. The order of one task's candidates is that of `sandbox.lanes`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from itertools import islice

from sandbox.lanes import Lanes
from sandbox.records import Record

WARM_TASKS = 6
"""References that an oracle keeps (`sandbox.oracle.evaluate.Judge`)."""
WINDOW = 256
"""So many of the waiting are looked at."""
PATIENCE = 32
"""So often the first in the queue may be passed over."""


class Affinity:
    """Remembers which oracle has judged which tasks lately. Not thread-safe."""

    def __init__(self) -> None:
        self._warm: dict[Hashable, OrderedDict[str, None]] = {}

    def take(
        self, waiting: Lanes, worker: Hashable, others: Iterable[Hashable], suits: Callable[[Record], bool] = lambda _: True
    ) -> Record | None:
        """Removes and returns what `worker` shall judge next; None if nothing that waits suits it.

        First choice is a task that is warm there, then one that is warm with none of `others`, then the first in the
        queue. Where the first was tried before, or passed over `PATIENCE` times, it comes before all of these.

        Args:
          waiting: in the order in which they would be served.
          worker: the free oracle. others: the remaining ones.
          suits: whether `worker` may have it; the rest is as if it did not wait.
        """
        first = next(filter(suits, waiting), None)
        if first is None:
            return None
        chosen = first if first.attempts or first.passed >= PATIENCE else self._preferred(first, filter(suits, waiting), worker, others)
        waiting.take(chosen)
        if chosen is not first:
            first.passed += 1
        warm = self._warm.setdefault(worker, OrderedDict())
        warm[chosen.task] = None
        warm.move_to_end(chosen.task)
        while len(warm) > WARM_TASKS:
            warm.popitem(last=False)
        return chosen

    def is_warm(self, worker: Hashable, task: str) -> bool:
        """Whether an oracle has a task's reference."""
        return task in self._warm.get(worker, ())

    def forget(self, worker: Hashable) -> None:
        """Of an oracle that was replaced."""
        self._warm.pop(worker, None)

    def _preferred(self, first: Record, waiting: Iterable[Record], worker: Hashable, others: Iterable[Hashable]) -> Record:
        own = self._warm.get(worker, ())
        elsewhere = {task for other in others for task in self._warm.get(other, ())}
        unknown = None
        for record in islice(waiting, WINDOW):
            if record.task in own:
                return record
            if unknown is None and record.task not in elsewhere:
                unknown = record
        return unknown or first
