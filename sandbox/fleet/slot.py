"""What runs on a node: `Slot`, a Ray actor that starts one oracle process at a time and gives it its connection to the broker.

Needs no Ray to be imported; `sandbox.fleet.driver` makes an actor of the class.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

from sandbox.fleet.listener import keep_alive
from sandbox.settings import make_scratch
from sandbox.workers import WorkerSettings, make_directory, oracle_command, remove_directory

CONNECT_S = 10.0
END_S = 5.0
CLEAR_S = 10.0


class Slot:
    """An oracle process on this node and its successors. They end with the process that holds this, however that ends."""

    def __init__(self) -> None:
        self._scratch: Path | None = None
        self._directory: Path | None = None
        self._process: subprocess.Popen | None = None

    def start(self, broker: tuple[str, int], tokens: tuple[str, str], settings: dict[str, Any]) -> int:
        """Starts an oracle process in the place of the one before, which is ended.

        Ray calls an actor's methods on its main thread, which lives as long as its process: the oracle dies with that thread.

        Args:
          broker: address to connect to.
          tokens: what it accepts there, each once: for the connection that the oracle speaks on, and for its standard error.
          settings: fields of `WorkerSettings` but for `scratch`.

        Returns:
          The niceness at which it runs, which is the raylet's own where that can be had: Ray starts its workers at 15.

        Raises:
          OSError: the broker cannot be reached, or the process cannot be started; the text says which.
        """
        self._end()
        if self._scratch is None:
            self._scratch = make_scratch()
        niceness = _as_parent()
        self._directory = make_directory(self._scratch, "oracle-")
        told = WorkerSettings(**{**settings, "cache": Path(settings["cache"])}, scratch=self._scratch)
        with _connect(broker, tokens[0]) as connection, _connect(broker, tokens[1]) as errors:
            command, environment = oracle_command(connection.fileno(), self._directory, told)
            try:
                self._process = subprocess.Popen(
                    command, pass_fds=[connection.fileno()], stdin=subprocess.DEVNULL, stderr=errors, start_new_session=True, env=environment
                )
            except OSError as error:
                raise OSError(f"the oracle process does not start: {error}") from error
        return niceness

    def stop(self) -> None:
        """Ends the process, whose connection the broker has closed, and deletes all that it left."""
        self._end()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        directory, self._directory = self._directory, None
        if directory is not None:
            remove_directory(directory, CLEAR_S)


def _connect(broker: tuple[str, int], token: str) -> socket.socket:
    """A connection on which the broker hears whoever has the token. Blocking, as the oracle wants it."""
    host, port = broker
    try:
        connection = socket.create_connection((host, port), timeout=CONNECT_S)
    except OSError as error:
        raise OSError(f"the broker on {host}, port {port}, cannot be reached from here: {error}") from error
    keep_alive(connection)
    connection.sendall(token.encode() + b"\n")
    connection.settimeout(None)
    return connection


def _as_parent() -> int:
    """Gives this thread, and so its children, the niceness of the process that started this one; returns what it is then."""
    wanted = os.getpriority(os.PRIO_PROCESS, os.getppid())
    try:
        os.setpriority(os.PRIO_PROCESS, 0, wanted)
    except PermissionError:  # only root may be less nice again
        pass
    return os.getpriority(os.PRIO_PROCESS, 0)
