"""Control groups that bound memory and processes of a jail, where this process may make them.

Version 2 needs a parent that hands the controllers `memory` and `pids` down; version 1 has a hierarchy for
each. Where neither can be had, rlimits and the trusted side's memory watch remain; `find` says why.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from sandbox.jail.bulk import MAX_JAIL_BYTES

CONTROLLERS = ("memory", "pids")
SLACK_BYTES = (64 << 20) + 2 * MAX_JAIL_BYTES
"""Beyond the limit that the memory watch enforces: for pages of files and kernel structures, for a payload on
its way out and for those that the trusted side still reads."""
REMOVE_S = 2.0


class NoCgroups(RuntimeError):
    """Control groups cannot be had here; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Cgroup:
    """The group of one jail: its directory for each controller (the same one in version 2)."""

    memory: Path
    pids: Path
    version: int

    def add(self, pid: int) -> None:
        """Moves a process in; its future children are born there."""
        for directory in {self.memory, self.pids}:
            (directory / "cgroup.procs").write_text(str(pid))

    def ran_out_of_memory(self) -> bool:
        """Whether the kernel has killed a member for lack of memory."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        try:
            lines = (self.memory / name).read_text().splitlines()
        except OSError:
            return False
        return any(line.startswith("oom_kill ") and line != "oom_kill 0" for line in lines)

    def remove(self) -> None:
        """Deletes the group; its last processes may need a moment to go."""
        deadline = time.monotonic() + REMOVE_S
        for directory in {self.memory, self.pids}:
            while True:
                try:
                    directory.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.002)
                else:
                    break


@dataclass(frozen=True, kw_only=True)
class Cgroups:
    """Where groups of jails are made."""

    memory: Path
    pids: Path
    version: int

    @staticmethod
    def find() -> Cgroups:
        """Makes and removes a group to see that it works, and removes what killed zygotes have left.

        Raises NoCgroups.
        """
        found = _version_2() or _version_1()
        if found is None:
            raise NoCgroups("no control group hierarchy with memory and pids is mounted")
        try:
            group = found.make(f"probe-{os.getpid()}", memory_bytes=1 << 30, processes=64)
        except OSError as error:
            raise NoCgroups(f"{found.memory}: {error.strerror}") from error
        group.remove()
        for directory in (found.memory, found.pids):
            _remove_abandoned(directory)
        return found

    def make(self, name: str, *, memory_bytes: int, processes: int) -> Cgroup:
        """A group with limits. Raises OSError."""
        group = Cgroup(memory=self.memory / f"jail-{name}", pids=self.pids / f"jail-{name}", version=self.version)
        for directory in {group.memory, group.pids}:
            directory.mkdir()
        try:
            limit = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
            (group.memory / limit).write_text(str(memory_bytes + SLACK_BYTES))
            (group.pids / "pids.max").write_text(str(processes))
            if self.version == 2 and (group.memory / "memory.swap.max").exists():
                (group.memory / "memory.swap.max").write_text("0")
        except OSError:
            group.remove()
            raise
        return group


def _remove_abandoned(parent: Path) -> None:
    for directory in parent.glob("jail-*"):
        pid = directory.name.rpartition("-")[2]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            try:
                directory.rmdir()
            except OSError:
                pass  # Somebody lives in it, or was faster.


def _version_2() -> Cgroups | None:
    own = _own_directories().get("")
    if own is None:
        return None
    for directory in (own, own.parent):
        try:
            handed_down = (directory / "cgroup.subtree_control").read_text().split()
        except OSError:
            continue
        if set(CONTROLLERS) <= set(handed_down) and os.access(directory, os.W_OK):
            return Cgroups(memory=directory, pids=directory, version=2)
    return None


def _version_1() -> Cgroups | None:
    own = _own_directories()
    if not all(name in own for name in CONTROLLERS):
        return None
    return Cgroups(memory=own["memory"], pids=own["pids"], version=1)


def _own_directories() -> dict[str, Path]:
    """This process's directory in each mounted hierarchy, by controller; version 2's is called ""."""
    mounts: dict[str, tuple[str, str]] = {}
    with open("/proc/self/mountinfo") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            kind, _, options = after.split()[:3]
            root, point = before.split()[3:5]
            if kind == "cgroup2":
                mounts[""] = root, point
            elif kind == "cgroup":
                mounts.update({name: (root, point) for name in options.split(",") if name in CONTROLLERS})
    found = {}
    with open("/proc/self/cgroup") as file:
        for line in file:
            _, names, path = line.rstrip("\n").split(":", 2)
            for name in names.split(","):
                if name in mounts:
                    root, point = mounts[name]
                    relative = os.path.relpath(path, root) if path.startswith(root) else "."
                    found[name] = Path(point, relative)
    return found
