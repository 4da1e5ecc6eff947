"""The process that every untrusted process is forked from: torch imported, nothing computed, no secret held.

Started by `sandbox.jail.spawn.Zygote` as `python -m sandbox.jail.zygote FD [module ...]`, which imports
the modules and then serves requests on FD, a SOCK_SEQPACKET socket:

    {"op": "runner", "ticket", "nonce", "env", "cwd", "limits"} + fds [channel, output, file, ...]
    {"op": "exec", "ticket", "argv", "env", "cwd", "limits"} + fds [output]
    {"op": "kill", "pid": n}

and answers {"event": "started", "ticket", "pid"} and {"event": "exit", "pid", "code", "signal",
"peak_bytes"}.
Each child leads a session of its own. When it ends, or is killed, everything that descends from it is
killed too: the zygote is a subreaper, so a grandchild that left the session becomes its child and is found
there.
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
from typing import Any

from sandbox.jail import limits as jail_limits
from sandbox.jail.processes import children_of, kill_group

MAX_REQUEST_BYTES = 128 * 1024
MAX_FDS = 8


def main(arguments: list[str]) -> None:
    """Imports the named modules and serves until the control socket closes."""
    control = socket.socket(fileno=int(arguments[0]))
    for module in arguments[1:]:
        importlib.import_module(module)
    import sandbox.jail.runner  # noqa: F401  (so that each fork finds it loaded)

    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise SystemExit(f"the zygote has {threads} threads after its imports; children would hang")
    jail_limits.prctl(jail_limits.PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    _reply(control, {"event": "ready"})
    _serve(control)


def _serve(control: socket.socket) -> None:
    poll = select.poll()
    poll.register(control, select.POLLIN)
    runners: dict[int, int] = {}
    try:
        while True:
            for fd, _ in poll.poll():
                if fd in runners:
                    poll.unregister(fd)
                    pid = runners.pop(fd)
                    os.close(fd)
                    _finish(control, pid, set(runners.values()))
                elif fd == control.fileno():
                    data, fds, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, MAX_FDS)
                    if not data:
                        return
                    request = json.loads(data)
                    if request["op"] == "kill":
                        if request["pid"] in runners.values():
                            # The process too: it may not have reached its setsid yet.
                            os.kill(request["pid"], signal.SIGKILL)
                            kill_group(request["pid"])
                        continue
                    pid = _fork(request, fds, control)
                    pidfd = os.pidfd_open(pid)
                    runners[pidfd] = pid
                    poll.register(pidfd, select.POLLIN)
                    _reply(control, {"event": "started", "ticket": request["ticket"], "pid": pid})
    finally:
        for pid in runners.values():
            kill_group(pid)
        _kill_strays(set())


def _reply(control: socket.socket, event: dict[str, Any]) -> None:
    control.send(json.dumps(event).encode())


def _finish(control: socket.socket, pid: int, others: set[int]) -> None:
    """Kills what the dead runner left behind, reaps it, reports how it ended."""
    # Not reaped yet, so the number of its group cannot belong to anybody else.
    kill_group(pid)
    _, status, usage = os.wait4(pid, 0)
    _kill_strays(others)
    code = os.waitstatus_to_exitcode(status)
    _reply(
        control,
        {
            "event": "exit",
            "pid": pid,
            "code": max(code, 0),
            "signal": max(-code, 0),
            "peak_bytes": usage.ru_maxrss * 1024,
        },
    )


def _kill_strays(runners: set[int]) -> None:
    """Kills and reaps every child that is not a known runner, until none is left."""
    while strays := [pid for pid in children_of(os.getpid()) if pid not in runners]:
        for pid in strays:
            os.kill(pid, signal.SIGKILL)
        for pid in strays:
            os.waitpid(pid, 0)


def _fork(request: dict[str, Any], fds: list[int], control: socket.socket) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        return pid
    code = 70
    try:
        control.close()
        _become_jailed(request, fds, parent)
        code = 0
    except BaseException as error:  # noqa: B036  (the child must never return into the zygote's loop)
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 70
        try:
            if not isinstance(error, SystemExit):
                os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
        except OSError:
            pass
    finally:
        os._exit(code)


def _become_jailed(request: dict[str, Any], fds: list[int], parent: int) -> None:
    os.setsid()
    jail_limits.die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    is_runner = request["op"] == "runner"
    output = fds[1] if is_runner else fds[0]
    # Numbers 0-2 are the standard streams, 3 the channel, 4 and up the files; nothing else stays open.
    kept = [os.open(os.devnull, os.O_RDONLY), output, output] + ([fds[0], *fds[2:]] if is_runner else [])
    high = _above(kept, 64)
    for number, fd in enumerate(high):
        os.dup2(fd, number, inheritable=True)
    os.closerange(len(high), 1 << 20)
    os.chdir(request["cwd"])
    jail_limits.apply(jail_limits.Limits(**request["limits"]))
    if not is_runner:
        os.execve(request["argv"][0], request["argv"], request["env"])
    from sandbox.jail import runner

    os.environ.update({"HOME": request["cwd"], "TMPDIR": request["cwd"], **request["env"]})
    runner.main(3, request["nonce"], file_fds=list(range(4, len(high))))


def _above(fds: list[int], lowest: int) -> list[int]:
    """Copies of `fds` numbered from `lowest` up, out of the way of the numbers they are to get."""
    import fcntl

    return [fcntl.fcntl(fd, fcntl.F_DUPFD, lowest) for fd in fds]


if __name__ == "__main__":
    main(sys.argv[1:])
