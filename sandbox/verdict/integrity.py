"""Has a candidate on a CPU any native code of its own? Judged from its memory map, which it cannot forge the
absence of."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

SYSTEM = tuple(
    os.path.realpath(path) + os.sep
    for path in {sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", os.path.dirname(os.__file__)}
)
NO_KERNEL = (
    "0% of the time is in the candidate's own kernels: it has loaded no native code beyond Python's, "
    "PyTorch's and the "
    "system's libraries"
)


def own_libraries(pids: Iterable[int]) -> set[str] | None:
    """Executable files in the memory of processes that belong neither to Python's packages nor to the system.

    None where the kernel does not let this process look.
    """
    lines: list[str] = []  # the kernel escapes line feeds in names, and nothing else that text mode would take for an end
    try:
        for pid in pids:
            with open(f"/proc/{pid}/maps", "rb") as maps:
                lines += os.fsdecode(maps.read()).split("\n")
    except OSError:
        return None
    found = set()
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and "x" in fields[1] and fields[5].startswith("/"):
            path = fields[5].removesuffix(" (deleted)")
            if not path.startswith(SYSTEM) and not os.path.realpath(path).startswith(SYSTEM):
                found.add(path)
    return found
