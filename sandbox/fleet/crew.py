"""Workers by the host that they are on, and which of them may have which evaluation. Knows nothing of Ray.

A server without a fleet has one host, without a name and without limits of its own; then all of this comes to nothing.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sandbox.metrics import Metrics
from sandbox.protocol import Capabilities
from sandbox.records import Record
from sandbox.workers import Gates, Worker

if TYPE_CHECKING:
    from sandbox.scheduler import Scheduler

SETTLE_S = 5.0
"""So long after an oracle was lost on a host its evaluation goes to others only: oracles of a host that dies die one after the other."""
KEPT_ARMS = 10_000


@dataclass(frozen=True, eq=False, kw_only=True)
class Node:
    """A host with oracles.

    Attributes:
      name: as people read it; "" for the host of a server without a fleet.
      gates: of its devices, which are others than those of the same name elsewhere.
      offers: what it can judge; None for everything that the server takes.
    """

    name: str
    gates: Gates
    offers: Capabilities | None = None

    def serves(self, record: Record) -> bool:
        """Whether its devices and compilers can judge an evaluation."""
        if self.offers is None:
            return True
        device, support = record.job["task"]["device"], self.offers.languages.get(record.job["candidate"]["language"])
        if record.job["options"]["examine"]:  # without a candidate
            return device in self.offers.devices
        if record.job["options"]["profile"] == "ncu" and not self.offers.counters.available:
            return False
        return device in self.offers.devices and support is not None and support.available and device in support.devices


class OracleSource(Protocol):
    """Where oracles come from that are not on this host."""

    @property
    def problem(self) -> str:
        """What is amiss with it; "" if nothing is."""

    async def start(self, scheduler: Scheduler) -> None:
        """Begins to let workers join and leave."""

    async def close(self) -> None:
        """Ends all oracles, whose workers have been closed."""


class Crew:
    """The workers in service, in the order in which they joined. Not thread-safe."""

    def __init__(self) -> None:
        self._nodes: dict[Worker, Node] = {}
        self._workers: dict[Node, list[Worker]] = {}
        self._arms: OrderedDict[str, Node] = OrderedDict()
        self._left: list[str] = []

    def join(self, worker: Worker, node: Node) -> None:
        self._nodes[worker] = node
        self._workers.setdefault(node, []).append(worker)

    def leave(self, worker: Worker) -> None:
        """Raises KeyError for a worker that is not in service."""
        node = self._nodes.pop(worker)
        self._workers[node].remove(worker)
        if not self._workers[node]:
            del self._workers[node]
            self._left.append(node.name)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def node(self, worker: Worker) -> Node:
        """Raises KeyError."""
        return self._nodes[worker]

    def report(self, metrics: Metrics) -> None:
        """Sets what is counted by host."""
        while self._left:
            metrics.set("sandbox_node_workers_ready", 0, node=self._left.pop())
        for node, workers in self._workers.items():
            for device, seconds in node.gates.alone_s.items():
                metrics.set("sandbox_exclusive_seconds_total", seconds, device=f"{node.name}/{device}" if node.name else device)
            if node.name:
                metrics.set("sandbox_node_workers_ready", sum(worker.ready for worker in workers), node=node.name)

    def free(self, prefer: Callable[[Worker], bool] = lambda _: False) -> Iterator[Worker]:
        """Each worker that can take an evaluation when its turn comes: those that are preferred first, then those of the host with the
        smallest share at work, and of these who has rested longest."""
        asked = set()
        while True:
            free = [worker for worker in self._nodes if worker.ready and worker.job_id is None and worker not in asked]
            if not free:
                return
            shares = {node: sum(worker.job_id is not None for worker in workers) / len(workers) for node, workers in self._workers.items()}
            worker = min(free, key=lambda one: (not prefer(one), shares[self._nodes[one]], one.free_since_s))
            asked.add(worker)
            yield worker

    def suits(self, worker: Worker, record: Record) -> bool:
        """Whether a worker may have an evaluation now."""
        node = self._nodes[worker]
        if record.shunned and record.shunned == node.name and time.monotonic() < record.shunned_until_s:
            return False
        home = self._arms.get(record.arm) if record.arm else None
        if home is not None and home is not node and any(worker.ready for worker in self._workers.get(home, ())):
            return False
        return node.serves(record)

    def gave(self, worker: Worker, record: Record) -> None:
        """Notes that a worker has got an evaluation."""
        if record.arm:
            self._arms[record.arm] = self._nodes[worker]
            while len(self._arms) > KEPT_ARMS:
                self._arms.popitem(last=False)

    def lost(self, worker: Worker, record: Record) -> float:
        """Notes that the oracle of a worker was lost with an evaluation; returns for how many seconds its host does not get that again."""
        node = self._nodes.get(worker)
        if node is None or not node.name:
            return 0.0
        record.shunned, record.shunned_until_s = node.name, time.monotonic() + SETTLE_S
        return SETTLE_S
