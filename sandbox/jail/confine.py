"""Forks a process into a jail of a given level, watches over it, and reports how it ended.

    none      limits, no_new_privs, death with its parent: no wall at all, for debugging a trusted candidate
    standard  none + seccomp + Landlock + no capabilities + a user of its own where that can be had
    strict    standard + namespaces for users, network, IPC, processes and mounts, with a view of its own

`launch` is called in the zygote. It forks a supervisor, which enters the namespaces, takes the jail's user and
forks the process that becomes untrusted. That process restricts itself (limits, Landlock, seccomp), says so on
the conversation that both inherited, closes it, and calls `run`. The supervisor keeps the conversation: it
reaps, reports the exit status and the peak memory when the process ends, and kills whatever is left; in a
process namespace of its own it is process 1, so its end is everybody's end. When the zygote goes, the
conversation closes, and the supervisor ends the jail.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from sandbox.jail import landlock, namespaces, seccomp, syscalls, view
from sandbox.jail.cgroup import Cgroup, Cgroups, NoCgroups
from sandbox.jail.limits import Limits, die_with_parent
from sandbox.jail.limits import apply as apply_limits
from sandbox.jail.processes import end_descendants

Level = Literal["strict", "standard", "none"]
LEVELS: tuple[Level, ...] = ("strict", "standard", "none")
SETUP_S = 20.0
ORPHANS_S = 0.5
PROCESS_NAME = b"python3"
SCM_CREDENTIALS = 2
_REPORT = struct.Struct("=iq")
_CREDENTIALS = struct.Struct("=iii")


class JailSetupError(RuntimeError):
    """A jail could not be entered; the text names the step and the reason."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One jail.

    Attributes:
      directory: the private directory on the host.
      on_disk: the process works in that directory itself, under its own path (a compiler, whose output is
        fetched from there); without, level strict gives it memory at `view.PRIVATE` in its place.
      readable: files and directories to show beyond the host's view.
      memory_bytes: bound of all its processes together, where control groups can be had.
    """

    level: Level
    directory: str
    on_disk: bool
    limits: Limits
    memory_bytes: int
    readable: tuple[str, ...] = ()

    @property
    def inner_directory(self) -> str:
        """The private directory's path inside the jail."""
        return view.PRIVATE if self.level == "strict" and not self.on_disk else self.directory


@dataclass(frozen=True, kw_only=True)
class Host:
    """What jails of this process have in common.

    Attributes:
      root: an empty directory on which each jail's view is mounted, in that jail's namespace only.
      own_users: each jail can get a user of its own.
      privileged: mounts can be made before the user namespace is entered.
      no_cgroups: why there are none, when `cgroups` is None.
    """

    view: view.HostView
    root: str
    own_users: bool
    privileged: bool
    cgroups: Cgroups | None
    no_cgroups: str = ""

    @staticmethod
    def find(root: str, extra: tuple[str, ...] = ()) -> Host:
        """Looks at this machine; `extra` are further paths for the view."""
        own_users = namespaces.own_users_possible()
        cgroups, reason = None, ""
        try:
            cgroups = Cgroups.find()
        except NoCgroups as error:
            reason = str(error)
        return Host(
            view=view.HostView.find(extra),
            root=root,
            own_users=own_users,
            privileged=own_users and syscalls.has_capability(syscalls.CAP_SYS_ADMIN),
            cgroups=cgroups,
            no_cgroups=reason,
        )

    def may_have_user(self, plan: Plan) -> bool:
        """Whether the jail can work under a user of its own without a view of its own: that user must get to
        the private directory and, if need be with CAP_DAC_READ_SEARCH, to Python and its kind."""
        if not view.others_may_reach(plan.directory):
            return False
        return not self.needs_search_right(plan) or syscalls.has_capability(syscalls.CAP_DAC_READ_SEARCH)

    def needs_search_right(self, plan: Plan) -> bool:
        """Whether something that the jail reads lies behind permissions, as Python in somebody's home does."""
        return not self.view.open_to_others(plan.readable)


