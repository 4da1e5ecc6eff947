"""The trusted side of a zygote: starts it, has it fork runners and compilers, waits for them with a deadline.

One `Zygote` belongs to one oracle process and one thread. While it waits for a process it also empties the
process's output, watches its memory, and listens to `interrupt` (the broker's order to cancel), so nothing
untrusted can hold the oracle up for longer than the deadline.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import sandbox
from sandbox.jail.capture import CAPTURE_BYTES, Capture
from sandbox.jail.faults import Exit, JailMemory, JailTimeout, ZygoteLost
from sandbox.jail.frames import make_pair
from sandbox.jail.jailed import Process, Runner
from sandbox.jail.limits import Limits
from sandbox.jail.plan import Level, Plan
from sandbox.jail.probe import choose
from sandbox.jail.processes import jail_bytes, kill_group

START_S = 120.0
KILL_S = 20.0
WATCH_S = 0.25
PASSED_ON = (
    "PATH",
    "LD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CC",
    "CXX",
    "VIRTUAL_ENV",
    "TRITON_PTXAS_PATH",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
)


def clean_environment(threads: int) -> dict[str, str]:
    """Environment of everything untrusted: what tools need to be found, thread counts, no secrets."""
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    root = str(Path(sandbox.__file__).resolve().parent.parent)
    return environment | {
        "PYTHONPATH": root,
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONNOUSERSITE": "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": "1",
        # Spinning threads of one side would take the processor from the other side's next block.
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "OMP_DYNAMIC": "false",
        "KMP_BLOCKTIME": "0",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "MAX_JOBS": str(max(1, threads)),
    }


class Zygote:
    """Starts and drives one zygote process.

    Args:
      modules: imported by the zygote before it forks anything.
      threads: OpenMP threads of every runner.
      directory: private directories of jailed processes are made here.
      environment: further variables of the zygote.
      interrupt: (file descriptor, function to call when it is readable); the function may raise to break off.
      level: isolation of everything forked here (see `sandbox.jail.confine`); the best that works if None.

    Raises:
      ZygoteLost: it did not start; the text holds what it printed.
      IsolationError: this host does not offer the level.
    """

    def __init__(
        self,
        *,
        modules: Sequence[str],
        threads: int,
        directory: Path,
        environment: Mapping[str, str] = {},
        interrupt: tuple[int, Callable[[], None]] | None = None,
        level: Level | None = None,
    ):
        self.level = choose(level)
        self._directory = directory
        self._interrupt = interrupt
        self._ticket = 0
        self._started: dict[int, int | str] = {}
        self._processes: dict[int, Process] = {}
        self._early_exits: dict[int, Exit] = {}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = clean_environment(threads) | {"HOME": str(directory), **environment}
        with theirs, tempfile.TemporaryFile(dir=directory) as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "sandbox.jail.zygote", str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
                env=self._environment,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
            )
            theirs.close()
            self._control.settimeout(START_S)
            try:
                ready = self._control.recv(4096)
            except TimeoutError:
                ready = b""
            if not ready:
                self._process.kill()
                self._process.wait()
                errors.seek(0)
                text = errors.read()[-2000:].decode("utf-8", "replace")
                raise ZygoteLost(f"the process that jails are forked from did not start: {text}")
        self._control.setblocking(False)

    def close(self) -> None:
        """Ends the zygote and everything that was forked from it."""
        self._control.close()
        try:
            self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for process in self._processes.values():
            kill_group(process.pid)

    def runner(
        self,
        limits: Limits,
        memory_bytes: int,
        files: Sequence[int] = (),
        env: Mapping[str, str] = {},
        readable: Sequence[Path] = (),
    ) -> Runner:
        """Forks a runner. `files` become its descriptors 4, 5, ...; `memory_bytes` bounds all its processes
        together; `readable` are files and directories that it may read beyond those of the system."""
        ours, theirs = make_pair()
        nonce = secrets.token_hex(16)
        with theirs:
            pid, capture, directory = self._fork(
                {"op": "runner", "nonce": nonce, "env": dict(env)},
                limits,
                memory_bytes,
                [theirs.fileno()],
                files,
                readable=readable,
            )
        runner = Runner(
            ours, nonce, zygote=self, pid=pid, capture=capture, directory=directory, memory_bytes=memory_bytes
        )
        return self._register(runner)

    def execute(
        self,
        argv: Sequence[str],
        limits: Limits,
        memory_bytes: int,
        directory: Path,
        readable: Sequence[Path] = (),
    ) -> Process:
        """Executes a program (a compiler) in `directory`, which is the process's own and is deleted with it.

        It sees the directory under this very path, and of the host's files the system's and `readable`.
        """
        env = {**self._environment, "HOME": str(directory), "TMPDIR": str(directory), "LC_ALL": "C"}
        request = {"op": "exec", "argv": list(argv), "env": env}
        pid, capture, directory = self._fork(request, limits, memory_bytes, [], [], directory, readable)
        return self._register(Process(self, pid, capture, directory, memory_bytes))

    def runner_under(
        self,
        argv: Sequence[str],
        limits: Limits,
        memory_bytes: int,
        *,
        env: Mapping[str, str] = {},
        readable: Sequence[Path] = (),
        kept_bytes: int,
    ) -> Runner:
        """Executes a program that starts a runner itself (`sandbox.jail.counted`), in a private directory and, at level strict, with a
        loopback interface.

        The program's standard input is the runner's channel, whose nonce is put behind `argv`. Of what it prints the first and last
        `kept_bytes` are kept.
        """
        ours, theirs = make_pair()
        nonce = secrets.token_hex(16)
        request = {"op": "exec", "argv": [*argv, nonce], "env": {**self._environment, "LC_ALL": "C", **env}}
        with theirs:
            pid, capture, directory = self._fork(
                request, limits, memory_bytes, [theirs.fileno()], [], readable=readable, loopback=True, kept_bytes=kept_bytes
            )
        runner = Runner(ours, nonce, zygote=self, pid=pid, capture=capture, directory=directory, memory_bytes=memory_bytes)
        return self._register(runner)

    def _register(self, process):
        self._processes[process.pid] = process
        if process.pid in self._early_exits:
            process.exit = self._early_exits.pop(process.pid)
            del self._processes[process.pid]
        return process

    def _fork(
        self,
        request: dict,
        limits: Limits,
        memory_bytes: int,
        first: Sequence[int],
        rest: Sequence[int],
        directory: Path | None = None,
        readable: Sequence[Path] = (),
        loopback: bool = False,
        kept_bytes: int = CAPTURE_BYTES,
    ) -> tuple[int, Capture, Path]:
        on_disk = directory is not None
        directory = directory or Path(tempfile.mkdtemp(prefix="jail-", dir=self._directory))
        plan = Plan(
            level=self.level,
            directory=str(directory),
            on_disk=on_disk,
            limits=limits,
            memory_bytes=memory_bytes,
            readable=tuple(map(str, readable)),
            loopback=loopback,
        )
        self._ticket += 1
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            text = json.dumps({**request, "ticket": self._ticket, "plan": asdict(plan)})
            socket.send_fds(self._control, [text.encode()], [*first, write_end, *rest])
        except OSError as error:
            os.close(read_end)
            raise ZygoteLost(f"the process that jails are forked from is gone ({error})") from error
        finally:
            os.close(write_end)
        deadline = time.monotonic() + KILL_S
        while self._ticket not in self._started:
            if not select.select([self._control], [], [], max(0.0, deadline - time.monotonic()))[0]:
                os.close(read_end)
                raise ZygoteLost("the process that jails are forked from does not answer")
            self._read_events()
        started = self._started.pop(self._ticket)
        if isinstance(started, str):
            os.close(read_end)
            raise ZygoteLost(f"a jail of level {self.level} could not be entered: {started}")
        return started, Capture(read_end, kept_bytes), directory

    def _read_events(self) -> None:
        while True:
            try:
                data = self._control.recv(65536)
            except BlockingIOError:
                return
            except OSError as error:
                raise ZygoteLost(f"the process that jails are forked from is gone ({error})") from error
            if not data:
                raise ZygoteLost("the process that jails are forked from has died")
            event = json.loads(data)
            if event["event"] == "started":
                self._started[event["ticket"]] = event["pid"]
            elif event["event"] == "refused":
                self._started[event["ticket"]] = event["error"]
            elif event["event"] == "exit":
                end = Exit(**{name: value for name, value in event.items() if name not in ("event", "pid")})
                process = self._processes.pop(event["pid"], None)
                if process is None:
                    self._early_exits[event["pid"]] = end
                else:
                    process.exit = end

    def wait_for(
        self,
        process: Process,
        deadline: float,
        *,
        sock: socket.socket | None = None,
        writing: bool = False,
        interruptible: bool = True,
    ) -> None:
        """Returns when `sock` is ready, or without one when the process has ended.

        Raises:
          JailTimeout, JailMemory: after killing the process. ZygoteLost. Whatever the interrupt function
            raises.
        """
        while process.exit is None or sock is not None:
            poll = select.poll()
            poll.register(self._control, select.POLLIN)
            if sock is not None:
                poll.register(sock, select.POLLOUT if writing else select.POLLIN)
            if process.capture.fd is not None:
                poll.register(process.capture.fd, select.POLLIN)
            if interruptible and self._interrupt:
                poll.register(self._interrupt[0], select.POLLIN)
            now = time.monotonic()
            ready = {fd for fd, _ in poll.poll(max(0.0, min(deadline, process.next_watch) - now) * 1000)}
            if process.capture.fd in ready:
                process.capture.drain()
            if interruptible and self._interrupt and self._interrupt[0] in ready:
                self._interrupt[1]()
            now = time.monotonic()
            if sock is not None and sock.fileno() in ready and now < min(deadline, process.next_watch):
                return
            if self._control.fileno() in ready:
                self._read_events()
                continue
            if now >= deadline:
                self.kill(process)
                raise JailTimeout("still busy at its deadline")
            if now >= process.next_watch:  # kept over orders: many short ones are watched too
                used_bytes = jail_bytes(process.pid, process.memory_bytes)
                if used_bytes > process.memory_bytes:
                    self.kill(process)
                    raise JailMemory(
                        f"used {used_bytes >> 20} MiB, {process.memory_bytes >> 20} MiB are allowed"
                    )
                excess = process.watch(process.pid) if process.watch else None
                if excess:
                    self.kill(process)
                    raise JailMemory(excess)
                # From its end: looking at hundreds of processes takes longer than that, and what is ready must get its turn.
                process.next_watch = time.monotonic() + WATCH_S

    def kill(self, process: Process) -> None:
        """Kills a process with all its descendants and waits until the zygote has reaped them."""
        if process.exit is not None:
            return
        try:
            self._control.send(json.dumps({"op": "kill", "pid": process.pid}).encode())
        except OSError as error:
            kill_group(process.pid)
            raise ZygoteLost(f"the process that jails are forked from is gone ({error})") from error
        deadline = time.monotonic() + KILL_S
        while process.exit is None:
            if not select.select([self._control], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise ZygoteLost(f"process {process.pid} does not die")
            self._read_events()
