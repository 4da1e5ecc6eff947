"""Reading /proc: who descends from whom, what a jail holds in memory. Linux only."""

from __future__ import annotations

import functools
import os
import secrets
import signal
import stat
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from sandbox.jail.bulk import MAX_JAIL_BYTES

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
STOP_ROUNDS, QUICK_ROUNDS = 1000, 50
THOROUGH_LOOKS = 8


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
            with open(f"/proc/{name}/stat", "rb") as file:
                text = file.read()
        except OSError:
            continue
        # The command name may contain spaces and parentheses; the fields start after the last one.
        fields = text[text.rindex(b")") + 2 :].split()
        found.append(
            ProcessInfo(int(name), fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]))
        )
    return found


def descendants(ancestor: int, but: Collection[int] = ()) -> list[ProcessInfo]:
    """All that descends from `ancestor`, dead ones that wait to be reaped included; not the children in `but`
    nor what descends from those."""
    children: dict[int, list[ProcessInfo]] = {}
    for process in processes():
        children.setdefault(process.parent, []).append(process)
    found, todo = [], [ancestor]
    while todo:
        more = [process for process in children.get(todo.pop(), ()) if process.pid not in but]
        found += more
        todo += [process.pid for process in more]
    return found


def members(supervisor: int) -> list[int]:
    """Pids of a jail: its supervisor and all that descends from it.

    Orphans of a jail fall to its supervisor, so none is missed.
    """
    return [supervisor, *(process.pid for process in descendants(supervisor))]


def watched_members(supervisor: int) -> list[int]:
    """As `members`, for looks that are repeated: by the kernel's lists of children, in a twentieth of the time where there are
    hundreds of processes. These may miss a process beside which another one ends just then, so one look in `THOROUGH_LOOKS`,
    nobody knows which, goes over all processes."""
    if not _lists_children() or secrets.randbelow(THOROUGH_LOOKS) == 0:
        return members(supervisor)
    return list(_tree(supervisor))


@functools.cache
def _lists_children() -> bool:
    """Whether this kernel keeps lists of children."""
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def _tree(pid: int) -> Iterator[int]:
    """A process and its descendants by the kernel's lists; what has ended meanwhile may be missing."""
    todo = [pid]
    while todo:
        one = todo.pop()
        yield one
        for _, children in _threads(one):
            todo += children


def _threads(pid: int) -> Iterator[tuple[bytes, list[int]]]:
    """Of each thread of a process: its state, and the processes that it has started."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                text = file.read()
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                children = file.read().split()
        except OSError:
            continue
        yield text[text.rindex(b")") + 2 : text.rindex(b")") + 3], [int(child) for child in children]


@contextmanager
def stopped(supervisor: int) -> Iterator[None]:
    """Within it no thread of a jail runs.

    Raises:
      OSError: its processes may not be stopped, or do not stop.
    """
    held: set[int] = set()
    try:
        for attempt in range(STOP_ROUNDS):
            running = {pid for pid, at_rest in _states(supervisor) if not at_rest}
            if not running:
                break
            held |= running
            for pid in running:  # again, if another one has let it go on
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            if attempt < QUICK_ROUNDS:
                os.sched_yield()  # a thread may need this very core to stop
            else:
                time.sleep(0.001)
        else:
            raise OSError(f"processes {sorted(running)} of a jail do not stop")
        yield
    finally:
        for pid in held:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _states(pid: int) -> Iterator[tuple[int, bool]]:
    """Of a process and its descendants, thread by thread: (pid of the process, whether the thread is stopped or has ended)."""
    todo = [pid]
    while todo:
        one = todo.pop()
        for state, children in _threads(one):
            yield one, state in b"TtZX"
            todo += children


def end_descendants(but: Collection[int] = ()) -> None:
    """Kills and reaps all that descends from this process, a subreaper, but not the children in `but`.

    Whatever runs is stopped first, until nothing does: to kill members of a fork bomb one by one would only
    make room for others.
    """
    own = os.getpid()
    while family := descendants(own, but):
        for _ in range(STOP_ROUNDS):
            running = [process for process in family if process.state not in "TtZX"]
            if not running:
                break
            for process in running:
                _signal(process.pid, signal.SIGSTOP)
            time.sleep(0.001)
            family = descendants(own, but)
        for process in family:
            _signal(process.pid, signal.SIGKILL)
        for process in family:
            if process.parent == own:
                os.waitpid(process.pid, 0)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def jail_bytes(supervisor: int, enough: int) -> int:
    """Resident memory of all processes of a jail, without what they share with files, and what they hold in
    files that have no name (memfd_create) and so belong to no process's memory, beyond one payload on its way
    out.

    The quick sum counts memory shared by forked processes once for each; only when it exceeds `enough` is
    the exact number (proportional shares) taken, which costs a millisecond a process.
    """
    pids = watched_members(supervisor)
    nameless = max(0, _nameless_bytes(pids) - MAX_JAIL_BYTES)
    quick = nameless + sum(_private_bytes(pid) for pid in pids)
    return quick if quick <= enough else nameless + sum(_proportional_bytes(pid) for pid in pids)


def _nameless_bytes(pids: Iterable[int]) -> int:
    """Blocks of open regular files without a name, each counted once; 0 for processes that may not be looked
    into."""
    found: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for name in names:
            try:
                status = os.stat(f"/proc/{pid}/fd/{name}")
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(found.values())


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
