"""Runs a sandbox as a child process of a training run, and starts it again if it dies.

The child never outlives the run: it is terminated on exit, and by the kernel (PDEATHSIG) if the run itself is killed.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from sandbox.client import SandboxClient, SandboxUnavailable
from sandbox.lifeline import ends_with_parent

log = logging.getLogger(__name__)
LOOK_S = 0.5
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
SETTLED_S = 60.0
"""A sandbox that lives so long was not dead on arrival."""


class SandboxStartError(RuntimeError):
    """The sandbox did not come up; the message holds the end of its log."""


class SandboxProcess:
    """A `python -m sandbox serve` of our own.

    Args:
        arguments: more arguments for `serve`, e.g. ["--device", "cpu"].
        log_path: where its output goes (appended).
        start_timeout_s: how long it may take to answer its first health check.
        max_restarts: deaths tolerated before the run is left without a sandbox.

    Use as a context manager; `socket` is the path to connect to.
    """

    def __init__(self, arguments: Sequence[str], *, log_path: Path, start_timeout_s: float = 120.0, max_restarts: int = 20):
        # Unix socket paths are limited to 107 bytes, so a deep workdir can't hold it.
        self._directory = tempfile.mkdtemp(prefix="dk-sandbox-")
        self.socket = str(Path(self._directory) / "sandbox.sock")
        self._command = [sys.executable, "-m", "sandbox", "serve", "--socket", self.socket, *arguments]
        self._log_path = Path(log_path)
        self._start_timeout_s = start_timeout_s
        self._restarts_left = max_restarts
        self._stopping = threading.Event()
        self._process: subprocess.Popen | None = None
        self._watcher = threading.Thread(target=self._watch, name="sandbox-watcher", daemon=True)

    def __enter__(self) -> SandboxProcess:
        try:
            self._spawn()
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def pid(self) -> int:
        """Process id of the current server."""
        assert self._process is not None
        return self._process.pid

    def _spawn(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
        with open(self._log_path, "ab") as out:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=ends_with_parent(),
            )

    def _wait_until_ready(self) -> None:
        give_up = time.monotonic() + self._start_timeout_s
        with SandboxClient(self.socket) as client:
            while True:
                if self._process.poll() is not None:
                    raise SandboxStartError(
                        f"the sandbox stopped at once with status {self._process.returncode}. Its log {self._log_path} ends:\n{self._log_tail()}"
                    )
                try:
                    if client.health().status != "starting":
                        return
                except (SandboxUnavailable, RuntimeError):
                    pass
                if time.monotonic() > give_up:
                    raise SandboxStartError(
                        f"the sandbox did not answer within {self._start_timeout_s:.0f} s. Its log {self._log_path} ends:\n{self._log_tail()}"
                    )
                time.sleep(0.1)

    def _log_tail(self) -> str:
        try:
            return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-12:])
        except OSError as error:
            return f"(no log: {error})"

    def _watch(self) -> None:
        # PDEATHSIG fires when the *thread* that forked ends, so this thread lives as long as the run does.
        pause_s, started = SHORTEST_PAUSE_S, time.monotonic()
        while not self._stopping.wait(LOOK_S):
            if self._process.poll() is None:
                continue
            if self._restarts_left == 0:
                log.error("the sandbox died again (status %s) and is not restarted; see %s", self._process.returncode, self._log_path)
                return
            self._restarts_left -= 1
            # One that dies as soon as it starts needs time to be put right (a full disk, a GPU that is reset).
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S) if time.monotonic() - started < SETTLED_S else SHORTEST_PAUSE_S
            log.warning("the sandbox died (status %s); starting it again, log in %s", self._process.returncode, self._log_path)
            if self._stopping.wait(pause_s):
                return
            started = time.monotonic()
            try:
                self._spawn()
            except OSError as error:  # the one that died still stands for it, and is looked at again
                log.error("the sandbox could not be started: %s", error)

    def _stop(self) -> None:
        self._stopping.set()
        if self._watcher.is_alive():
            self._watcher.join(timeout=5)
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=5)
        shutil.rmtree(self._directory, ignore_errors=True)
