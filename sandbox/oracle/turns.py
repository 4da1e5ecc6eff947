"""Whose turn it is on a GPU: ordinary access is held for the length of one order, not of an evaluation.

Most of an evaluation on a GPU is work of the host (copies, comparisons, compilers), and a timing that had to wait
until every other evaluation is through with its checks would leave the device idle for seconds. So a runner on a GPU
takes its turn for each order (`Runner.turns`), and a timing waits for orders in flight at most. On a CPU, where the
host's work is what disturbs, an evaluation holds the device through all its checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

OFF_DEVICE = frozenset({"start_profiler", "connect", "exit"})
"""Orders that take long and leave the device alone. Contexts that others open move no timing (scripts/bench/context_noise.py)."""


class Turns:
    """Ordinary access to one device, order by order.

    Args:
      shared: opens ordinary access (for the short work that follows a timing if it is given True), and gives it back when left; may
        raise Cancelled.
    """

    def __init__(self, shared: Callable[[bool], AbstractContextManager[None]]):
        self._shared = shared
        self._finishing = False
        self._held: AbstractContextManager[None] | None = None
        self._alone = False

    @contextmanager
    def of(self, command: str) -> Iterator[None]:
        """Held while an order is carried out, unless the device is ours alone or the order does not use it.

        The oracle's own work on the device takes a turn too; orders within it belong to that turn.
        """
        if self._alone or self._held is not None or command in OFF_DEVICE:
            yield
            return
        self._take()
        try:
            yield
        finally:
            self._give()

    @contextmanager
    def left(self) -> Iterator[None]:
        """Steps back in the middle of an order, for work of the host such as a build; then waits for the next turn."""
        if self._held is None:
            yield
            return
        self._give()
        try:
            yield
        finally:
            self._take()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it the caller has the device to itself, so that orders need no turn."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Within it turns come before others' timings (`sandbox.gate`)."""
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False

    def _take(self) -> None:
        held = self._shared(self._finishing)
        held.__enter__()
        self._held = held

    def _give(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.__exit__(None, None, None)

