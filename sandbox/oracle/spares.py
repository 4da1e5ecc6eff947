"""Runners that are ready before they are needed: their device is open, which takes a process a quarter of a second and more.

Contexts are opened and ended under locks of the driver that all GPUs of a host share, so how many candidates a host judges in a second
hangs on what a context costs there. Most of it are its hardware queues: with one instead of eight (CUDA_DEVICE_MAX_CONNECTIONS) it
costs half, and waiting for each other a third (scripts/bench/contexts.py). Work on a single stream never uses a second queue; what
may use several streams gets them all, and a reference gets what it needs whatever the candidate is.

Nobody waits for a context while there is something else to do: a runner for the next evaluation opens its device while the current one's
candidate is built and checked.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sandbox.jail.faults import JailError, ZygoteLost
from sandbox.jail.jailed import Runner

log = logging.getLogger("sandbox.oracle")
READY_S = 60.0
CONNECTIONS_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_SEVERAL_STREAMS = re.compile(
    r"streamcreate|streamfrompool|streamperthread|(?<!current_)(?<!cuda)(?<!\)\.)stream\(|\bstreams\b"  # streams of its own
    r"|graph|concurren|parallel|thread(?:ing|pool)|nccl"
    r"|lstm|(?<![a-z])(?:gru|rnn)|linalg|cholesky|lstsq|solve|slogdet|(?<![a-z])(?:svd|eig(?!ht)|inverse|pinv|det\b|qr\b|lu_(?:factor|solve|unpack))",
    re.I,
)
"""Words without which a source is taken to use one stream: those that make streams, and the libraries (recurrent layers, linear algebra)
that have streams of their own. The stream that is current (`getCurrentCUDAStream`) is one, `weight` and `relu_` have nothing to do with
eigenvalues and triangles. To be wrong costs whoever has none of these words the overlap of its streams, and nobody else."""


def connections(*sources: str) -> dict[str, str]:
    """Variables that hold a process to one hardware queue, if none of the sources can use more."""
    return {} if any(map(_SEVERAL_STREAMS.search, sources)) else {CONNECTIONS_VARIABLE: "1"}


@dataclass(frozen=True)
class Wanted:
    """What a runner is made for. Two that are equal may stand in for each other."""

    flavour: str
    """Of the zygote that it comes from."""
    device: str
    memory_bytes: int
    environment: Mapping[str, str]


@dataclass
class Spare:
    """A runner that opens its device, or has done so (`warm`)."""

    wanted: Wanted
    runner: Runner
    warm: bool = False


class Spares:
    """At most one runner of each flavour that is ready, or will be.

    Args:
      make: a new runner as wanted.
    """

    def __init__(self, make: Callable[[Wanted], Runner]):
        self._make = make
        self._kept: dict[str, Spare] = {}

    def prepare(self, wanted: Wanted) -> None:
        """Has a runner open its device, unless there is one of this flavour; does not wait for it.

        Raises:
          ZygoteLost.
        """
        if wanted.flavour in self._kept:
            return
        try:
            runner = self._make(wanted)
        except OSError as error:
            log.warning("no runner could be made ready: %s", error)
            return
        if self._carried_out(lambda: runner.begin("connect", READY_S, device=wanted.device), wanted, runner):
            self._kept[wanted.flavour] = Spare(wanted, runner)

    def settle(self) -> None:
        """Waits until all are ready, and has them do what is slow at its first use.

        Raises:
          ZygoteLost, Cancelled.
        """
        for flavour, spare in list(self._kept.items()):
            if not spare.warm:
                del self._kept[flavour]
                if self._warmed(spare):
                    self._kept[flavour] = spare

    def take(self, wanted: Wanted) -> Runner | None:
        """The runner that is there, once it is ready, if it is as wanted; one for another device or with other limits makes room.

        Raises:
          ZygoteLost, Cancelled.
        """
        spare = self._kept.get(wanted.flavour)
        if spare is None:
            return None
        if spare.wanted != wanted:
            if (spare.wanted.device, spare.wanted.memory_bytes) != (wanted.device, wanted.memory_bytes):
                self._drop(wanted.flavour)
            return None
        del self._kept[wanted.flavour]
        # Nothing of one that has waited and is not there any more, or whose device is not, is to be the next evaluation's fault.
        there = self._warmed(spare) if not spare.warm else self._carried_out(lambda: spare.runner.call("memory", READY_S), wanted, spare.runner)
        return spare.runner if there else None

    def _warmed(self, spare: Spare) -> bool:
        """Whether a runner has opened its device and is warm now; one that fails is gone."""
        start = time.monotonic()

        def warm() -> None:
            spare.runner.collect(READY_S)
            connected = time.monotonic()
            spare.runner.call("warm", READY_S)
            took = (connected - start, time.monotonic() - connected)
            log.debug("a %s runner is ready: %.3f s waited for its device, %.3f s to warm up", spare.wanted.flavour, *took)

        spare.warm = self._carried_out(warm, spare.wanted, spare.runner)
        return spare.warm

    @staticmethod
    def _carried_out(orders: Callable[[], object], wanted: Wanted, runner: Runner) -> bool:
        """Whether a runner does what it is told; one that does not is closed, as is one whose orders are broken off."""
        try:
            orders()
        except ZygoteLost:
            raise
        except JailError as error:
            runner.close()
            log.warning("no runner could be made ready on %s: %s", wanted.device, error)
            return False
        except BaseException:
            runner.close()
            raise
        return True

    def give_up(self) -> bool:
        """Ends one of the runners that are or will be ready; False if there is none."""
        for flavour in list(self._kept):
            self._drop(flavour)
            return True
        return False

    def forget(self) -> None:
        """Those that are ready end with their zygotes."""
        self._kept.clear()

    def _drop(self, flavour: str) -> None:
        self._kept.pop(flavour).runner.close()
