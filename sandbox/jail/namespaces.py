"""Users of jails, and the identity maps that give a new user namespace exactly one of them.

As root each jail gets a user of its own, a high number made from the jail's process number, so that no two
living jails of this machine share one: resource limits by user and signals stay apart. As an ordinary user
there is only that user; inside its namespace it is called `INNER` all the same.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence

from sandbox.jail import syscalls

INNER = 1000
"""User and group number inside a jail's user namespace."""
FIRST_USER = 0x7000_0000
MOST_PROCESSES = 1 << 22
FEWEST_USERS = 2048
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
STRICT = (
    syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNET
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUTS
)


def own_users_possible() -> bool:
    """Whether this process can give a child a user of its own."""
    able = all(map(syscalls.has_capability, (syscalls.CAP_SETUID, syscalls.CAP_SETGID, syscalls.CAP_CHOWN)))
    return able and None not in (user_of_jail(1, "uid"), user_of_jail(1, "gid"))


def user_of_jail(pid: int, kind: str) -> int | None:
    """The user (`kind` "uid") or group ("gid") of the jail with process number `pid`, as this process's
    namespace numbers it; None where the namespace has too few to give away."""
    extents = _extents(f"/proc/self/{kind}_map")
    if any(first <= FIRST_USER and FIRST_USER + MOST_PROCESSES <= first + count for first, count in extents):
        return FIRST_USER + pid
    first, count = max(extents, key=lambda extent: extent[1], default=(0, 0))
    if count < FEWEST_USERS:
        return None
    half = count // 2
    return first + count - half + pid % half


def _extents(path: str) -> list[tuple[int, int]]:
    with open(path) as file:
        rows = [line.split() for line in file]
    return [(int(inside), int(count)) for inside, _, count in rows]


def write_maps(pid: int, users: Sequence[int], *, keep_root: bool) -> None:
    """Fills the maps of the user namespace of process `pid`, seen from its parent.

    Args:
      users: (uid, gid) that `INNER` stands for.
      keep_root: this process's own user stays user 0 inside, for the mounts that are still to be made; needs
        CAP_SETUID here.
    """
    if not syscalls.has_capability(syscalls.CAP_SETGID):
        _write(f"/proc/{pid}/setgroups", "deny")
    for kind, user, own in (("uid", users[0], os.geteuid()), ("gid", users[1], os.getegid())):
        lines = [f"0 {own} 1"] if keep_root else []
        _write(f"/proc/{pid}/{kind}_map", "\n".join([*lines, f"{INNER} {user} 1"]) + "\n")


def _write(path: str, text: str) -> None:
    # One write: the kernel takes a map whole or not at all.
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def raise_loopback() -> None:
    """Turns on the loopback interface of this process's network namespace. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))


def become(uid: int, gid: int) -> None:
    """Takes user and group for good, with no other groups where those may be dropped."""
    if syscalls.has_capability(syscalls.CAP_SETGID):
        try:
            os.setgroups([])
        except PermissionError:
            # A user namespace whose setgroups is denied; the groups lead nowhere in a view of its own.
            pass
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
