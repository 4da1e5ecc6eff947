"""Runners that are ready before they are needed: their device is open, which takes a process a quarter of a second and more.

Contexts are opened and ended under locks of the driver that all GPUs of a host share, so how many candidates a host judges in a second
hangs on what a context costs there. Most of it are its hardware queues: with one instead of eight (CUDA_DEVICE_MAX_CONNECTIONS) it
costs half, and waiting for each other a third (scripts/bench/contexts.py). Work on a single stream never uses a second queue; what
may use several streams gets them all, and a reference gets what it needs whatever the candidate is.
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


class Spares:
    """At most one runner of each flavour that is ready.

    Args:
      make: a new runner as wanted.
    """

    def __init__(self, make: Callable[[Wanted], Runner]):
        self._make = make
        self._ready: dict[str, tuple[Wanted, Runner]] = {}

    def prepare(self, wanted: Wanted) -> None:
        """Gets a runner ready, unless one of this flavour is.

        Raises:
          ZygoteLost.
        """
        if wanted.flavour in self._ready:
            return
        start = time.monotonic()
        try:
            runner = self._make(wanted)
        except OSError as error:
            log.warning("no runner could be made ready: %s", error)
            return
        try:
            forked = time.monotonic()
            runner.call("connect", READY_S, device=wanted.device)
            connected = time.monotonic()
            runner.call("warm", READY_S)
        except ZygoteLost:
            raise
        except JailError as error:
            runner.close()
            log.warning("no runner could be made ready on %s: %s", wanted.device, error)
        except BaseException:
            runner.close()
            raise
        else:
            self._ready[wanted.flavour] = (wanted, runner)
            took = (forked - start, connected - forked, time.monotonic() - connected)
            log.debug("a %s runner is ready: %.3f s to fork, %.3f s to connect, %.3f s to warm up", wanted.flavour, *took)

    def take(self, wanted: Wanted) -> Runner | None:
        """The runner that is ready, if it is as wanted; one for another device or with other limits makes room."""
        if wanted.flavour not in self._ready:
            return None
        ready, runner = self._ready[wanted.flavour]
        if ready != wanted:
            if (ready.device, ready.memory_bytes) != (wanted.device, wanted.memory_bytes):
                self._drop(wanted.flavour)
            return None
        if not _answers(runner):
            self._drop(wanted.flavour)
            return None
        del self._ready[wanted.flavour]
        return runner

    def give_up(self) -> bool:
        """Ends one of the runners that are ready; False if there is none."""
        for flavour in list(self._ready):
            self._drop(flavour)
            return True
        return False

    def forget(self) -> None:
        """Those that are ready end with their zygotes."""
        self._ready.clear()

    def _drop(self, flavour: str) -> None:
        self._ready.pop(flavour)[1].close()


def _answers(runner: Runner) -> bool:
    """Whether a runner that has waited is still there, and its device too: nothing of that is to be the next evaluation's fault."""
    try:
        runner.call("memory", READY_S)
    except ZygoteLost:
        raise
    except JailError:
        return False
    return True
