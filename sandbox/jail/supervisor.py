"""The process above every untrusted one: enters the jail, forks what becomes untrusted, watches over it.

Runs in the child that `sandbox.jail.confine.launch` has forked. Once the namespaces, the view and the user
are in place it forks the process that restricts itself further (limits, Landlock, seccomp), says so on the
conversation with the zygote, closes it, and calls `run`. The supervisor keeps the conversation: it reaps,
reports exit status and peak memory when that process ends, and kills whatever is left; in a process namespace
of its own it is process 1, so its end is everybody's end. When the zygote goes, the conversation closes, and
the supervisor ends the jail.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from sandbox.jail import landlock, namespaces, seccomp, syscalls, view
from sandbox.jail.limits import apply as apply_limits
from sandbox.jail.limits import die_with_parent
from sandbox.jail.plan import Host, JailSetupError, Plan
from sandbox.jail.processes import end_descendants

REPORT = struct.Struct("=iq")
"""How the untrusted process ended: wait status, and its largest resident size in bytes."""
ORPHANS_S = 0.5
HOLD_S = 5.0
"""So long the zygote may take to get hold of a process that has ended already."""
PROCESS_NAME = b"python3"


def supervise(plan: Plan, host: Host, talk: socket.socket, run: Callable[[], None]) -> None:
    """The supervisor's life; never returns."""
    code = 70
    try:
        os.setsid()
        user = json.loads(talk.recv(1024))["user"]
        _hide_names()
        if plan.level == "strict":
            _enter_namespaces(plan, host, talk, user)
        elif plan.level == "standard":
            _take_user(plan, host, user)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
        if plan.level == "strict":
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        else:
            syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        supervisor = os.getpid()
        child = os.fork()
        if child == 0:
            code = _be_jailed(plan, host, talk, run, supervisor, own_user=bool(user))
        else:
            _keep_only(talk.fileno())
            code = _watch_over(child, talk, process_1=plan.level == "strict", alone=bool(user))
    except BaseException as error:  # noqa: B036  (neither process may return into the zygote's loop)
        _say(talk, {"failed": f"{type(error).__name__}: {error}"[:2000]})
    finally:
        os._exit(code)


def _be_jailed(
    plan: Plan, host: Host, talk: socket.socket, run: Callable[[], None], supervisor: int, own_user: bool
) -> int:
    """What becomes the untrusted process; returns its exit code."""
    _restrict(plan, host, supervisor, own_user)
    _say(talk, {"ready": True})
    talk.close()
    try:
        run()
    except BaseException as error:  # noqa: B036
        if isinstance(error, SystemExit):
            return error.code if isinstance(error.code, int) else 70
        try:
            os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
        except OSError:
            pass
        return 70
    return 0


def _holds(talk: socket.socket, held: bool) -> bool:
    """Reads what the zygote says first: that it holds the process. All else it can say is that it gives it up."""
    try:
        return bool(talk.recv(1024)) and not held
    except OSError:
        return False


def _say(talk: socket.socket, message: dict[str, Any]) -> None:
    try:
        talk.send(json.dumps(message).encode())
    except OSError:
        pass


def _hide_names() -> None:
    """Overwrites this process's name, arguments and first environment as /proc shows them.

    Variables are stored anew first: the C library may still hold them where the first environment was.
    """
    for name, value in list(os.environ.items()):
        os.environ[name] = value
    with open("/proc/self/stat") as stat:
        text = stat.read()
    # Fields are numbered from the state, which is the third.
    fields = text[text.rindex(")") + 2 :].split()
    arg_start, arg_end, env_start, env_end = (int(f) for f in fields[45:49])
    if arg_start and arg_end > arg_start + len(PROCESS_NAME):
        ctypes.memset(arg_start, 0, arg_end - arg_start)
        ctypes.memmove(arg_start, PROCESS_NAME, len(PROCESS_NAME))
    if env_start and env_end > env_start:
        ctypes.memset(env_start, 0, env_end - env_start)
    syscalls.prctl(syscalls.PR_SET_NAME, PROCESS_NAME)


