"""An oracle process: takes evaluations from the broker one at a time, judges them, sends verdicts back.

Started by `sandbox.workers` as `python -m sandbox.oracle.worker FD SETTINGS`; FD is a stream socket that
carries one JSON object a line, SETTINGS is JSON. From the broker: {"op": "evaluate" | "cancel" | "granted"};
to it: {"op": "ready" | "stage" | "acquire" | "release" | "result" | "lost"}.
"""

from __future__ import annotations

import json
import logging
import select
import signal
import socket
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sandbox.build.artifacts import ArtifactStore
from sandbox.jail.faults import ZygoteLost
from sandbox.jail.limits import die_with_parent
from sandbox.logs import configure
from sandbox.oracle.draft import Job
from sandbox.oracle.evaluate import Gate, Judge
from sandbox.oracle.failures import Cancelled
from sandbox.protocol import Candidate, Options, Stage, TaskSpec

log = logging.getLogger("sandbox.oracle")


class BrokerLink:
    """Lines of JSON to and from the broker. The broker's end closing ends this process."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self._buffer = b""
        self._kept: deque[dict[str, Any]] = deque()
        self.current: str | None = None

    def send(self, message: dict[str, Any]) -> None:
        """Raises SystemExit when the broker has gone."""
        try:
            self.sock.sendall(json.dumps(message).encode() + b"\n")
        except ConnectionError:
            raise SystemExit(0) from None

    def receive(self) -> dict[str, Any]:
        """Blocks for one message. Raises SystemExit when the broker has gone."""
        return self._kept.popleft() if self._kept else self._read()

    def _read(self) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            try:
                data = self.sock.recv(1 << 20)
            except ConnectionError:
                data = b""
            if not data:
                raise SystemExit(0)
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def waiting(self) -> bool:
        """Whether the broker has said something that was not received yet."""
        return bool(self._kept) or b"\n" in self._buffer or bool(select.select([self.sock], [], [], 0)[0])

    def interrupt(self) -> None:
        """Called when the broker speaks while something is going on. Raises Cancelled if it wants the evaluation to end."""
        self._consider(self._read())
        self._hear_out()

    def _hear_out(self) -> None:
        """Considers what has been read from the socket already: nothing will say that there is something to read."""
        while b"\n" in self._buffer:
            self._consider(self._read())

    def await_grant(self, ticket: int) -> None:
        """Waits for the gate. Raises Cancelled."""
        while True:
            message = self._read()
            if message["op"] == "granted" and message["ticket"] == ticket:
                return self._hear_out()
            self._consider(message)

    def _consider(self, message: dict[str, Any]) -> None:
        """Acts on what has to do with the evaluation that goes on, and keeps what is said of later ones."""
        if message["op"] == "cancel" and message["id"] == self.current:
            raise Cancelled
        if message["op"] in ("evaluate", "cancel"):
            self._kept.append(message)

    def withdrawn(self, job_id: str) -> bool:
        """Whether the broker has already cancelled an evaluation that it has handed over. Raises Cancelled if that is the current
        one."""
        self._hear_out()
        return any(message["op"] == "cancel" and message["id"] == job_id for message in self._kept)


class BrokerGate(Gate):
    """Asks the broker for access; see `sandbox.gate` for who gets it when."""

    def __init__(self, link: BrokerLink):
        self._link = link
        self._ticket = 0

    @contextmanager
    def _held(self, resource: str, *, exclusive: bool = False, finishing: bool = False) -> Iterator[None]:
        self._ticket += 1
        ticket = self._ticket
        asked = {"resource": resource, "exclusive": exclusive, "finishing": finishing}
        self._link.send({"op": "acquire", "ticket": ticket, **asked})
        try:
            self._link.await_grant(ticket)
            yield
        finally:
            # Also withdraws a request that was not granted yet.
            self._link.send({"op": "release", "ticket": ticket})

    def shared(self, resource: str, finishing: bool = False):
        return self._held(resource, finishing=finishing)

    def exclusive(self, resource: str):
        return self._held(resource, exclusive=True)


def main(arguments: list[str]) -> None:
    """Serves the broker until it closes the connection."""
    settings = json.loads(arguments[1])
    die_with_parent(settings["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Comparisons must not leave threads behind that disturb the next measurement.
    torch.set_num_threads(1)
    link = BrokerLink(socket.socket(fileno=int(arguments[0])))
    configure(settings["log_level"], settings["log_format"], lambda: {"evaluation": link.current})
    judge = Judge(
        scratch=Path(settings["scratch"]),
        store=ArtifactStore(Path(settings["cache"])),
        threads=settings["threads"],
        isolation=settings["isolation"],
        gate=BrokerGate(link),
        interrupt=(link.sock.fileno(), link.interrupt),
        on_stage=lambda job_id, stage: _send_stage(link, job_id, stage),
        device_share=settings.get("device_share", 1.0),
    )
    try:
        judge.start(gpu=settings.get("gpu", False))
        link.send({"op": "ready"})
        while True:
            message = link.receive()
            if message["op"] == "evaluate":
                _evaluate(link, judge, message)
    except ZygoteLost as error:
        log.error("%s", error)
        link.send({"op": "lost", "error": str(error)})
    finally:
        judge.close()


def _evaluate(link: BrokerLink, judge: Judge, message: dict[str, Any]) -> None:
    job = Job(
        id=message["id"],
        task=TaskSpec.model_validate(message["task"]),
        candidate=Candidate.model_validate(message["candidate"]),
        options=Options.model_validate(message["options"]),
    )
    link.current = job.id
    try:
        result = None if link.withdrawn(job.id) else judge.evaluate(job).model_dump()
    except Cancelled:
        result = None
    finally:
        link.current = None
    link.send({"op": "result", "id": job.id, "result": result})
    judge.prepare(job)
    if not link.waiting():
        judge.settle()


def _send_stage(link: BrokerLink, job_id: str, stage: Stage) -> None:
    link.send({"op": "stage", "id": job_id, "stage": stage})


if __name__ == "__main__":
    main(sys.argv[1:])
