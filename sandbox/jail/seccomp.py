"""A seccomp filter for untrusted processes, assembled here: no library, x86_64 and aarch64.

The filter forbids what neither a kernel under test nor a compiler needs and what has been a way out of
sandboxes: tracing, mounts and namespaces, kernel programs and keys, other processes' memory, network sockets.
Everything else passes, because PyTorch, Triton and the CUDA driver use a great deal. Forbidden calls answer
EPERM; `clone3` answers ENOSYS, after which C libraries fall back to `clone`, whose flags can be seen; calls
newer than this table answer ENOSYS too. A call in another convention (32-bit, x32) ends the process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable, Iterator

from sandbox.jail import syscalls

MODE_FILTER = 2
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF_0000, 0x8000_0000, 0x0005_0000
DENIED = ERRNO | errno.EPERM
Step = tuple[int, int, int, int]
"""One instruction: code, steps to skip if true, steps to skip if false, operand."""
LOAD_WORD, JUMP_EQUAL, JUMP_GREATER, JUMP_AT_LEAST, JUMP_ANY_BIT, AND, RETURN = (
    0x20,
    0x15,
    0x25,
    0x35,
    0x45,
    0x54,
    0x06,
)
NUMBER_OFFSET, ARCHITECTURE_OFFSET, ARGUMENTS_OFFSET = 0, 4, 16
ARCHITECTURES = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
X32_BIT = 0x4000_0000
NEWEST = 462
"""Calls above this number were not known when the table was written."""

NAMESPACES = (
    syscalls.CLONE_NEWNS
    | syscalls.CLONE_NEWCGROUP
    | syscalls.CLONE_NEWUTS
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNET
)
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
SOCK_TYPE_MASK, SOCK_STREAM, SOCK_SEQPACKET = 0xF, 1, 5
TIOCSTI, TIOCLINUX = 0x5412, 0x541C

# Name: (number on x86_64, number on aarch64); None where the architecture does not have it.
FORBIDDEN: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "lsm_get_self_attr": (459, 459),
    "lsm_set_self_attr": (460, 460),
    "lsm_list_modules": (461, 461),
    "unshare": (272, 97),
    "setns": (308, 268),
    "seccomp": (317, 277),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "userfaultfd": (323, 282),
    "memfd_secret": (447, 447),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "create_module": (174, None),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "get_kernel_syms": (177, None),
    "query_module": (178, None),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "_sysctl": (156, None),
    "fanotify_init": (300, 262),
}
CONDITIONAL = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "personality": (135, 92),
    "prctl": (157, 167),
    "ioctl": (16, 29),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}
CHANGING_MODES = ("chmod", "fchmod", "fchmodat", "fchmodat2")
CHANGING_ATTRIBUTES = ("setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr")


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def supported() -> bool:
    """Whether this kernel filters system calls and this processor is one that the table holds."""
    return platform.machine() in ARCHITECTURES and os.path.exists("/proc/sys/kernel/seccomp/actions_avail")


def install(*, own_network: bool, signals_to: int | None, may_change_modes: bool, loopback: bool = False) -> None:
    """Puts the filter on this process and its future children, for good. no_new_privs must be set.

    Args:
      own_network: the process has a network namespace and a file system of its own, so that local sockets
        lead nowhere; without, no socket can be made but a connected pair.
      signals_to: the only process that signals may go to, or None where something else bounds them.
      may_change_modes: without, changing a file's mode does nothing and reports success (linkers and copying
        programs ask for it), and changing extended attributes fails.
      loopback: sockets of the Internet's families may be made; the network namespace must hold nothing but a loopback interface.

    Raises:
      OSError: no filter on this kernel, or an unknown processor.
    """
    if platform.machine() not in ARCHITECTURES:
        raise OSError(f"no seccomp filter for {platform.machine()}: only {', '.join(ARCHITECTURES)}")
    load(program(platform.machine(), own_network, signals_to, may_change_modes, loopback))


def load(code: bytes) -> None:
    """Puts a program of filter instructions on this process. Raises OSError."""
    buffer = ctypes.create_string_buffer(code, len(code))
    order = _Program(len(code) // 8, ctypes.addressof(buffer))
    result = syscalls.libc.prctl(syscalls.PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(order), 0, 0)
    syscalls.checked("seccomp filter", result)


def program(machine: str, own_network: bool, signals_to: int | None, may_change_modes: bool, loopback: bool = False) -> bytes:
    """The filter's instructions for a processor; see `install`."""
    steps = [*_entry(machine), *_always(machine), *_network(machine, own_network, loopback)]
    if signals_to is not None:
        steps += _signals(machine, signals_to)
    if not may_change_modes:
        steps += [step for name in CHANGING_MODES for step in _answer(_number(name, machine), ERRNO)]
        steps += [step for name in CHANGING_ATTRIBUTES for step in _answer(_number(name, machine), DENIED)]
    return assemble(steps)


