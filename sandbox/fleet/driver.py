"""Ray's driver: watches the cluster's nodes, and starts and ends the actors that hold oracles, as the broker says.

Started by `sandbox.fleet.fleet` as `python -m sandbox.fleet.driver FD SETTINGS`; FD is a stream socket that carries one JSON object a line,
SETTINGS is JSON. To the broker:

    hello     {host}                          attached to the cluster; this host's address in it
    node      {id, name, gpus, survey}        a node can serve
    refused   {id, name, error}               a node cannot, and why; it is looked at again from time to time
    gone      {id}                            a node of either kind is alive no more
    silent    {}                              Ray does not say which nodes are alive
    answers   {}                              it does again
    settled   {}                              all nodes that were there at first have been named, or take long
    failed    {error}                         no cluster, or not any more; the process ends
    trouble   {slot, error}                   an oracle could not be started
    niceness  {slot, niceness}                at which one was

From it: start {slot, node, gpus, broker, tokens, settings}; kill {slot}. When the connection closes, everything is ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import sys
from collections import defaultdict
from contextlib import suppress
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sandbox.fleet.slot import Slot
from sandbox.fleet.survey import LOOK_S, Wishes, code_digest, look
from sandbox.logs import configure

log = logging.getLogger("sandbox.fleet")
POLL_S = 2.0
SILENT_S = 5.0
"""So long it may take to say which nodes are alive."""
LOOK_AGAIN_S = 30.0
"""A node that cannot serve is looked at again after so long."""
START_S = 60.0
REACH_S = 5.0
END_S = 8.0


class ClusterError(RuntimeError):
    """No cluster can be attached to; the text says why and what to do."""


def attach(address: str) -> None:
    """Attaches this process to a running cluster; starts none.

    Args:
      address: "auto", or HOST:PORT of its head.

    Raises:
      ClusterError.
    """
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
        except (OSError, ValueError, OverflowError) as error:
            raise ClusterError(f"no Ray cluster answers at {address}: {error}; `ray start --head` prints where its head listens") from error
    try:
        ray.init(address=address, configure_logging=False, log_to_driver=False, logging_level=logging.WARNING)
    except Exception as error:  # Ray raises what its layers do: ConnectionError, RuntimeError, ValueError, its own
        hint = "start one with `ray start --head`, or name its head with --fleet-address HOST:PORT; this host must be one of its nodes"
        raise ClusterError(f"no Ray cluster can be attached to at {address} ({_first_line(error)}): {hint}") from error


class Driver:
    """The broker's hands in the cluster. Calls of Ray that wait for the cluster's head are made on other threads than the event loop's.

    Args:
      writer: to the broker.
      wishes: for every node.
    """

    def __init__(self, writer: asyncio.StreamWriter, wishes: Wishes):
        self._writer, self._wishes = writer, wishes
        self._look, self._here = ray.remote(look), ray.get_runtime_context().get_node_id()
        self._alive: set[str] = set()
        self._silent = False
        self._looking: dict[str, asyncio.Task] = {}
        self._named: dict[str, asyncio.Event] = {}
        self._actors: dict[str, Any] = {}
        self._making: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: set[asyncio.Task] = set()

    def say(self, op: str, **fields: Any) -> None:
        self._writer.write(json.dumps({"op": op, **fields}).encode() + b"\n")

    async def settle(self) -> None:
        """Names all nodes that there are."""
        nodes = await asyncio.to_thread(ray.nodes)
        self.say("hello", host=next(node["NodeManagerAddress"] for node in nodes if node["NodeID"] == self._here))
        self._compare(nodes)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(named.wait() for named in self._named.values())), START_S)
        self.say("settled")

    async def watch(self) -> None:
        """Names nodes as they come and go, for ever. Ray ends this process when the cluster's head has not answered for a minute.

        Raises:
          ClusterError: the node that this process is attached to has gone, and with it, in Ray's eyes, all that this process has started.
        """
        while True:
            await asyncio.sleep(POLL_S)
            asking = asyncio.create_task(asyncio.to_thread(ray.nodes))
            await asyncio.wait([asking], timeout=SILENT_S)
            if not asking.done():
                self._silent = True
                self.say("silent")
            self._compare(await asking)
            if self._silent:
                self._silent = False
                self.say("answers")

    async def obey(self, reader: asyncio.StreamReader) -> None:
        """Does what the broker says until it closes the connection."""
        while line := await reader.readline():
            message = json.loads(line)
            if message["op"] == "start":
                self._spawn(self._start(message))
            elif message["op"] == "kill":
                self._spawn(self._kill(message["slot"]))

    async def end(self) -> None:
        """Ends all oracles and waits a moment for them, if the cluster is still there."""
        if self._silent:
            return
        stops = [asyncio.wrap_future(actor.stop.remote().future()) for actor in self._actors.values()]
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*stops, return_exceptions=True), END_S)
        for actor in self._actors.values():
            ray.kill(actor)

    def _compare(self, nodes: list[dict[str, Any]]) -> None:
        alive = {node["NodeID"]: node for node in nodes if node["Alive"]}
        if self._here not in alive:
            raise ClusterError("the Ray node of the broker's own host has gone: start it again with `ray start --address=HEAD:PORT`")
        for node_id in self._alive - set(alive):
            self._looking.pop(node_id).cancel()
            del self._named[node_id]
            self.say("gone", id=node_id)
        for node_id in set(alive) - self._alive:
            self._named[node_id] = asyncio.Event()
            self._looking[node_id] = asyncio.create_task(self._introduce(alive[node_id]))
        self._alive = set(alive)

    async def _introduce(self, node: dict[str, Any]) -> None:
        """Looks at a node until it can serve."""
        known, named = {"id": node["NodeID"], "name": _name(node)}, self._named[node["NodeID"]]
        while True:
            answer = await self._ask(node["NodeID"])
            if "error" not in answer:
                self.say("node", **known, gpus=node["Resources"].get("GPU", 0.0), survey=answer)
                named.set()
                return
            self.say("refused", **known, error=answer["error"])
            named.set()
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _ask(self, node_id: str) -> dict[str, Any]:
        wishes = self._wishes.model_copy(update={"code": await asyncio.to_thread(code_digest)}).model_dump_json()
        try:
            look_there = self._look.options(num_cpus=0, max_retries=0, scheduling_strategy=_pinned(node_id))
            answer = await asyncio.to_thread(look_there.remote, wishes)
            return json.loads(await asyncio.wait_for(asyncio.wrap_future(answer.future()), LOOK_S + START_S))
        except TimeoutError:
            return {"error": "it does not say what it offers"}
        except Exception as error:  # of Ray, or of importing the sandbox there
            text = _last_line(error)
            hint = " (install the sandbox on every node, at the same version)" if "No module named" in text else ""
            return {"error": f"what it offers cannot be found out: {text}{hint}"}

    async def _start(self, message: dict[str, Any]) -> None:
        slot = message["slot"]
        try:
            async with self._making[slot]:
                actor = self._actors.get(slot) or await asyncio.to_thread(_make, message["node"], message["gpus"])
                self._actors[slot] = actor
            started = actor.start.remote(tuple(message["broker"]), message["tokens"], message["settings"])
            niceness = await asyncio.wait_for(asyncio.wrap_future(started.future()), START_S)
            self.say("niceness", slot=slot, niceness=niceness)
        except TimeoutError:
            held = " (are its GPUs held by other work of the cluster?)" if message["gpus"] else ""
            self.say("trouble", slot=slot, error=f"Ray has started no actor within {START_S:g} s{held}")
            await self._kill(slot)
        except Exception as error:  # of Ray, or what the actor raised
            self.say("trouble", slot=slot, error=_last_line(error))
            await self._kill(slot)

    async def _kill(self, slot: str) -> None:
        async with self._making[slot]:
            actor = self._actors.pop(slot, None)
        if actor is not None:
            await asyncio.to_thread(ray.kill, actor)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _make(node_id: str, gpus: float) -> Any:
    """An actor on a node."""
    options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": _pinned(node_id)}
    if gpus:
        # The oracle numbers GPUs as the driver does and shares them with its neighbours: all must stay visible.
        options |= {"num_gpus": gpus, "runtime_env": {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}}
    return ray.remote(Slot).options(**options).remote()


def _pinned(node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def _name(node: dict[str, Any]) -> str:
    """Host and the beginning of Ray's id: several nodes may be on one host, and a host may come back as another node."""
    host = node.get("NodeManagerHostname") or node.get("NodeManagerAddress") or "node"
    return re.sub(r"[^\w.-]", "_", host) + "-" + node["NodeID"][:8]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:500]


