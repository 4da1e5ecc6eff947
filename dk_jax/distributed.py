"""Several processes as one run: every one computes the same steps on one mesh, the first one judges and writes.

    processes   started by SLURM (srun, one task a process), or by hand with the same command and three variables each:
                JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES=2, JAX_PROCESS_ID=0 or 1
    computing   each runs the whole program on arrays that are spread over all devices; what the host reads of them is whole everywhere
    judging     the first asks the sandbox and tells the others what it said (`SharedJudge`), so all take the same steps
    files       the workdir belongs to the first. Every other works in a folder of its own, a copy of the workdir's records at the start,
                which is gone with it; of checkpoints each process writes its part of the arrays

A process that is lost ends the others, within `HEARTBEAT_S`; the same commands go on from the last checkpoint. All processes need the
same file system.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from dk_jax.rollout.judge import Arms, Journal, Judge, Request
from dk_jax.rollout.trajectory import Verdict
from dk_jax.tasks.task import Task

log = logging.getLogger(__name__)
HEARTBEAT_S = 30
"""So long after it has gone silent a process counts as lost."""
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_PIECE_BYTES, _KEPT_MESSAGES, _POLL_MS = 1 << 20, 256, 10_000
_COPIED = ("*.json", "corpus.jsonl", "library.sqlite*", "metrics.jsonl")


class FirstProcessFailed(RuntimeError):
    """What the first process did for all went wrong there; it says more."""


def initialize(env: Mapping[str, str] = os.environ) -> bool:
    """Joins the other processes of the run, if it is said to have several; call it before JAX is used.

    Returns:
      Whether there are several.

    Raises:
      ValueError: variables that make no sense together.
    """
    given = [name for name in VARIABLES if env.get(name)]
    how: dict[str, Any] = {}
    if given:
        if len(given) < len(VARIABLES):
            raise ValueError(f"{', '.join(given)} set without {', '.join(set(VARIABLES) - set(given))}: several processes need all three")
        address, count, number = (env[name] for name in VARIABLES)
        if not (count.isdecimal() and number.isdecimal() and int(number) < int(count)) or ":" not in address:
            raise ValueError(
                f"JAX_COORDINATOR_ADDRESS={address!r}, JAX_NUM_PROCESSES={count!r}, JAX_PROCESS_ID={number!r}: give host:port of the first "
                "process, their number, and for each its own number from 0 on"
            )
        if int(count) == 1:
            return False
        how = dict(coordinator_address=address, num_processes=int(count), process_id=int(number))
    elif not (env.get("SLURM_PROCID") and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1):
        return False
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(**how, heartbeat_timeout_seconds=HEARTBEAT_S)
    return True


def _state() -> Any:
    """What JAX knows of the run's processes. Its public functions would start its threads, after which no sandbox can be forked; nor do
    they show the key-value store."""
    from jax._src import distributed

    return distributed.global_state


def several() -> bool:
    """Whether this is one process of several."""
    return _state().client is not None and _state().num_processes > 1


def is_first() -> bool:
    """Whether this is the process that judges and writes, as every process alone is."""
    return not several() or _state().process_id == 0


class _Line:
    """From the first process to the others, in order, through the coordination service: waiting costs no device and has no limit."""

    def __init__(self):
        self._sent = 0

    @property
    def _client(self) -> Any:
        return _state().client

    def send(self, data: bytes) -> None:
        pieces = [data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)] or [b""]
        for number, piece in enumerate(pieces):
            self._client.key_value_set_bytes(self._key(self._sent, number), piece)
        self._client.key_value_set(self._key(self._sent, "pieces"), str(len(pieces)))
        if self._sent >= _KEPT_MESSAGES:  # no process is so far behind: they meet in every program
            self._client.key_value_delete(self._key(self._sent - _KEPT_MESSAGES))
        self._sent += 1

    def receive(self) -> bytes:
        pieces = int(self._get(self._client.blocking_key_value_get, self._key(self._sent, "pieces")))
        got = [self._get(self._client.blocking_key_value_get_bytes, self._key(self._sent, number)) for number in range(pieces)]
        self._sent += 1
        return b"".join(got)

    @staticmethod
    def _get(get: Callable[[str, int], Any], key: str) -> Any:
        while True:
            try:
                return get(key, _POLL_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise

    @staticmethod
    def _key(message: int, part: Any = "") -> str:
        return f"dk_jax/{message}/{part}"


_line = _Line()


def by_first(act: Callable[[], Any]) -> Any:
    """What `act` returns in the first process (JSON), for all. Alone it is just called.

    Raises:
      What `act` raises, in the first process; FirstProcessFailed in the others.
    """
    if not several():
        return act()
    if not is_first():
        found = json.loads(_line.receive())
        if "error" in found:
            raise FirstProcessFailed(found["error"])
        return found["value"]
    try:
        value = act()
    except Exception as error:
        _line.send(json.dumps({"error": f"the first process stopped: {type(error).__name__}: {error}"}).encode())
        raise
    _line.send(json.dumps({"value": value}).encode())
    return value


def own_workdir(workdir: Path, open_it: Callable[[], None]) -> Path:
    """Where this process keeps its records: the workdir itself for the first, once `open_it` has been called there; for every other a
    new folder with a copy of them, which is removed at the end."""
    by_first(open_it)
    if is_first():
        own = workdir
    else:
        own = Path(tempfile.mkdtemp(prefix=f"dk_jax-process-{_state().process_id}-"))
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        for pattern in _COPIED:
            for path in workdir.glob(pattern):
                shutil.copyfile(path, own / path.name)
    meet("records copied")
    return own


def meet(where: str) -> None:
    """Returns when all processes are there."""
    if several():
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(where)


class SharedJudge:
    """A judge of all processes: the first asks the sandbox, all get its answers, each keeps a journal of its own.

    Args:
      judge: of the first process; None in the others.
      journal: of the others.
    """

    def __init__(self, judge: Judge | None, journal: Journal | None = None):
        self._judge = judge
        self.journal = journal if judge is None else judge.journal

    def evaluate(self, requests: Sequence[Request], *, phase: str, progress: Callable[[int], None] | None = None, **how: Any) -> list[Verdict]:
        """As `Judge.evaluate`."""
        found = by_first(lambda: [v.__dict__ for v in self._judge.evaluate(requests, phase=phase, progress=progress, **how)])
        return [Verdict(**fields) for fields in found]

    def verify(self, arms: Sequence[Arms], *, phase: str) -> list[tuple[list[Verdict], list[Verdict]]]:
        """As `Judge.verify`."""
        found = by_first(lambda: [[[v.__dict__ for v in side] for side in pair] for pair in self._judge.verify(arms, phase=phase)])
        return [tuple([Verdict(**fields) for fields in side] for side in pair) for pair in found]

    def examinations(self, tasks: Sequence[Task], found: Callable[[Task, Any], None]) -> None:
        """As `SandboxJudge.examinations`, but for the first process alone: what depends on the answers has to be told to the others."""
        self._judge.examinations(tasks, found)

    @property
    def limits(self) -> dict[str, float]:
        """As `SandboxJudge.limits`, in the first process."""
        return self._judge.limits


def for_all(make_judge: Callable[..., Judge]) -> Callable[..., Judge]:
    """A maker of judges (config, socket, journal) for a run of one process or several."""
    if not several():
        return make_judge

    def make(cfg: Any, socket: str, journal: Journal | None) -> SharedJudge:
        return SharedJudge(make_judge(cfg, socket, journal) if is_first() else None, journal)

    return make
