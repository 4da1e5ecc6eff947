"""Who may use a device when: many at once for ordinary work, one alone for timing.

No build and no other evaluation runs while one is timed, so timing waits until the device is empty. Two
rules keep either side from starving: once a timing has waited for `patience_s`, no further ordinary work
is let in; and when the device is empty, all timings that wait by then go first, one after another, before
ordinary work starts again. Between two of them comes what an evaluation that has been timed still has to do, a few
milliseconds: it makes room for the next one while others are timed, and evaluations do not move in step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class _Request:
    holder: Hashable
    since_s: float
    grant: Callable[[], None]


@dataclass
class Gate:
    """Gate of one device. Single-threaded; grants are function calls.

    Attributes:
      shared_limit: most holders of ordinary access at once, not counting those that finish.
      patience_s: see the module docstring.
      clock: seconds, monotonic.
    """

    shared_limit: int
    patience_s: float
    clock: Callable[[], float]
    _shared: set[Hashable] = field(default_factory=set)
    _alone: Hashable | None = None
    _alone_since_s: float = 0.0
    _alone_s: float = 0.0
    _finishing: list[_Request] = field(default_factory=list)
    _waiting_shared: list[_Request] = field(default_factory=list)
    _waiting_alone: list[_Request] = field(default_factory=list)

    def acquire(self, holder: Hashable, *, exclusive: bool, grant: Callable[[], None], finishing: bool = False) -> None:
        """Queues a request; `grant` is called when it is granted, perhaps at once.

        Args:
          finishing: ordinary access for the short work that follows a timing.
        """
        queue = self._waiting_alone if exclusive else self._finishing if finishing else self._waiting_shared
        queue.append(_Request(holder, self.clock(), grant))
        self._advance()

    def release(self, holder: Hashable) -> None:
        """Gives access back, or withdraws a request that still waits."""
        self._shared.discard(holder)
        if self._alone is not None and self._alone == holder:
            self._alone_s = self.alone_s
            self._alone = None
        for queue in (self._finishing, self._waiting_shared, self._waiting_alone):
            queue[:] = [request for request in queue if request.holder != holder]
        self._advance()

    @property
    def alone_s(self) -> float:
        """Seconds that the device has been someone's alone."""
        return self._alone_s + (self.clock() - self._alone_since_s if self._alone is not None else 0.0)

    def _advance(self) -> None:
        while self._alone is None:
            if self._finishing:
                request = self._finishing.pop(0)
                self._shared.add(request.holder)
            elif self._waiting_alone and not self._shared:
                request = self._waiting_alone.pop(0)
                self._alone, self._alone_since_s = request.holder, self.clock()
            elif self._waiting_shared and len(self._shared) < self.shared_limit and not self._impatient():
                request = self._waiting_shared.pop(0)
                self._shared.add(request.holder)
            else:
                return
            request.grant()

    def _impatient(self) -> bool:
        return bool(self._waiting_alone) and self.clock() - self._waiting_alone[0].since_s >= self.patience_s
