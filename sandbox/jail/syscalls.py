"""Direct system calls for entering a jail: what Python's standard library does not wrap.

Every function raises OSError with the call's name when the kernel refuses. Nothing here needs a helper
program, so that a process forked from the zygote enters its jail within milliseconds. Linux only; x86_64 and
aarch64.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal

libc = ctypes.CDLL(None, use_errno=True)
_holding_the_lock = ctypes.PyDLL(None, use_errno=True)

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_SET_NAME = 15
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
PR_CAP_AMBIENT_CLEAR_ALL = 4

CLONE_NEWNS = 0x0002_0000
CLONE_NEWCGROUP = 0x0200_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000
CLONE_NEWTIME = 0x0000_0080

CAP_CHOWN, CAP_DAC_READ_SEARCH, CAP_SETGID, CAP_SETUID, CAP_SYS_ADMIN = 0, 2, 6, 7, 21

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_RECURSIVE = 0x8000
AT_EMPTY_PATH = 0x1000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8

NUMBERS = {
    "x86_64": {"clone": 56, "pivot_root": 155, "mount_setattr": 442, "capget": 125, "capset": 126},
    "aarch64": {"clone": 220, "pivot_root": 41, "mount_setattr": 442, "capget": 90, "capset": 91},
}
CAPABILITY_VERSION_3 = 0x2008_0522


class _MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def syscall(name: str, *arguments: int | bytes | ctypes.Array | ctypes.Structure | None) -> int:
    """Makes a system call of `NUMBERS`. Raises OSError; also on a processor that the table does not hold."""
    table = NUMBERS.get(platform.machine())
    if table is None:
        raise OSError(f"{name}: system calls of {platform.machine()} are not known here")
    return checked(name, libc.syscall(table[name], *map(_word, arguments)))


def _word(argument):
    return ctypes.c_long(argument) if isinstance(argument, int) else argument


def checked(name: str, result: int) -> int:
    """`result` of a C call, or an OSError when it is -1."""
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def prctl(option: int, value: int | bytes = 0, third: int = 0) -> None:
    """Calls prctl(2)."""
    arguments = [_word(argument) for argument in (value, third, 0, 0)]
    checked(f"prctl({option})", libc.prctl(option, *arguments))


def fork_into(namespaces: int) -> int:
    """os.fork into new namespaces (CLONE_NEW* flags); without any it is os.fork itself.

    The child may use Python, but C code that cached its thread's number (a robust mutex) must not be relied
    on before it has forked once more.
    """
    if not namespaces:
        return os.fork()
    table = NUMBERS.get(platform.machine())
    if table is None:
        raise OSError(f"clone: system calls of {platform.machine()} are not known here")
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = _holding_the_lock.syscall(
        table["clone"], ctypes.c_long(namespaces | signal.SIGCHLD), *[ctypes.c_long(0)] * 4
    )
    code = ctypes.get_errno()
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(code, f"clone: {os.strerror(code)}")
    return pid


def unshare(flags: int) -> None:
    """Calls unshare(2)."""
    checked("unshare", libc.unshare(flags))


def mount(source: str, target: str, kind: str | None, flags: int = 0, options: str | None = None) -> None:
    """Calls mount(2)."""
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    result = libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    checked(f"mount {source} on {target}", result)


def set_mount_attributes(path: str, attributes: int) -> None:
    """Adds MOUNT_ATTR_* to the mount at `path` and to all below it (Linux 5.12)."""
    attr = _MountAttr(attr_set=attributes)
    syscall("mount_setattr", -100, os.fsencode(path), AT_RECURSIVE, ctypes.byref(attr), ctypes.sizeof(attr))


def become_root_directory(path: str) -> None:
    """Makes the mount at `path` the root of this mount namespace and detaches the old root."""
    os.chdir(path)
    syscall("pivot_root", b".", b".")
    checked("umount of the old root", libc.umount2(b".", MNT_DETACH))
    os.chdir("/")


def effective_capabilities() -> int:
    """Bit mask of this thread's effective capabilities."""
    header, data = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    syscall("capget", header, data)
    return data[0] | data[3] << 32


def has_capability(capability: int) -> bool:
    """Whether this thread may use a capability (in its own user namespace)."""
    return bool(effective_capabilities() >> capability & 1)


def bound_capabilities(mask: int) -> None:
    """Lets no program executed from here on gain more than the capabilities in `mask`.

    Needs CAP_SETPCAP; without it nothing happens, and no_new_privs has the same effect.
    """
    for capability in range(64):
        if not mask >> capability & 1 and libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break


def set_capabilities(mask: int) -> None:
    """Makes `mask` the permitted, effective, inheritable and ambient capabilities; gives up all others."""
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    low, high = mask & 0xFFFF_FFFF, mask >> 32
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    syscall("capset", header, (ctypes.c_uint32 * 6)(low, low, low, high, high, high))
    for capability in range(64):
        if mask >> capability & 1:
            prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability)
