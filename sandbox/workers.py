"""The broker's side of oracle processes: starts them, hands them work, keeps the gate, replaces those that
die."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import sandbox
from sandbox.gate import Gate
from sandbox.jail.plan import Level
from sandbox.logs import LogFormat

log = logging.getLogger("sandbox.workers")
PATIENCE_S = 0.25
RESTART_PAUSE_S = 0.5
MAX_LINE_BYTES = 16 << 20
CLOSE_S = 5.0
CLEAR_S = 10.0
"""Jails die a moment after their oracle; until then one may still write into its directory."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What every oracle process is started with; each gets a directory of its own under `scratch`."""

    scratch: Path
    cache: Path
    threads: int
    isolation: Level = "strict"
    gpu: bool = False
    """It judges on GPUs, and so gets ready for that when it starts."""
    device_share: float = 1.0
    """Part of a GPU's memory that is one oracle's: those of a host use the same GPUs."""
    log_level: str = "WARNING"
    log_format: LogFormat = "text"


def make_directory(scratch: Path, prefix: str) -> Path:
    """A new directory that jails may pass through but not list. Raises OSError."""
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=scratch))
    directory.chmod(0o711)
    return directory


def remove_directory(directory: Path, timeout_s: float) -> bool:
    """Deletes a directory that dying processes may still write into; whether it is gone by the timeout."""
    deadline = time.monotonic() + timeout_s
    while directory.exists():
        shutil.rmtree(directory, ignore_errors=True)
        if time.monotonic() > deadline:
            return not directory.exists()
        time.sleep(0.05)
    return True


class Gates:
    """One gate a device, made on demand."""

    def __init__(self, shared_limit: int):
        self._shared_limit = shared_limit
        self._gates: dict[str, Gate] = {}

    @property
    def alone_s(self) -> dict[str, float]:
        """Seconds that each device has been someone's alone."""
        return {resource: gate.alone_s for resource, gate in self._gates.items()}

    def of(self, resource: str) -> Gate:
        if resource not in self._gates:
            self._gates[resource] = Gate(self._shared_limit, PATIENCE_S, time.monotonic)
        return self._gates[resource]


