"""The broker's side of a fleet: lets the workers of nodes join and leave, and keeps the process that speaks to Ray alive."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sandbox
from sandbox.fleet import FleetError
from sandbox.fleet.crew import Node
from sandbox.fleet.listener import Connection, Listener
from sandbox.fleet.offer import Served, merge
from sandbox.fleet.survey import Survey, Wishes
from sandbox.jail.probe import Isolation
from sandbox.logs import fields
from sandbox.scheduler import Scheduler
from sandbox.workers import MAX_LINE_BYTES, Gates, Worker

log = logging.getLogger("sandbox.fleet")
ATTACH_S = 45.0
"""So long the cluster may take to be attached to."""
SETTLE_S = 90.0
"""So long its nodes may take to say what they offer; longer than `sandbox.fleet.driver.START_S`."""
START_S = 75.0
"""So long a node may take from being asked for an oracle until that connects; longer than `sandbox.fleet.driver.START_S`."""
END_S = 12.0
PAUSE_S = 5.0
"""Between two tries to attach to the cluster."""


@dataclass(eq=False)
class _Member:
    """A node in service."""

    node: Node
    workers: list[Worker] = field(default_factory=list)


class Fleet:
    """All nodes of a Ray cluster, as a source of oracles for a scheduler.

    `attach` comes first, `start` with an event loop after it.

    Args:
      address: of the cluster: "auto", or HOST:PORT of its head.
      wishes: what each node is asked for.
      max_queue: the broker's.
    """

    def __init__(self, address: str, wishes: Wishes, max_queue: int):
        self._address, self._wishes, self._max_queue = address, wishes, max_queue
        self._process: subprocess.Popen | None = None
        self._socket: socket.socket | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener = Listener(MAX_LINE_BYTES)
        self._host, self._broker = "", ("", 0)
        self._early: list[dict[str, Any]] = []
        self._scheduler: Scheduler | None = None
        self._members: dict[str, _Member] = {}
        self._refused: dict[str, str] = {}
        self._starting: dict[str, asyncio.Future[Connection]] = {}
        self._served: dict[str, Served] = {}
        self._seen: list[Served] = []
        self._slots = 0
        self._nice: set[str] = set()
        self._error = ""
        self._silent = False
        self._task: asyncio.Task | None = None
        self._tasks: set[asyncio.Task] = set()

    def attach(self) -> None:
        """Attaches to the cluster and waits until its nodes have said what they offer.

        Raises:
          FleetError: Ray is not installed, there is no cluster, or none of its nodes can serve.
        """
        check_address(self._address)
        if importlib.util.find_spec("ray") is None:
            raise FleetError("--fleet=ray needs Ray, which is not installed: pip install 'kernel-sandbox[fleet]' (or pip install ray)")
        self._launch()
        self._socket.settimeout(ATTACH_S)
        try:
            while (message := _line(self._socket))["op"] != "settled":
                self._early.append(message)
                self._note(message)
                if message["op"] == "failed":
                    raise FleetError(message["error"])
                self._socket.settimeout(SETTLE_S)
        except TimeoutError:
            self._process.kill()  # nothing of it runs on a node yet
            raise FleetError(
                f"what answers at {self._address} does not say within {self._socket.gettimeout():g} s that it is a Ray cluster, or which nodes "
                "it has: --fleet-address is where the head listens, as `ray start --head` prints it (port 6379 if not told otherwise)"
            ) from None
        except (OSError, EOFError):
            raise FleetError(f"Ray's driver has ended before it was attached to the cluster at {self._address}; see above") from None
        self._socket.settimeout(None)
        if not self._served:
            reasons = "; ".join(self._refused.values()) or "none has said in time what it offers"
            raise FleetError(f"no node of the Ray cluster at {self._address} can serve: {reasons}")
        for reason in self._refused.values():
            log.warning("%s", reason)

    @property
    def offer(self) -> Served:
        """What the nodes in service can judge; those that have left count for languages and devices. Raises IndexError before `attach`."""
        return merge(list(self._served.values()) or self._seen[-1:], self._seen, self._max_queue)

    @property
    def problem(self) -> str:
        """What is amiss; "" if nothing is."""
        if self._error:
            return f"{self._error}; evaluations wait"
        if self._silent:
            return f"the Ray cluster at {self._address} does not answer; nodes that come or go are not noticed, and evaluations wait if all have gone"
        if not self._members:
            reasons = "".join(f"; {reason}" for reason in self._refused.values())
            return f"no node of the Ray cluster is in service, evaluations wait{reasons}"
        return "; ".join(self._refused.values())

    async def start(self, scheduler: Scheduler) -> None:
        """Begins to let workers join and leave. Raises OSError."""
        self._scheduler = scheduler
        await self._connect(self._early)
        self._task = asyncio.create_task(self._live(), name="fleet")

    async def close(self) -> None:
        """Ends all oracles and the driver; the workers have been closed."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._listener.close()
        if self._writer is not None:
            self._writer.close()
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """Ends the driver, and with it all actors."""
        process, self._process = self._process, None
        if process is None:
            return
        if self._socket is not None:
            self._socket.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    # ------------------------------------------------------------ the driver

    def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        settings = {"address": self._address, "wishes": self._wishes.model_dump()}
        root = str(Path(sandbox.__file__).resolve().parent.parent)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
        command = [sys.executable, "-P", "-m", "sandbox.fleet.driver", str(theirs.fileno()), json.dumps(settings)]
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # where Ray tells of its own
                start_new_session=True,
                env=environment,
            )
        self._socket = ours

    async def _connect(self, early: list[dict[str, Any]]) -> None:
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=MAX_LINE_BYTES)
        self._socket = None  # the writer's now
        for message in early:
            await self._handle(message)

    async def _live(self) -> None:
        """Heeds the driver, and starts another when it has ended, until there is a cluster again."""
        said = ""
        while True:
            try:
                while line := await self._reader.readline():
                    await self._handle(json.loads(line))
            except Exception:
                log.exception("Ray's driver is not understood")
            self._error = self._error or f"the Ray cluster at {self._address} has gone"
            if self._error != said:
                said = self._error
                log.error("%s; looking for it every few seconds", said)
            for node_id in list(self._members):
                self._lose(node_id, self._error)
            self._refused.clear()
            self._writer.close()
            await asyncio.to_thread(self.end)
            await asyncio.sleep(PAUSE_S)
            self._launch()
            await self._connect([])

    def _say(self, **message: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _handle(self, message: dict[str, Any]) -> None:
        self._note(message)
        match message["op"]:
            case "hello" if message["host"] != self._host:
                await self._listener.close()
                self._host, self._broker = message["host"], await self._listener.open(message["host"])
            case "node":
                self._join(message["id"], message["name"], message["gpus"], Survey.model_validate(message["survey"]))
            case "gone" if message["id"] in self._members:
                self._lose(message["id"], f"node {self._members[message['id']].node.name} has gone")
            case "trouble":
                arrival = self._starting.get(message["slot"])
                if arrival is not None and not arrival.done():
                    arrival.set_exception(OSError(message["error"]))
            case "niceness" if message["niceness"] > 0:
                self._warn_nice(message["slot"].rpartition(".")[0], message["niceness"])

    def _note(self, message: dict[str, Any]) -> None:
        """Keeps what a message says of nodes."""
        match message["op"]:
            case "hello":
                self._error, self._silent = "", False
            case "silent" | "answers":
                self._silent = message["op"] == "silent"
            case "failed":
                self._error = message["error"]
            case "node":
                found = Survey.model_validate(message["survey"])
                self._refused.pop(message["id"], None)
                self._served[message["id"]] = Served(
                    capabilities=found.capabilities, isolation=Isolation(name=found.level, features=found.features, missing=found.missing)
                )
            case "refused":
                self._refused[message["id"]] = f"node {message['name']} is not in service: {message['error']}"
            case "gone":
                self._refused.pop(message["id"], None)
                self._forget(message["id"])

    # ------------------------------------------------------------ nodes

    def _join(self, node_id: str, name: str, gpus: float, found: Survey) -> None:
        node = Node(name=name, gates=Gates(shared_limit=max(1, found.cores)), offers=found.capabilities)
        member = self._members[node_id] = _Member(node)
        served_gpus = sum(device != "cpu" for device in found.capabilities.devices)
        share = gpu_share(min(int(gpus), served_gpus), found.workers)
        for _ in range(found.workers):
            self._slots += 1
            slot = f"{name}.{self._slots}"
            start = {"op": "start", "slot": slot, "node": node_id, "gpus": share, "settings": found.settings}
            member.workers.append(self._scheduler.join(node, _RemoteOracle(self, name, start)))
        log.info("a node is in service", extra=fields(node=name, oracles=found.workers, devices=",".join(found.capabilities.devices)))

    def _lose(self, node_id: str, why: str) -> None:
        """Takes a node out of service. What its oracles still say is not heard: their connections are broken off."""
        member = self._members.pop(node_id)
        self._forget(node_id)
        log.warning("%s: what it had in hand is judged elsewhere", why, extra=fields(node=member.node.name))
        self._scheduler.metrics.add("sandbox_nodes_lost_total")
        self._scheduler.leave(member.workers, why)
        for worker in member.workers:
            worker.kill()
            self._spawn(worker.close())

    def _warn_nice(self, name: str, niceness: int) -> None:
        if name not in self._nice:
            self._nice.add(name)
            text = "oracles run at niceness %d there, and whatever else runs disturbs what they time: start Ray with RAY_worker_niceness=0"
            log.warning(text, niceness, extra=fields(node=name))

    def _forget(self, node_id: str) -> None:
        served = self._served.pop(node_id, None)
        if served is not None and served not in self._seen:
            self._seen.append(served)

    # ------------------------------------------------------------ oracles

    async def start_oracle(self, start: dict[str, Any]) -> Connection:
        """Has an oracle started on a node; returns its connection. What it writes on standard error comes out here too. Raises OSError."""
        (token, arrival), (log_token, errors) = self._listener.expect(), self._listener.expect()
        self._starting[start["slot"]] = arrival
        self._say(**start, tokens=(token, log_token), broker=self._broker)
        try:
            connection = await asyncio.wait_for(arrival, START_S)
        except BaseException as error:
            errors.cancel()
            if isinstance(error, TimeoutError):
                raise OSError(f"it has not connected within {START_S:g} s") from None
            raise
        finally:
            self._starting.pop(start["slot"], None)
        self._spawn(self._repeat(errors, start["slot"].rpartition(".")[0]))
        return connection

    def kill_oracle(self, slot: str) -> None:
        """Ends an oracle's actor, and so the oracle."""
        self._say(op="kill", slot=slot)


    async def _repeat(self, errors: asyncio.Future[Connection], node: str) -> None:
        """Writes what an oracle says on standard error to this process's, with the name of its node."""
        try:
            reader, writer = await asyncio.wait_for(errors, START_S)
        except TimeoutError:
            return
        try:
            while line := await reader.readline():
                sys.stderr.write(_signed(line.decode(errors="replace"), node))
                sys.stderr.flush()
        except (OSError, ValueError) as error:
            log.info("what an oracle logs is not heard any more: %s", error, extra=fields(node=node))
        finally:
            writer.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _RemoteOracle:
    """Oracle processes of one slot of a node, one after the other; see `sandbox.workers.Oracle`."""

    def __init__(self, fleet: Fleet, node: str, start: dict[str, Any]):
        self._fleet, self._node, self._start = fleet, node, start
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> Connection:
        try:
            reader, self._writer = await self._fleet.start_oracle(self._start)
        except OSError as error:
            raise OSError(f"on node {self._node}: {error}") from error
        return reader, self._writer

    def kill(self) -> None:
        self._fleet.kill_oracle(self._start["slot"])
        if self._writer is not None:
            self._writer.transport.abort()

    async def ended(self) -> str:
        """Its end is not waited for: nothing it says is heard any more, and its node sees to it."""
        return f"its connection to node {self._node} is closed"

    async def clear(self) -> None:
        """Its node does that."""


def _signed(line: str, node: str) -> str:
    """A line of a log, as text or JSON, with the name of a node."""
    try:
        return json.dumps({**json.loads(line), "node": node}) + "\n"
    except (ValueError, TypeError):
        return f"{line.rstrip()} node={node}\n" if line.strip() else line


def gpu_share(gpus: int, workers: int) -> float:
    """GPUs, in Ray's account, of each of a node's workers, so that together they hold as many as they can.

    Ray lends whole GPUs, or a part of one GPU, in units of 1/10000.
    """
    if gpus == 0:
        return 0.0
    if workers <= gpus:
        return float(gpus // workers)
    return 10_000 // -(-workers // gpus) / 10_000


def check_address(address: str) -> None:
    """Raises FleetError for what is not "auto" or HOST:PORT."""
    if address != "auto" and not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}", address):
        raise FleetError(
            f"--fleet-address {address!r}: use auto or HOST:PORT of the cluster's head. The broker runs on a node of the cluster, so Ray's "
            "client (ray://) cannot be used"
        )


def _line(connection: socket.socket) -> dict[str, Any]:
    """One message, and nothing of what follows it. Raises EOFError, OSError."""
    parts = []
    while True:
        seen = connection.recv(1 << 20, socket.MSG_PEEK)
        if not seen:
            raise EOFError
        end = seen.find(b"\n") + 1
        parts.append(connection.recv(end or len(seen)))
        if end:
            return json.loads(b"".join(parts))
