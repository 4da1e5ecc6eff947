"""Reading /proc: who descends from whom, what a session holds in memory. Linux only."""

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
        found.append(ProcessInfo(int(name), fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3])))
    return found


def children_of(parent: int) -> list[int]:
    """Pids whose parent is `parent`, dead ones that wait to be reaped included."""
    return [process.pid for process in processes() if process.parent == parent]


def private_bytes(session: int) -> int:
    """Resident memory, shared pages left out, of all processes of a session."""
    total = 0
    for process in processes():
        if process.session == session:
            try:
                with open(f"/proc/{process.pid}/statm", "rb") as statm:
                    fields = statm.read().split()
            except OSError:
                continue
            total += (int(fields[1]) - int(fields[2])) * PAGE_BYTES
    return total


def kill_group(group: int) -> None:
    """SIGKILL to a process group; nothing happens when it no longer exists."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