class Oracle(Protocol):
    """An oracle process wherever it runs, and its successors: one at a time."""

    async def start(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Starts a process; returns the connection that carries its lines. Raises OSError."""

    def kill(self) -> None:
        """Kills the process; everything under it dies with it."""

    async def ended(self) -> str:
        """Waits for the process to end, as it does when its connection closes; returns how it ended."""

    async def clear(self) -> None:
        """Deletes what the dead process and its jails have left on the disk; they had no chance to do so."""


def oracle_command(descriptor: int, directory: Path, settings: WorkerSettings) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of an oracle process that is a child of this process.

    Args:
      descriptor: of the stream socket that it inherits (see `sandbox.oracle.worker`).
      directory: its own.
      settings: see there; `scratch` is left out of account.
    """
    told = {
        "parent": os.getpid(),
        "scratch": str(directory),
        "cache": str(settings.cache),
        "threads": settings.threads,
        "isolation": settings.isolation,
        "gpu": settings.gpu,
        "device_share": settings.device_share,
        "log_level": settings.log_level,
        "log_format": settings.log_format,
    }
    root = str(Path(sandbox.__file__).resolve().parent.parent)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return [sys.executable, "-P", "-m", "sandbox.oracle.worker", str(descriptor), json.dumps(told)], environment


class LocalOracle:
    """An oracle process on this host; see `Oracle`. `number` is its worker's, for logs."""

    def __init__(self, number: int, settings: WorkerSettings):
        self._number, self._settings = number, settings
        self._process: asyncio.subprocess.Process | None = None
        self._directory: Path | None = None

    async def start(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self._directory = make_directory(self._settings.scratch, f"oracle-{self._number}-")
        ours, theirs = socket.socketpair()
        with theirs:
            command, environment = oracle_command(theirs.fileno(), self._directory, self._settings)
            self._process = await asyncio.create_subprocess_exec(
                *command,
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )
        return await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def ended(self) -> str:
        return f"exit status {await self._process.wait()}" if self._process else "never started"

    async def clear(self) -> None:
        directory, self._directory = self._directory, None
        if directory is not None and not await asyncio.to_thread(remove_directory, directory, CLEAR_S):
            log.warning("%s could not be deleted; it goes when the server stops", directory)


class Worker:
    """One oracle process and its successor when it dies.

    Args:
      number: its index, for logs.
      oracle: where the processes come from.
      gates: shared by all workers of a host.
      on_message: called with each "stage" and "result" message.
      on_free: called when the worker can take the next evaluation.
      on_lost: called with a text when the process died with an evaluation in hand.
    """

    def __init__(
        self,
        number: int,
        oracle: Oracle,
        gates: Gates,
        *,
        on_message: Callable[[Worker, dict], None],
        on_free: Callable[[Worker], None],
        on_lost: Callable[[Worker, str], None],
    ):
        self.number, self._oracle, self._gates = number, oracle, gates
        self._on_message, self._on_free, self._on_lost = on_message, on_free, on_lost
        self.ready = False
        self.job_id: str | None = None
        self.free_since_s = 0.0
        self.last_error = ""
        self.restarts = 0
        self._writer: asyncio.StreamWriter | None = None
        self._held: dict[int, str] = {}
        self._closing = False
        self._task = asyncio.create_task(self._live(), name=f"worker-{number}")

    def evaluate(self, job_id: str, job: dict[str, Any]) -> None:
        """Hands over an evaluation; the worker must be free."""
        assert self.ready and self.job_id is None
        self.job_id = job_id
        self._send({"op": "evaluate", "id": job_id, **job})

    def cancel(self) -> None:
        """Asks the worker to break off what it does; its answer is a result of None."""
        if self.job_id is not None:
            self._send({"op": "cancel", "id": self.job_id})

    def kill(self) -> None:
        """Kills the process; everything under it dies with it."""
        self._oracle.kill()

    async def close(self) -> None:
        """Ends the process and waits for it."""
        self._closing = True
        if self._writer is not None:
            self._writer.close()
        try:
            await asyncio.wait_for(self._oracle.ended(), CLOSE_S)
        except TimeoutError:
            self.kill()
            await self._oracle.ended()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _live(self) -> None:
        while not self._closing:
            started = time.monotonic()
            try:
                await self._run_once()
            except OSError as error:
                self.last_error = f"an oracle process could not be started: {error}"
            for ticket in list(self._held):
                self._release(ticket)
            was_ready, self.ready, self._writer = self.ready, False, None
            if self._closing:
                return
            log.error("%s; starting another", self.last_error)
            self.restarts += 1
            if self.job_id is not None:
                self._on_lost(self, self.last_error)
            await self._oracle.clear()
            if not was_ready or time.monotonic() - started < RESTART_PAUSE_S:
                await asyncio.sleep(min(RESTART_PAUSE_S * self.restarts, 10.0))

    async def _run_once(self) -> None:
        reader, self._writer = await self._oracle.start()
        try:
            while line := await reader.readline():
                self._handle(json.loads(line))
        except (OSError, ValueError) as error:
            self.last_error = f"oracle process {self.number}: {error}"
            self.kill()
        self._writer.close()
        how = await self._oracle.ended()
        self.last_error = self.last_error or f"oracle process {self.number} ended ({how})"

    def _handle(self, message: dict[str, Any]) -> None:
        kind = message["op"]
        if kind == "ready":
            self.ready, self.last_error = True, ""
            self._on_free(self)
        elif kind == "lost":
            self.last_error = message["error"]
        elif kind == "acquire":
            ticket = message["ticket"]
            self._held[ticket] = message["resource"]
            self._gates.of(message["resource"]).acquire(
                (self.number, ticket),
                exclusive=message["exclusive"],
                finishing=message["finishing"],
                grant=lambda: self._send({"op": "granted", "ticket": ticket}),
            )
        elif kind == "release":
            self._release(message["ticket"])
        elif kind == "stage":
            self._on_message(self, message)
        elif kind == "result":
            self._on_message(self, message)
            self.job_id, self.free_since_s = None, time.monotonic()
            self._on_free(self)

    def _release(self, ticket: int) -> None:
        resource = self._held.pop(ticket, None)
        if resource is not None:
            self._gates.of(resource).release((self.number, ticket))

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")
