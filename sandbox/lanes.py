"""Who waits, and in which order: clients take turns, and of a client's own work what is more urgent comes first, then what came
first, with a head start for what takes long (`sandbox.expectation`).

Every client has a lane with a clock of its own, which one evaluation moves on by one; the lane whose clock is behind is next
(fair queueing with a weight of one each). A lane that was empty starts at the time of the others, so that nobody saves up turns.
Urgency counts within a lane alone: a client that calls all of its work urgent gains nothing over the others.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort_right
from collections.abc import Iterator
from operator import attrgetter

from sandbox.records import Record


class Lanes:
    """Waiting records. Iterating gives them in the order in which they would be served if no more came. Not thread-safe."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._now = 0
        self._joined = 0

    def append(self, record: Record) -> None:
        """Puts a record in its place among those of its client that are as urgent."""
        insort_right(self._lane(record).queue(record.priority), record, key=attrgetter("due_s"))

    def appendleft(self, record: Record) -> None:
        """Puts a record before all of its client that are as urgent."""
        record.due_s = -math.inf
        self._lane(record).queue(record.priority).insert(0, record)

    def take(self, record: Record) -> None:
        """Removes a record that is served now: its client has had a turn. Raises ValueError if it does not wait."""
        lane = self._leave(record)
        self._now = max(self._now, lane.clock)
        lane.clock += 1
        if not any(self._lanes.values()):
            self._lanes.clear()  # nobody waits: nobody is owed a turn
        # Who is away with a clock that is behind the others' starts anew when he comes back.
        self._lanes = {name: lane for name, lane in self._lanes.items() if lane or lane.clock > self._now}

    def remove(self, record: Record) -> None:
        """Removes a record that waits no longer. Raises ValueError if it does not wait."""
        self._leave(record)

    def room_for(self, client: str, most: int) -> int:
        """How many more of a client may come, if `most` may wait: what is free, or what is missing to its fair share; then others
        have more than theirs, and together twice `most` may wait."""
        own = len(self._lanes.get(client, ()))
        others = sum(name != client and len(lane) > 0 for name, lane in self._lanes.items())
        return max(most - len(self), min(most // (others + 1) - own, 2 * most - len(self)), 0)

    @property
    def first(self) -> Record:
        """Raises IndexError if nobody waits."""
        for record in self:
            return record
        raise IndexError("nobody waits")

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def __contains__(self, record: Record) -> bool:
        lane = self._lanes.get(record.client)
        return lane is not None and record in lane.queue(record.priority)

    def __iter__(self) -> Iterator[Record]:
        turns = [(lane.clock, lane.joined, iter(lane)) for lane in self._lanes.values() if lane]
        heapq.heapify(turns)
        while turns:
            clock, joined, records = turns[0]
            record = next(records, None)
            if record is None:
                heapq.heappop(turns)
            else:
                heapq.heapreplace(turns, (clock + 1, joined, records))
                yield record

    def _lane(self, record: Record) -> _Lane:
        lane = self._lanes.setdefault(record.client, _Lane())
        if not lane:
            self._joined += 1
            lane.joined, lane.clock = self._joined, max(lane.clock, self._behind())
        return lane

    def _behind(self) -> int:
        """The time at which a lane starts: that of the lane that is next, or of the last turn if nobody waits."""
        return min((lane.clock for lane in self._lanes.values() if lane), default=self._now)

    def _leave(self, record: Record) -> _Lane:
        lane = self._lanes.get(record.client)
        if lane is None:
            raise ValueError(f"{record.id} does not wait")
        lane.queue(record.priority).remove(record)
        return lane


class _Lane:
    """One client's waiting records, by priority. `joined` tells lanes of the same time apart: who came first is first."""

    def __init__(self) -> None:
        self._queues: dict[int, list[Record]] = {}
        self.clock = self.joined = 0

    def queue(self, priority: int) -> list[Record]:
        return self._queues.setdefault(priority, [])

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Record]:
        for priority in sorted(self._queues, reverse=True):
            yield from self._queues[priority]