def _enter_namespaces(plan: Plan, host: Host, talk: socket.socket, user: list[int] | None) -> None:
    """The strict level's view and user. With privileges the mounts are made first, and the user namespace
    that comes last has no power over them."""
    try:
        syscalls.unshare(syscalls.CLONE_NEWCGROUP)
    except OSError:
        pass  # Only /proc/self/cgroup would tell more; old kernels lack it.
    if plan.loopback:
        namespaces.raise_loopback()
    owner = user[0] if host.privileged and user else namespaces.INNER
    view.build(
        host.view,
        host.root,
        directory=plan.directory,
        inner_directory=plan.inner_directory,
        on_disk=plan.on_disk,
        owner=owner,
        directory_bytes=plan.limits.directory_bytes,
        gpu=plan.limits.gpu,
        readable=plan.readable,
    )
    if host.privileged:
        os.setgroups([])
        syscalls.unshare(syscalls.CLONE_NEWUSER)
        _say(talk, {"map": True})
        if not talk.recv(1024):
            raise JailSetupError("the zygote has gone")
    syscalls.bound_capabilities(0)
    namespaces.become(namespaces.INNER, namespaces.INNER)
    syscalls.set_capabilities(0)


def _take_user(plan: Plan, host: Host, user: list[int] | None) -> None:
    """The standard level's user, without capabilities.

    One stays where Python lies in a closed home: CAP_DAC_READ_SEARCH opens directories that permissions
    close, and Landlock, which no capability opens, says which of them. Without a user of its own the jail
    keeps this process's, and seccomp must keep it from changing modes, which Landlock cannot.
    """
    keep = 1 << syscalls.CAP_DAC_READ_SEARCH if user and host.needs_search_right(plan) else 0
    syscalls.bound_capabilities(keep)
    if user:
        syscalls.prctl(syscalls.PR_SET_KEEPCAPS, 1)
        namespaces.become(*user)
    syscalls.set_capabilities(keep)


def _restrict(plan: Plan, host: Host, supervisor: int, own_user: bool) -> None:
    os.setsid()
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
    die_with_parent(supervisor)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.chdir(plan.inner_directory)
    apply_limits(plan.limits)
    if plan.level == "none":
        return
    own_root = plan.level == "strict"
    readable, writable = view.landlock_paths(
        host.view,
        directory=plan.inner_directory,
        own_root=own_root,
        gpu=plan.limits.gpu,
        readable=plan.readable,
    )
    landlock.restrict(readable, writable, tcp=own_root and plan.loopback)
    bounded = own_root or own_user or "signals and abstract sockets" not in landlock.missing()
    seccomp.install(
        own_network=own_root,
        loopback=own_root and plan.loopback,
        signals_to=None if bounded else os.getpid(),
        may_change_modes=own_root or own_user,
    )


def _keep_only(fd: int) -> None:
    """Closes what belongs to the untrusted process: a channel must close when that process closes it."""
    os.closerange(3, fd)
    os.closerange(fd + 1, 1 << 20)


def _watch_over(child: int, talk: socket.socket, *, process_1: bool, alone: bool) -> int:
    """Waits for the end of `child`, or of the zygote; ends what is left and reports.

    Args:
      process_1: the kernel ends the rest.
      alone: nobody else has this process's user.
    """
    poll = select.poll()
    ended = os.pidfd_open(child)
    poll.register(ended, select.POLLIN)
    poll.register(talk, select.POLLIN)
    # Not reaped before the zygote says that it holds a descriptor of the process, however soon that ends; one that
    # ended before it was ready is waited for in vain.
    over, held, patience = False, False, float("inf")
    while not (over and (held or time.monotonic() > patience)):
        ready = {fd for fd, _ in poll.poll(ORPHANS_S * 1000)}
        if talk.fileno() in ready and not _holds(talk, held):
            os.kill(child, signal.SIGKILL)
            poll.unregister(talk)
        held = held or talk.fileno() in ready
        if ended in ready:
            over, patience = True, time.monotonic() + HOLD_S
            poll.unregister(ended)
        _reap_orphans(child)
    _, status, usage = os.wait4(child, 0)
    if not process_1:
        _end_the_rest(alone)
    try:
        talk.send(REPORT.pack(status, usage.ru_maxrss * 1024))
    except OSError:
        pass
    return 0


def _reap_orphans(child: int) -> None:
    while True:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None or found.si_pid == child:
            return
        os.waitpid(found.si_pid, 0)


def _end_the_rest(alone: bool) -> None:
    """Kills and reaps everything that descends from this process."""
    if alone:
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
    end_descendants()