@dataclass(kw_only=True)
class Jail:
    """A running jail, as the zygote holds it. `conversation` becomes readable when it has ended."""

    supervisor: int
    process: int
    conversation: socket.socket
    cgroup: Cgroup | None

    def kill(self) -> None:
        """Kills the untrusted process; the supervisor ends the rest and reports."""
        try:
            signal.pidfd_send_signal(self.process, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def finish(self) -> dict[str, Any]:
        """Reaps the supervisor. Returns code, signal and peak_bytes of the untrusted process, and
        `out_of_memory` if its control group ran out."""
        try:
            report = self.conversation.recv(_REPORT.size)
        except OSError:
            report = b""
        self.conversation.close()
        os.close(self.process)
        try:
            os.kill(self.supervisor, signal.SIGKILL)
        except ProcessLookupError:
            pass
        _, status = os.waitpid(self.supervisor, 0)
        peak_bytes = 0
        if len(report) == _REPORT.size:
            status, peak_bytes = _REPORT.unpack(report)
        code = os.waitstatus_to_exitcode(status)
        ran_out = self.cgroup.ran_out_of_memory() if self.cgroup else False
        return {
            "code": max(code, 0),
            "signal": max(-code, 0),
            "peak_bytes": peak_bytes,
            "out_of_memory": ran_out,
        }

    def remove(self) -> None:
        """Deletes the control group, once every process is gone."""
        if self.cgroup:
            self.cgroup.remove()


def launch(plan: Plan, host: Host, run: Callable[[], None]) -> Jail:
    """Forks a process into a jail, where it calls `run` and ends when that returns.

    The calling process must have one thread. Returns once the process is confined.

    Raises:
      JailSetupError: a step of entering failed; nothing is left behind.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    strict = plan.level == "strict"
    user_first = strict and not host.privileged
    flags = (namespaces.STRICT if strict else 0) | (syscalls.CLONE_NEWUSER if user_first else 0)
    try:
        pid = syscalls.fork_into(flags)
    except OSError as error:
        ours.close()
        theirs.close()
        raise JailSetupError(f"new namespaces: {error.strerror or error}") from error
    if pid == 0:
        ours.close()
        _supervise(plan, host, theirs, run)
    theirs.close()
    cgroup = None
    try:
        if host.cgroups and plan.level != "none":
            cgroup = host.cgroups.make(
                str(pid), memory_bytes=plan.memory_bytes, processes=plan.limits.processes + 2
            )
            cgroup.add(pid)
        user = _user_of(pid, plan, host)
        if user and (plan.on_disk or not strict):
            _give_away(plan.directory, user)
        if user_first:
            own = (os.geteuid(), os.getegid())
            namespaces.write_maps(pid, user or own, keep_root=user is not None)
        process = _converse(ours, pid, user)
    except (OSError, JailSetupError) as error:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ours.close()
        if cgroup:
            cgroup.remove()
        raise JailSetupError(str(error)) from error
    return Jail(supervisor=pid, process=process, conversation=ours, cgroup=cgroup)


def _give_away(directory: str, user: tuple[int, int]) -> None:
    """Makes the jail's user the owner of its directory and of what the trusted side has put there."""
    for folder, _, names in os.walk(directory):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            os.chown(path, *user, follow_symlinks=False)


def _user_of(pid: int, plan: Plan, host: Host) -> tuple[int, int] | None:
    """The jail's own user and group, or None where it keeps the zygote's."""
    if plan.level == "none" or not host.own_users:
        return None
    uid, gid = namespaces.user_of_jail(pid, "uid"), namespaces.user_of_jail(pid, "gid")
    if uid is None or gid is None:
        return None
    if plan.level == "standard" and not host.may_have_user(plan):
        return None
    return uid, gid


def _converse(ours: socket.socket, pid: int, user: tuple[int, int] | None) -> int:
    """Leads the child through its setup; returns a descriptor of the untrusted process."""
    ours.settimeout(SETUP_S)
    ours.send(json.dumps({"user": user}).encode())
    while True:
        data, ancillary, _, _ = ours.recvmsg(8192, socket.CMSG_SPACE(_CREDENTIALS.size))
        if not data:
            raise JailSetupError("the process ended while it was entering its jail")
        message = json.loads(data)
        if "failed" in message:
            raise JailSetupError(message["failed"])
        if "map" in message:
            assert user is not None
            namespaces.write_maps(pid, user, keep_root=False)
            ours.send(b"{}")
        if "ready" in message:
            # The kernel itself says who sent this, in this namespace's numbers.
            (credentials,) = (data for _, kind, data in ancillary if kind == SCM_CREDENTIALS)
            ours.settimeout(None)
            return os.pidfd_open(_CREDENTIALS.unpack(credentials)[0])


def _supervise(plan: Plan, host: Host, talk: socket.socket, run: Callable[[], None]) -> None:
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

    One stays where Python lies in a closed home: CAP_DAC_READ_SEARCH opens directories that permissions close,
    and Landlock, which no capability opens, says which of them. Without a user of its own the jail keeps this
    process's, and seccomp must keep it from changing modes, which Landlock cannot.
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
    landlock.restrict(readable, writable)
    bounded = own_root or own_user or "signals and abstract sockets" not in landlock.missing()
    seccomp.install(
        own_network=own_root,
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
    while True:
        ready = {fd for fd, _ in poll.poll(ORPHANS_S * 1000)}
        if talk.fileno() in ready:
            os.kill(child, signal.SIGKILL)
            poll.unregister(talk)
        if ended in ready:
            break
        _reap_orphans(child)
    _, status, usage = os.wait4(child, 0)
    if not process_1:
        _end_the_rest(alone)
    try:
        talk.send(_REPORT.pack(status, usage.ru_maxrss * 1024))
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
