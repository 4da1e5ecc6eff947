"""Reading /proc: who descends from whom, what a jail holds in memory. Linux only."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class ProcessInfo:
    """One line of /proc/PID/stat, as far as it is used here."""

    pid: int
    state: str
    parent: int
    group: int
    session: int


def processes() -> list[ProcessInfo]:
    """All processes that can be seen; those that end meanwhile are left out."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                text = stat.read()
        except OSError:
            continue
        # The command name may contain spaces and parentheses; the fields start after the last one.
        fields = text[text.rindex(b")") + 2 :].split()
        found.append(
            ProcessInfo(int(name), fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]))
        )
    return found


def children_of(parent: int) -> list[int]:
    """Pids whose parent is `parent`, dead ones that wait to be reaped included."""
    return [process.pid for process in processes() if process.parent == parent]


def members(supervisor: int) -> list[int]:
    """Pids of a jail: its supervisor and all that descends from it.

    Orphans of a jail fall to its supervisor, so none is missed.
    """
    children: dict[int, list[int]] = {}
    for process in processes():
        children.setdefault(process.parent, []).append(process.pid)
    found, todo = [], [supervisor]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children.get(pid, ())
    return found


def jail_bytes(supervisor: int, enough: int) -> int:
    """Resident memory of all processes of a jail, without what they share with files.

    The quick sum counts memory shared by forked processes once for each; only when it exceeds `enough` is
    the exact number (proportional shares) taken, which costs a millisecond a process.
    """
    pids = members(supervisor)
    quick = sum(_private_bytes(pid) for pid in pids)
    return quick if quick <= enough else sum(_proportional_bytes(pid) for pid in pids)


def _private_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as statm:
            fields = statm.read().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * PAGE_BYTES


def _proportional_bytes(pid: int) -> int:
    """Anonymous and shared-memory pages by proportional share; 0 for a process that has ended."""
    total_kib = 0
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as rollup:
            for line in rollup:
                if line.startswith((b"Pss_Anon:", b"Pss_Shmem:")):
                    total_kib += int(line.split()[1])
    except OSError:
        return 0
    return total_kib * 1024


def kill_group(group: int) -> None:
    """SIGKILL to a process group; nothing happens when it no longer exists."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
