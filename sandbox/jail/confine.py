"""Forks a process into a jail of a given level, and takes in how it ended.

    none      limits, no_new_privs, death with its parent: no wall at all, for debugging a trusted candidate
    standard  none + seccomp + Landlock + no capabilities + a user of its own where that can be had
    strict    standard + namespaces for users, network, IPC, processes and mounts, with a view of its own

`launch` is called in the zygote. It forks a supervisor (`sandbox.jail.supervisor`), which enters the
namespaces, takes the jail's user and forks the process that becomes untrusted. Zygote and jail talk over a
socket pair. Meanwhile the zygote does what takes its privileges: the control group, the user's number, the
maps of the user namespace. The conversation stays open as long as the supervisor lives.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sandbox.jail import namespaces, syscalls
from sandbox.jail.cgroup import Cgroup
from sandbox.jail.plan import Host, JailSetupError, Plan
from sandbox.jail.supervisor import REPORT, supervise

SETUP_S = 20.0
SCM_CREDENTIALS = 2
_CREDENTIALS = struct.Struct("=iii")


@dataclass(kw_only=True)
class Jail:
    """A running jail, as the zygote holds it. `conversation` becomes readable when it has ended.

    `namespaced`: the supervisor is process 1 of a namespace, which the kernel has emptied once that is reaped.
    """

    supervisor: int
    namespaced: bool
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
            report = self.conversation.recv(REPORT.size)
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
        if len(report) == REPORT.size:
            status, peak_bytes = REPORT.unpack(report)
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
        supervise(plan, host, theirs, run)
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
    return Jail(supervisor=pid, namespaced=strict, process=process, conversation=ours, cgroup=cgroup)


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
        try:
            message = json.loads(data)
        except ValueError as error:  # the report of its end
            raise JailSetupError("the process ended while it was entering its jail") from error
        if "failed" in message:
            raise JailSetupError(message["failed"])
        if "map" in message:
            assert user is not None
            namespaces.write_maps(pid, user, keep_root=False)
            ours.send(b"{}")
        if "ready" in message:
            # The kernel itself says who sent this, in this namespace's numbers.
            (credentials,) = (data for _, kind, data in ancillary if kind == SCM_CREDENTIALS)
            process = os.pidfd_open(_CREDENTIALS.unpack(credentials)[0])
            ours.send(b"{}")
            ours.settimeout(None)
            return process
