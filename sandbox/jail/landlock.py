"""Landlock: a process gives up the files it does not need. Works without privileges, survives exec.

What the kernel offers grows with its ABI number: 1 (Linux 5.13) files, 2 and 3 renaming and truncation, 4
TCP, 5 ioctl on devices, 6 (6.12) signals and abstract sockets that leave the domain. Rights that a kernel
does not know are left out; `missing` names them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from sandbox.jail.syscalls import checked, libc

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
CREATE_RULESET_VERSION = 1
RULE_PATH_BENEATH = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
MAKE_AND_REMOVE = 0x1FF0
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
READ = EXECUTE | READ_FILE | READ_DIR
ALL = READ | WRITE_FILE | MAKE_AND_REMOVE | REFER | TRUNCATE | IOCTL_DEV
OF_FILES = EXECUTE | READ_FILE | WRITE_FILE | TRUNCATE | IOCTL_DEV

NET_BIND_AND_CONNECT_TCP = 3
SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 3


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32)]


def abi() -> int:
    """The kernel's Landlock ABI; 0 where it has none or has it switched off."""
    return max(0, libc.syscall(CREATE_RULESET, None, ctypes.c_long(0), CREATE_RULESET_VERSION))


def missing() -> list[str]:
    """What this kernel's Landlock cannot do yet, in words; empty from ABI 6 on."""
    now = abi()
    steps = [(3, "truncation"), (4, "TCP"), (5, "ioctl on devices"), (6, "signals and abstract sockets")]
    return [name for number, name in steps if now < number]


def restrict(readable: Sequence[str], writable: Sequence[str], *, tcp: bool = False, scoped: bool = True) -> None:
    """Leaves this process, for good, reading and executing below `readable`, and everything below `writable`.

    Paths that do not exist are passed over. What runs outside of the new domain can't be traced any more, nor can its descriptors and
    memory be reached through /proc. no_new_privs must be set.

    Args:
      tcp: leave TCP, which is forbidden altogether otherwise.
      scoped: forbid, where the kernel can, signals to processes and abstract sockets outside.

    Raises:
      OSError: the kernel has no Landlock, or refuses.
    """
    version = abi()
    if version == 0:
        raise OSError("Landlock is not offered by this kernel")
    known = _rights_of(version)
    ruleset = _Ruleset(known, 0 if tcp else NET_BIND_AND_CONNECT_TCP, SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS if scoped else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    handle = checked(
        "landlock_create_ruleset",
        libc.syscall(CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_long(size), 0),
    )
    try:
        for paths, rights in ((readable, READ), (writable, ALL)):
            for path in paths:
                _allow(handle, path, rights & known)
        checked("landlock_restrict_self", libc.syscall(RESTRICT_SELF, handle, 0))
    finally:
        os.close(handle)


def _rights_of(version: int) -> int:
    rights = ALL
    for lowest, right in ((2, REFER), (3, TRUNCATE), (5, IOCTL_DEV)):
        if version < lowest:
            rights &= ~right
    return rights


def _allow(handle: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(f"/proc/self/fd/{fd}"):
            rights &= OF_FILES
        rule = _PathBeneath(rights, fd)
        checked(
            f"landlock_add_rule {path}",
            libc.syscall(ADD_RULE, handle, RULE_PATH_BENEATH, ctypes.byref(rule), 0),
        )
    finally:
        os.close(fd)
