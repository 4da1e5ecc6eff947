"""The process that every untrusted process is forked from: torch imported, nothing computed, no secret held.

Started by `sandbox.jail.spawn.Zygote` as `python -m sandbox.jail.zygote FD [module ...]`, which imports
the modules and then serves requests on FD, a SOCK_SEQPACKET socket. Without modules it stays small and is there for
programs alone: what is forked from it starts and ends several times faster.

    {"op": "runner", "ticket", "nonce", "env", "plan"} + fds [channel, output, file, ...]
    {"op": "exec", "ticket", "argv", "env", "plan"} + fds [output], or [standard input, output]
    {"op": "kill", "pid": n}

and answers {"event": "started", "ticket", "pid"} or {"event": "refused", "ticket", "error"}, and later
{"event": "exit", "pid", "code", "signal", "peak_bytes", "out_of_memory"}. `plan` holds the fields of
`sandbox.jail.plan.Plan`; the pid is that of the jail's supervisor.
Each child leads a session of its own. When it ends, or is killed, everything that descends from it is
killed too: the zygote is a subreaper, so what outlives a supervisor becomes its child and is found there.
The zygote runs one thread and never a parallel operation: a forked libgomp would hang.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
from typing import Any

from sandbox.jail import confine, syscalls
from sandbox.jail.limits import Limits
from sandbox.jail.pages import collapse_memory, keep_memory
from sandbox.jail.plan import Host, JailSetupError, Plan
from sandbox.jail.processes import end_descendants

MAX_REQUEST_BYTES = 128 * 1024
MAX_FDS = 8
PATIENCE_S = 2.0
"""A supervisor that has not reported this long after its jail was killed is killed itself."""
SHARED_VARIABLES = ("SANDBOX_TRITON_SEED",)
"""Directories that the imported modules made for the runners to read."""


def main(arguments: list[str]) -> None:
    """Imports the named modules and serves until the control socket closes."""
    control = socket.socket(fileno=int(arguments[0]))
    for module in arguments[1:]:
        importlib.import_module(module)
    if arguments[1:]:
        keep_memory()
        import sandbox.jail.runner  # noqa: F401  (so that each fork finds it loaded)

    shared = tuple(os.environ[name] for name in SHARED_VARIABLES if name in os.environ)
    for directory in shared:
        _open_to_all(directory)
    host = Host.find(tempfile.mkdtemp(prefix="root-", dir=os.getcwd()), shared)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise SystemExit(f"the zygote has {threads} threads after its imports; children would hang")
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    if arguments[1:]:
        collapse_memory()
    _reply(control, {"event": "ready"})
    Server(control, host).serve()


def _open_to_all(directory: str) -> None:
    """Lets jails' own users read a tree that this process has made."""
    for folder, _, names in os.walk(directory):
        os.chmod(folder, 0o755)
        for name in names:
            os.chmod(os.path.join(folder, name), 0o644)


class Server:
    """Carries out the requests on `control`; holds the jails that run."""

    def __init__(self, control: socket.socket, host: Host):
        self._control, self._host = control, host
        self._jails: dict[int, confine.Jail] = {}
        self._doomed: dict[int, float] = {}
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def serve(self) -> None:
        """Returns, with every jail ended, when the control socket has closed."""
        try:
            while True:
                timeout_ms = PATIENCE_S * 1000 if self._doomed else None
                for fd, _ in self._poll.poll(timeout_ms):
                    if fd == self._control.fileno():
                        data, fds, _, _ = socket.recv_fds(self._control, MAX_REQUEST_BYTES, MAX_FDS)
                        if not data:
                            return
                        self._carry_out(json.loads(data), fds)
                    else:
                        self._finish(fd)
                self._hurry()
        finally:
            for jail in self._jails.values():
                jail.kill()
                os.kill(jail.supervisor, signal.SIGKILL)
            end_descendants()
            for jail in self._jails.values():
                jail.remove()

    def _carry_out(self, request: dict[str, Any], fds: list[int]) -> None:
        if request["op"] == "kill":
            for jail in self._jails.values():
                if jail.supervisor == request["pid"]:
                    jail.kill()
                    self._doomed[jail.supervisor] = time.monotonic() + PATIENCE_S
            return
        try:
            jail = self._start(request, fds)
        except JailSetupError as error:
            end_descendants({jail.supervisor for jail in self._jails.values()})
            answer = {"event": "refused", "ticket": request["ticket"], "error": str(error)}
        else:
            self._jails[jail.conversation.fileno()] = jail
            self._poll.register(jail.conversation, select.POLLIN)
            answer = {"event": "started", "ticket": request["ticket"], "pid": jail.supervisor}
        finally:
            for fd in fds:
                os.close(fd)
        _reply(self._control, answer)

    def _start(self, request: dict[str, Any], fds: list[int]) -> confine.Jail:
        fields = request["plan"]
        plan = Plan(**{**fields, "limits": Limits(**fields["limits"]), "readable": tuple(fields["readable"])})

        def run() -> None:
            self._control.close()
            _become(request, fds, plan.inner_directory)

        return confine.launch(plan, self._host, run)

    def _finish(self, fd: int) -> None:
        """Reaps a jail that has ended, kills what it left behind, reports how it ended."""
        self._poll.unregister(fd)
        jail = self._jails.pop(fd)
        self._doomed.pop(jail.supervisor, None)
        end = jail.finish()
        if not jail.namespaced:
            end_descendants({other.supervisor for other in self._jails.values()})
        jail.remove()
        _reply(self._control, {"event": "exit", "pid": jail.supervisor, **end})

    def _hurry(self) -> None:
        now = time.monotonic()
        for pid in [pid for pid, patience in self._doomed.items() if patience < now]:
            del self._doomed[pid]
            os.kill(pid, signal.SIGKILL)


def _reply(control: socket.socket, event: dict[str, Any]) -> None:
    control.send(json.dumps(event).encode())


def _become(request: dict[str, Any], fds: list[int], directory: str) -> None:
    """In the jail: arranges the descriptors, then executes the program or becomes a runner."""
    is_runner = request["op"] == "runner"
    output = fds[1] if is_runner else fds[-1]
    stdin = os.open(os.devnull, os.O_RDONLY) if is_runner or len(fds) == 1 else fds[0]
    # Numbers 0-2 are the standard streams, 3 the channel, 4 and up the files; nothing else stays open.
    kept = [stdin, output, output] + ([fds[0], *fds[2:]] if is_runner else [])
    high = _above(kept, 64)
    for number, fd in enumerate(high):
        os.dup2(fd, number, inheritable=True)
    os.closerange(len(high), 1 << 20)
    if not is_runner:
        os.execve(request["argv"][0], request["argv"], request["env"])
    from sandbox.jail import runner

    os.environ.pop("PYTHONPATH", None)
    private = {"HOME": directory, "TMPDIR": directory, "USER": "user", "LOGNAME": "user"}
    os.environ.update({**private, **request["env"]})
    tempfile.tempdir = None
    runner.main(3, request["nonce"], file_fds=list(range(4, len(high))))


def _above(fds: list[int], lowest: int) -> list[int]:
    """Copies of `fds` numbered from `lowest` up, out of the way of the numbers they are to get."""
    import fcntl

    return [fcntl.fcntl(fd, fcntl.F_DUPFD, lowest) for fd in fds]


if __name__ == "__main__":
    main(sys.argv[1:])
