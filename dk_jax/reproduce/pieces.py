"""Pieces: calls of bounded length, and a record of what each of them worked on and with what.

A piece ends at the first boundary (an RL step, a chunk of an evaluation) after which the next would not end in time, by the last two.
Work without boundaries, a corpus or a cold start, and a step that takes longer than expected, is interrupted when the time is over; nothing
that was judged is lost by it, as little as by a kill.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from dk_jax.evaluation import machine

log = logging.getLogger(__name__)
MORE_TO_DO = 75
"""Exit status (EX_TEMPFAIL of sysexits.h): this piece is over, and the same command goes on."""

IMPORT_PAUSE_S = 0.2
"""After which an interrupt that came while a module was imported is tried again."""


class PieceOver(KeyboardInterrupt):
    """The piece's time is over. As an interrupt it goes through all that is in work."""


class Piece:
    """The time of one call.

    Args:
        seconds: how long it may work.
        now: the clock; tests give their own.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic):
        self._now, self.seconds = now, seconds
        self._began = self._last = now()
        self._parts: list[float] = []

    def begin(self) -> None:
        """What is measured from here on is work of another kind, whose parts may be longer or shorter."""
        self._last, self._parts = self._now(), []

    def over(self) -> bool:
        """Asked at a boundary: whether another part, as long as the longer of the last two, would not end in time. (The first part of a kind
        has loading and compiling in it, so it does not count for long.)"""
        now = self._now()
        self._parts, self._last = [*self._parts[-1:], now - self._last], now
        return now - self._began + max(self._parts) > self.seconds

    @contextlib.contextmanager
    def bounded(self) -> Iterator[None]:
        """Interrupts the main thread by PieceOver when the time is over."""

        def interrupt(signum, frame):
            if _is_importing(frame):  # an extension module that is interrupted while it starts may end the process
                signal.setitimer(signal.ITIMER_REAL, IMPORT_PAUSE_S)
            else:
                raise PieceOver

        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, max(self.seconds - (self._now() - self._began), 0.001))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


class PieceLog:
    """pieces.jsonl: a line for each job that a piece begins, written before it does.

    Args:
        path: of the file.
        device: of the sandbox: "cpu", or a card's name.
    """

    def __init__(self, path: Path, *, device: str):
        self.path = path
        host = machine.host()
        self._facts = {"piece": f"{time.time():.0f}-{os.getpid()}", "card": card(device, host), "machine": host, "versions": machine.versions()}

    def begins(self, job: str) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            if file.tell() and not self.path.read_bytes().endswith(b"\n"):
                file.write("\n")  # a crash cut the last line
            file.write(json.dumps({"job": job, "time": round(time.time(), 1), **self._facts}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    @property
    def card(self) -> str:
        return self._facts["card"]


def card(device: str, host: dict[str, str]) -> str:
    """What candidates are timed on, without the driver's version."""
    if device == "cpu":
        return f"CPU {host['processor']}, {host['cores']} cores"
    return host["gpu"].rpartition(",")[0] or host["gpu"]


def read_pieces(path: Path) -> list[dict[str, Any]]:
    """Lines of pieces.jsonl; one that a crash cut short is skipped."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            log.warning("%s: a line was cut short and is skipped", path)
    return found


def cards_of(pieces: list[dict[str, Any]]) -> dict[str, list[str]]:
    """By card: the jobs that were worked on with it, in order."""
    found: dict[str, dict[str, None]] = {}
    for line in pieces:
        found.setdefault(line["card"], {})[line["job"]] = None
    return {name: list(own) for name, own in found.items()}
