"""A jailed process as the oracle holds it: its end, its output, its private directory and, of a runner, the conversation.

`sandbox.jail.spawn.Zygote` makes them and does the waiting.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from sandbox.jail import bulk
from sandbox.jail.capture import Capture
from sandbox.jail.faults import Exit, JailDied, JailMemory, JailReply, JailTimeout
from sandbox.jail.frames import Channel, ChannelClosed, FrameError, Message

if TYPE_CHECKING:
    from sandbox.jail.carrier import HostCarrier
    from sandbox.jail.spawn import Zygote
    from sandbox.oracle.turns import Turns

MAX_REQUESTS_AN_ORDER = 64
"""Beyond any use: who sends more, ahead of the answers, only means to keep the oracle busy."""


class Process:
    """A jailed process: `exit` is None while it runs. Use as a context manager: leaving kills it and its
    files.

    `pid` is that of its supervisor: `sandbox.jail.processes.members` gives all processes of the jail.
    """

    def __init__(self, zygote: Zygote, pid: int, capture: Capture, directory: Path, memory_bytes: int):
        self.zygote, self.pid, self.capture, self.directory = zygote, pid, capture, directory
        self.memory_bytes = memory_bytes
        self.watch: Callable[[int], str | None] | None = None
        """Asked now and then, with `pid`, whether the jail uses too much of something else; a text ends
        it."""
        self.exit: Exit | None = None
        self.next_watch = 0.0
        """When the zygote looks at its memory next."""

    def wait(self, timeout_s: float) -> Exit:
        """Waits for the end. Raises JailTimeout or JailMemory after killing it."""
        self.zygote.wait_for(self, time.monotonic() + timeout_s)
        self.capture.drain()
        assert self.exit is not None
        if self.exit.out_of_memory:
            raise self._memory_ran_out()
        return self.exit

    def _memory_ran_out(self) -> JailMemory:
        return JailMemory(f"used more than the {self.memory_bytes >> 20} MiB that are allowed")

    def kill(self) -> None:
        """Kills the process and all that descends from it, and waits until they are gone."""
        self.zygote.kill(self)

    def close(self) -> None:
        """Kills what still runs and deletes the private directory."""
        try:
            self.kill()
        finally:
            self.capture.close()
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Runner(Process):
    """A process that runs `sandbox.jail.runner`, with its channel."""

    def __init__(self, sock: socket.socket, nonce: str, **process):
        super().__init__(**process)
        self._deadline = 0.0
        self.serve: Callable[[dict], tuple[dict, list[int]]] | None = None
        """Answers what the runner asks for in the middle of an order, with descriptors that are closed once
        sent."""
        self.excuse: Callable[[int], str | None] | None = None
        """Asked, with `pid`, when the jail ran out of memory; a text says why that was not its doing."""
        self.carrier: HostCarrier = _host_carrier()
        """How tensors get in and out."""
        self.turns: Turns | None = None
        """Access to the device, taken for each order; None where it is held for longer."""
        self._channel = Channel(sock, nonce, wait=self._wait, max_bulk_bytes=bulk.UNBOUNDED)

    def _wait(self, sock: socket.socket, writing: bool) -> None:
        self.zygote.wait_for(self, self._deadline, sock=sock, writing=writing)

    def call(
        self,
        command: str,
        timeout_s: float,
        buffers: Sequence[memoryview] = (),
        reply_bytes: int = 1 << 20,
        fds: Sequence[int] = (),
        meanwhile: Callable[[Channel], None] | None = None,
        **order,
    ) -> Message:
        """Sends one order, with copies of descriptors `fds`, and returns the reply; `meanwhile` is what both sides say to each
        other before it comes.

        Raises:
          JailReply: the runner reports an error. JailTimeout, JailMemory, JailDied: it is gone now.
        """
        with self.turns.of(command) if self.turns else nullcontext():
            return self._converse({"command": command, **order}, timeout_s, buffers, reply_bytes, fds, meanwhile)

    def _converse(
        self,
        order: dict,
        timeout_s: float,
        buffers: Sequence[memoryview],
        reply_bytes: int,
        fds: Sequence[int],
        meanwhile: Callable[[Channel], None] | None,
    ) -> Message:
        self._deadline = time.monotonic() + timeout_s
        try:
            self._channel.send(order, buffers, fds)
            if meanwhile is not None:
                meanwhile(self._channel)
        except (ChannelClosed, FrameError) as error:
            raise self._post_mortem(error) from error
        return self._reply(reply_bytes)

    def begin(self, command: str, timeout_s: float, **order) -> None:
        """Sends an order that takes no turn on the device; `collect` gets the reply, and no other order may come before.

        Raises:
          As `call`, but for JailReply.
        """
        self._deadline = time.monotonic() + timeout_s
        try:
            self._channel.send({"command": command, **order})
        except (ChannelClosed, FrameError) as error:
            raise self._post_mortem(error) from error

    def collect(self, timeout_s: float) -> Message:
        """The reply to the order that was begun. Raises as `call`."""
        self._deadline = time.monotonic() + timeout_s
        return self._reply(1 << 20)

    def _reply(self, reply_bytes: int) -> Message:
        """What comes back, once all that is asked for meanwhile has been answered."""
        try:
            message = self._channel.receive(reply_bytes)
            requests = 0
            while "request" in message.header:
                requests += 1
                if requests > MAX_REQUESTS_AN_ORDER:
                    raise FrameError(f"more than {MAX_REQUESTS_AN_ORDER} requests within one order")
                self._answer(message.header)
                message = self._channel.receive(reply_bytes)
        except (ChannelClosed, FrameError) as error:
            raise self._post_mortem(error) from error
        failure = message.header.get("error")
        if failure is not None:
            if not isinstance(failure, dict):
                failure = {}
            raise JailReply(str(failure.get("kind"))[:40], str(failure.get("message"))[:8000])
        return message

    def _answer(self, request: dict) -> None:
        """Serves a request; the time that takes is not the order's."""
        started = time.monotonic()
        nobody = {"error": "nothing is built for this process"}, []
        with self.turns.left() if self.turns else nullcontext():
            answer, files = self.serve(request) if self.serve else nobody
        self._deadline += time.monotonic() - started
        try:
            self._channel.send(answer, fds=files)
        finally:
            for fd in files:
                os.close(fd)

    def _post_mortem(self, error: Exception) -> JailDied | JailMemory:
        """Whoever closes its channel or garbles it has failed, whether or not the process still runs."""
        own_end = True
        try:
            self.zygote.wait_for(self, time.monotonic() + 1.0)
        except JailTimeout:
            own_end = False
        self.capture.drain()
        assert self.exit is not None
        if self.exit.out_of_memory:
            return self._memory_ran_out()
        if own_end and isinstance(error, ChannelClosed):
            message = f"the process was {self.exit}" if self.exit.signal else f"the process {self.exit}"
        else:
            message = f"the process broke off its conversation with the judge ({error})"
        return JailDied(f"{message} before its work was done", self.exit, self.capture.text()[-2000:])

    def finish(self, timeout_s: float) -> str:
        """Has the runner end, waits for all of its jail, and returns what was kept of what that printed. Raises JailTimeout or JailMemory
        after killing it."""
        self._channel.close()
        self.wait(timeout_s)
        return self.capture.text()

    def close(self) -> None:
        self._channel.close()
        super().close()
        self.carrier.close()


def _host_carrier() -> HostCarrier:
    from sandbox.jail.carrier import HostCarrier  # and with it PyTorch, which a broker has no use for

    return HostCarrier()