def _last_line(error: BaseException) -> str:
    """Of an error on a node, whose text is a traceback that ends with what was raised."""
    return next(iter(reversed(str(error).strip().splitlines())), type(error).__name__)[-500:]


async def _serve(connection: socket.socket, settings: dict[str, Any]) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    driver = Driver(writer, Wishes.model_validate(settings["wishes"]))
    await driver.settle()
    obeying = asyncio.create_task(driver.obey(reader))
    watching = asyncio.create_task(driver.watch())
    await asyncio.wait([obeying, watching], return_when=asyncio.FIRST_COMPLETED)
    signal.alarm(int(END_S) + 2)  # whatever Ray still waits for then
    if watching.done():  # with an error, as it never ends otherwise
        driver.say("failed", error=_last_line(watching.exception()))
        await writer.drain()
    else:
        await driver.end()


async def _main(connection: socket.socket, settings: dict[str, Any]) -> None:
    try:
        await _serve(connection, settings)
    except ConnectionError as error:
        log.info("the broker has gone: %s", error)
    except Exception:
        log.exception("Ray's driver fails")
    finally:
        os._exit(0)  # not waiting for threads in which Ray waits for a cluster that has gone


def main(arguments: list[str]) -> None:
    """Serves the broker until it closes the connection, or the cluster is gone."""
    settings = json.loads(arguments[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure(settings["wishes"]["log_level"], settings["wishes"]["log_format"])
    connection = socket.socket(fileno=int(arguments[0]))
    try:
        attach(settings["address"])
    except ClusterError as error:
        connection.sendall(json.dumps({"op": "failed", "error": str(error)}).encode() + b"\n")
        return
    asyncio.run(_main(connection, settings))


if __name__ == "__main__":
    main(sys.argv[1:])