def program_without_namespaces(machine: str) -> bytes:
    """A filter that only forbids what makes namespaces, as container managers do."""
    flags = _rule(_number("clone", machine), 0, [(JUMP_ANY_BIT, NAMESPACES, DENIED)], ALLOW)
    return assemble([*_entry(machine), *_answer(_number("unshare", machine), DENIED), *flags])


def assemble(steps: Iterable[Step]) -> bytes:
    """The instructions as the kernel takes them, with leave for every call that none of them answers."""
    return b"".join(struct.pack("=HBBI", *step) for step in (*steps, (RETURN, 0, 0, ALLOW)))


def _number(name: str, machine: str) -> int | None:
    return (FORBIDDEN.get(name) or CONDITIONAL[name])[list(ARCHITECTURES).index(machine)]


def _entry(machine: str) -> Iterator[Step]:
    """Refuses other calling conventions and unknown calls; leaves the call's number loaded."""

    yield LOAD_WORD, 0, 0, ARCHITECTURE_OFFSET
    yield JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]
    yield RETURN, 0, 0, KILL_PROCESS
    yield LOAD_WORD, 0, 0, NUMBER_OFFSET
    if machine == "x86_64":
        yield JUMP_AT_LEAST, 0, 1, X32_BIT
        yield RETURN, 0, 0, KILL_PROCESS
    yield JUMP_GREATER, 0, 1, NEWEST
    yield RETURN, 0, 0, ERRNO | errno.ENOSYS


def _always(machine: str) -> Iterator[Step]:
    for name in FORBIDDEN:
        yield from _answer(_number(name, machine), DENIED)
    yield from _answer(_number("clone3", machine), ERRNO | errno.ENOSYS)
    yield from _rule(_number("clone", machine), 0, [(JUMP_ANY_BIT, NAMESPACES, DENIED)], ALLOW)
    asking = [(JUMP_EQUAL, 0xFFFF_FFFF, ALLOW), (JUMP_EQUAL, 0, ALLOW)]
    yield from _rule(_number("personality", machine), 0, asking, DENIED)
    yield from _rule(_number("prctl", machine), 0, [(JUMP_EQUAL, syscalls.PR_SET_PDEATHSIG, DENIED)], ALLOW)
    typing = [(JUMP_EQUAL, TIOCSTI, DENIED), (JUMP_EQUAL, TIOCLINUX, DENIED)]
    yield from _rule(_number("ioctl", machine), 1, typing, ALLOW)


def _network(machine: str, own_network: bool, loopback: bool) -> Iterator[Step]:
    if own_network:
        families = (AF_UNIX, AF_INET, AF_INET6, AF_NETLINK) if loopback else (AF_UNIX,)
        yield from _rule(_number("socket", machine), 0, [(JUMP_EQUAL, family, ALLOW) for family in families], DENIED)
        return
    for name in ("socket", "connect", "bind", "listen"):
        yield from _answer(_number(name, machine), DENIED)
    # A connected pair of datagram sockets could still be pointed at another address.
    pairs = [(JUMP_EQUAL, SOCK_STREAM, ALLOW), (JUMP_EQUAL, SOCK_SEQPACKET, ALLOW)]
    yield from _rule(_number("socketpair", machine), 1, pairs, DENIED, mask=SOCK_TYPE_MASK)


def _signals(machine: str, only_to: int) -> Iterator[Step]:
    for name in ("tkill", "pidfd_send_signal"):
        yield from _answer(_number(name, machine), DENIED)
    for name in ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"):
        yield from _rule(_number(name, machine), 0, [(JUMP_EQUAL, only_to, ALLOW)], DENIED)


def _answer(call: int | None, answer: int) -> Iterator[Step]:
    """If the call is `call`, answers; the architecture may lack it."""
    if call is not None:
        yield JUMP_EQUAL, 0, 1, call
        yield RETURN, 0, 0, answer


def _rule(
    call: int | None,
    argument: int,
    answers: list[tuple[int, int, int]],
    otherwise: int,
    mask: int | None = None,
) -> Iterator[Step]:
    """If the call is `call`, answers by the low word of an argument: (test, value, answer)..., else
    `otherwise`. Other calls pass with their number still loaded."""
    assert call is not None
    body = [(LOAD_WORD, 0, 0, ARGUMENTS_OFFSET + 8 * argument)]
    if mask is not None:
        body.append((AND, 0, 0, mask))
    for test, value, answer in answers:
        body += [(test, 0, 1, value), (RETURN, 0, 0, answer)]
    body.append((RETURN, 0, 0, otherwise))
    yield JUMP_EQUAL, 0, len(body), call
    yield from body
