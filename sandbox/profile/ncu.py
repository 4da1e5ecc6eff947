"""Nsight Compute's command line program: where it is, what forbids it, how it is called, and what its output says.

Its output is a page of comma-separated values (`--csv --page raw`) between lines of its own that begin with "==": a row of column names, a
row of units, and a row a launch. It comes through a pipe that no candidate holds, and is read all the same as if one had written it.
"""

from __future__ import annotations

import csv
import math
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sandbox.jail import syscalls
from sandbox.jail.plan import Level
from sandbox.profile.metrics import DURATION, METRICS

DRIVER_PARAMETERS = Path("/proc/driver/nvidia/params")
FOLDERS = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")
CAP_PERFMON = 38
MAX_LAUNCHES = 32
"""Of one call; each is run about ten times, for as many counters as the hardware has at once."""
TOP_KERNELS = 5
OUTPUT_BYTES = 256 << 10
"""Of the program's output, at its beginning and its end; a launch takes less than a kilobyte."""
MAX_ROWS, MAX_NAME_CHARS, MAX_UNIT_CHARS = 4096, 200, 40
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?")
_NAME = "Kernel Name"
_SAID = re.compile(r"^==(?:ERROR|WARNING)== *(.+)$", re.MULTILINE)
NOT_ALLOWED = "ERR_NVGPUCTRPERM"
ADVICE = (
    "have the administrator of this host load the driver with NVreg_RestrictProfilingToAdminUsers=0, or judge candidates that you trust as root "
    "with --isolation none"
)


class ReportError(ValueError):
    """The output holds no counters, or is not what Nsight Compute prints; the text says what was wrong."""


@dataclass
class Launches:
    """Launches of one kernel, with their counters added up."""

    kernel: str
    launches: int = 0
    ns: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)

    @property
    def means(self) -> dict[str, float]:
        """Value of each counter that a launch had, in the order of `METRICS`."""
        return {name: self.sums[name] / self.counts[name] for name in METRICS if name in self.sums}


def find_ncu() -> str | None:
    """Path of the program: on PATH, with the CUDA toolkit, or the newest in its own place; None if it is not there."""
    places = [os.environ.get("PATH", ""), FOLDERS[0], *sorted(map(str, Path(FOLDERS[1]).glob("*")), reverse=True)]
    return next(filter(None, (shutil.which("ncu", path=place) for place in places)), None)


def installation(program: str) -> list[Path]:
    """Folders that the program reads: its own, and where links and scripts called `ncu` may lead."""
    real = Path(program).resolve()
    beside = [folder for folder in real.parent.parent.glob("nsight-compute*") if folder.is_dir()]
    return [real.parent, *beside, *(folder for folder in (Path(FOLDERS[1]),) if folder.is_dir())]


def counters_problem(level: Level) -> str:
    """Why no hardware counters can be had of a process jailed at `level` on this host, and what to do about it; "" where nothing that
    can be seen without a GPU speaks against it (a run may still fail, and is tried once by each oracle)."""
    if find_ncu() is None:
        return (
            f"Nsight Compute's program ncu is neither on PATH nor in {' or '.join(FOLDERS)}: install it (package cuda-nsight-compute, "
            "or with the CUDA toolkit) and start the sandbox again"
        )
    if level == "standard":
        return "ncu talks to what it profiles over a network, and jails of level standard have none: a host that offers level strict is needed"
    if admins_only() and not (level == "none" and any(map(syscalls.has_capability, (syscalls.CAP_SYS_ADMIN, CAP_PERFMON)))):
        return f"the GPU's driver gives hardware counters to administrators alone ({NOT_ALLOWED}), and jailed processes never are: {ADVICE}"
    return ""


def admins_only() -> bool:
    """Whether the driver says that it keeps counters from ordinary users; False where it says nothing."""
    try:
        text = DRIVER_PARAMETERS.read_text()
    except OSError:
        return False
    return re.search(r"^RmProfilingAdminOnly: *1 *$", text, re.MULTILINE) is not None


def arguments(metrics: Sequence[str], kernels: Sequence[str] = ()) -> list[str]:
    """Of the program, up to the command that it is to profile.

    The clocks are left alone: other evaluations' are timed on the same card.

    Args:
      metrics: to collect.
      kernels: names of functions, of which alone launches are looked at; of all without.
    """
    only = ["--kernel-name-base", "function", "--kernel-name", f"regex:^({'|'.join(map(re.escape, kernels))})$"] if kernels else []
    return [
        "--csv", "--page", "raw", "--print-units", "base", "--print-kernel-base", "function", "--export", "{kept}/report", "--force-overwrite",
        "--metrics", ",".join((DURATION, *metrics)), "--clock-control", "none", "--cache-control", "all", "--profile-from-start", "off",
        "--target-processes", "application-only", "--launch-count", str(MAX_LAUNCHES), *only,
    ]  # fmt: skip


def function_name(name: str) -> str:
    """The bare name of a kernel's function in a demangled one: without result, namespaces, template arguments and parameters."""
    bare = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split(r"[<(]", bare, maxsplit=1)[0].strip().rpartition("::")[2]


def read_report(output: str) -> list[Launches]:
    """Counters of every kernel, that with the most time first.

    Args:
      output: all that the program printed.

    Raises:
      ReportError.
    """
    lines = [line for line in output.splitlines() if line.startswith('"')]
    if len(lines) > MAX_ROWS:
        raise ReportError(f"{len(lines)} rows, of which at most {MAX_ROWS} are read")
    try:
        rows = list(csv.reader(lines, strict=True))
    except csv.Error as error:
        raise ReportError(f"a row is malformed ({error})") from error
    if len(rows) < 3:
        raise ReportError(complaint(output) or "no launch was counted")
    names, units, *launches = rows
    if _NAME not in names or len(set(names)) != len(names):
        raise ReportError(f"the first row names no columns: {', '.join(names)[:200]}")
    if any(len(row) != len(names) for row in rows):
        raise ReportError("rows differ in their number of columns")
    unit_of = {name: _text(unit, MAX_UNIT_CHARS) for name, unit in zip(names, units, strict=True) if name in METRICS}
    found: dict[str, Launches] = {}
    for row in launches:
        cells = dict(zip(names, row, strict=True))
        kernel = _text(function_name(cells[_NAME]), MAX_NAME_CHARS)
        one = found.setdefault(kernel, Launches(kernel, units=unit_of))
        one.launches += 1
        one.ns += _number(cells.get(DURATION, "")) or 0.0
        for name in METRICS:
            value = _number(cells.get(name, ""))
            if value is not None:
                one.sums[name] = one.sums.get(name, 0.0) + value
                one.counts[name] = one.counts.get(name, 0) + 1
    return sorted(found.values(), key=lambda one: one.ns, reverse=True)


def unknown_metrics(output: str, asked: Iterable[str]) -> list[str]:
    """Those of the metrics asked for that the program complains of by name, as not known for this card."""
    said = "\n".join(line for line in _SAID.findall(output) if "metric" in line.lower())
    return [name for name in asked if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", said)]


def complaint(output: str) -> str:
    """The program's own errors, or else warnings, in one line; "" if there are none."""
    said = [_text(line, 300) for line in _SAID.findall(output)]
    return "; ".join(dict.fromkeys(said))[:600]


def _number(cell: str) -> float | None:
    """A cell's value; None for one that is empty, "n/a" or no number."""
    if not _NUMBER.fullmatch(cell):
        return None
    value = float(cell.replace(",", ""))
    return value if math.isfinite(value) else None


def _text(text: str, most: int) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:most]).encode("utf-8", "replace").decode()
