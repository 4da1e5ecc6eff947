"""What share of a C++ module's time on a CPU is its own libraries'? Sampled from outside while it is called.

At random moments of some blocks of calls every running thread of the candidate's processes is looked at
(`sandbox.jail.pointers`). A moment is

    the libraries'  if any thread executes PyTorch, NumPy, or code that nobody built here, generated code included
    its own         otherwise, if any thread executes a library that was built for this candidate, or a function
                    of the C library that such a library has called
    nobody's        otherwise: Python, the C library and its mathematics, the OpenMP runtime, or all wait

and the share is own / (own + libraries'). Which file is its own is told by the inode of the sealed memory that
the judge handed out, which no other file can have. That any thread at all in PyTorch makes the moment
PyTorch's is what makes a fig leaf dear: own code that spins beside PyTorch's threads counts for nothing, and
own code that takes turns with them costs the time that it fakes. For 30 % (below, speed earns nothing) the
module must be 1.4 times slower than PyTorch alone, for 5 % as little as PyTorch plus a twentieth.

The share rules only where it says something: where the libraries take more than `TRIFLE_MS` a call (that much
an honest extension may spend on allocating its outputs), and where enough moments were seen that chance
cannot explain it.

What it cannot see:
- Fig leaves on tasks so small that PyTorch needs less than `TRIFLE_MS` for all of the work.
- Work of PyTorch that is the C library's (a concatenation is memcpy) and work in plain Python.
- A module that senses the looks (it cannot see a tracer, but it can time itself) and swaps a slow kernel of its
  own for PyTorch while they last; a library whose code is overwritten in memory with a copy of PyTorch's.
- Which of two calls was needed: an own kernel whose result is thrown away counts as work, at its full price.
"""

from __future__ import annotations

import functools
import os
import random
import secrets
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from sandbox.jail.jailed import Runner
from sandbox.jail.pointers import Place, Region, Regions, places, running
from sandbox.oracle.builds import Builds
from sandbox.oracle.clock import Side
from sandbox.oracle.draft import Draft, Job
from sandbox.oracle.failures import Failure, blamed_on_candidate
from sandbox.oracle.idle import family
from sandbox.protocol import Finding
from sandbox.verdict.coverage import MIN_COVERAGE, REWARDED_COVERAGE
from sandbox.verdict.integrity import SYSTEM

PERIOD_S = 0.002
SHORTEST_S, USUAL_S, LONGEST_S = 0.25, 1.5, 6.0
"""Looking ends after the first when all is clear, after the second when nothing points to a fig leaf, and after the
third anyhow: a busy machine shows few moments."""
FAMILY_EVERY = 25
"""Looks between two searches for new processes."""
TRIFLE_MS = 0.03
FEWEST = 40
"""Moments with somebody at work; with fewer nothing is ruled."""
C_LIBRARY = ("libc", "libm", "libmvec")
NOBODYS = (*C_LIBRARY, "ld", "libpthread", "libdl", "libgomp", "libstdc++", "libgcc_s", "libffi")
"""Names of the system's libraries, up to the first dash or ".so"."""
PYTHONS = (os.path.join(sysconfig.get_path("platstdlib"), "lib-dynload") + os.sep, os.path.realpath(sys.executable))
"""Paths of Python's own code begin like this."""

Owner = Literal["own", "libraries", "nobody"]


@dataclass(frozen=True, kw_only=True)
class OwnTime:
    """What was seen. `own`, `libraries` and `nobody` are numbers of moments, `call_ms` the mean time of a call
    while they were counted; `problem` says why nothing could be seen, "" if it could."""

    own: int = 0
    libraries: int = 0
    nobody: int = 0
    call_ms: float = 0.0
    problem: str = ""

    @property
    def share(self) -> float:
        """Own share of the time that is somebody's, 0 to 1; 1 where it is nobody's."""
        return self.own / (self.own + self.libraries) if self.own + self.libraries else 1.0

    @property
    def most(self) -> float:
        """The largest share that could have given these numbers by chance (about three standard errors)."""
        total = self.own + self.libraries
        return min(1.0, (self.own + 2.0 * self.own**0.5 + 3.0) / total) if total else 1.0

    @property
    def least(self) -> float:
        """The smallest share that could."""
        total = self.own + self.libraries
        return max(0.0, (self.own - 2.0 * self.own**0.5) / total) if total else 0.0

    @property
    def wanted_s(self) -> float:
        """How long to look, as far as can be told from what was seen."""
        many = self.own + self.libraries >= FEWEST
        if self.problem or many and (self.least > REWARDED_COVERAGE or self.most < MIN_COVERAGE):
            return SHORTEST_S
        return LONGEST_S if self.share < MIN_COVERAGE and self.libraries_ms > TRIFLE_MS else USUAL_S

    @property
    def libraries_ms(self) -> float:
        """Time of a call in the libraries."""
        total = self.own + self.libraries + self.nobody
        return self.call_ms * self.libraries / total if total else 0.0

    @property
    def rules(self) -> bool:
        """Whether the share says something about the candidate."""
        seen = self.own + self.libraries
        return not self.problem and seen >= FEWEST and self.libraries_ms > TRIFLE_MS

    @property
    def fails(self) -> str:
        """Evidence that the candidate's own libraries do next to nothing, or ""."""
        if not self.rules or self.most >= MIN_COVERAGE:
            return ""
        return (
            f"{self.share:.1%} of the time is in the candidate's own libraries, {MIN_COVERAGE:.0%} are needed; "
            f"PyTorch and other libraries take {self.libraries_ms:.3g} ms of each call"
        )

    @property
    def unrewarded(self) -> str:
        """Why the candidate's speed is not its own doing, or ""."""
        if not self.rules or self.most >= REWARDED_COVERAGE:
            return ""
        return (
            f"only {self.share:.0%} of the time is in the candidate's own libraries; speed earns reward from "
            f"{REWARDED_COVERAGE:.0%} on"
        )


def measure_own_time(
    block: Callable[[], int],
    family: Callable[[], Collection[int]],
    own: Collection[tuple[int, int]],
    longest_s: float = LONGEST_S,
) -> OwnTime:
    """Calls `block`, which makes some calls and returns their number, until the share is clear, and looks meanwhile.

    Args:
      family: the candidate's processes at this moment.
      own: (device, inode) of the libraries that were built for the candidate.
    """
    calls, start, seen = 0, time.perf_counter(), OwnTime()
    with _looking(family, own) as looks:
        while time.perf_counter() - start < min(seen.wanted_s, longest_s):
            calls += block()
            seen = OwnTime(
                own=looks.seen["own"],
                libraries=looks.seen["libraries"],
                nobody=looks.seen["nobody"],
                call_ms=1000 * (time.perf_counter() - start) / max(calls, 1),
                problem=looks.problem,
            )
    return seen


class _Looks:
    """Looks at processes and counts whose moments they were."""

    def __init__(self, family: Callable[[], Collection[int]], own: Collection[tuple[int, int]]):
        self._family, self._own = family, frozenset(own)
        self._regions: dict[int, Regions] = {}
        self.seen: Counter[Owner] = Counter()
        self.problem = ""

    def until(self, end: threading.Event) -> None:
        rng, number, pids = random.SystemRandom(), 0, self._family()
        try:
            while not end.wait(rng.uniform(0.3, 1.7) * PERIOD_S):
                if number % FAMILY_EVERY == FAMILY_EVERY - 1:
                    pids = self._family()
                number += 1
                self.seen[self._look(pids)] += 1
        except OSError as error:
            self.problem = str(error)

    def _look(self, pids: Collection[int]) -> Owner:
        threads = {thread: pid for pid in pids for thread in running(pid)}
        owners = {self._owner(threads[thread], at) for thread, at in places(list(threads)).items()}
        return next((owner for owner in ("libraries", "own") if owner in owners), "nobody")

    def _owner(self, pid: int, place: Place) -> Owner:
        region = self._region(pid, place.pointer)
        if region is None or not is_c_library(region.path):
            return owner_of(region, self._own)
        callers = (self._regions[pid].at(word) for word in place.words)
        caller = next((one for one in callers if one is not None and not is_c_library(one.path)), None)
        return "own" if caller is not None and caller.file in self._own else "nobody"

    def _region(self, pid: int, pointer: int) -> Region | None:
        known = self._regions.get(pid)
        if known is None or known.at(pointer) is None:
            try:
                known = self._regions[pid] = Regions(pid)
            except OSError:
                return None
        return known.at(pointer)


@contextmanager
def _looking(family: Callable[[], Collection[int]], own: Collection[tuple[int, int]]) -> Iterator[_Looks]:
    looks, end = _Looks(family, own), threading.Event()
    # A thread of its own: who traces must be the thread that began to, and the caller waits for the candidate.
    thread = threading.Thread(target=looks.until, args=(end,), daemon=True)
    thread.start()
    try:
        yield looks
    finally:
        end.set()
        thread.join()


def owner_of(region: Region | None, own: Collection[tuple[int, int]]) -> Owner:
    """Whose code a region holds. Code without a file is generated, which PyTorch's libraries do and no C++
    compiler does."""
    if region is None:
        return "libraries"
    if region.file in own:
        return "own"
    return "nobody" if region.path in ("[vdso]", "[vsyscall]") or _is_nobodys(region.path) else "libraries"


def is_c_library(path: str) -> bool:
    """Whether a file is the C library or its mathematics, where honest kernels spend time on memcpy or expf."""
    return _stem(path) in C_LIBRARY


def _is_nobodys(path: str) -> bool:
    python = path.startswith(PYTHONS) or os.path.basename(path).startswith("libpython")
    return _is_system(path) and (python or _stem(path) in NOBODYS)


def _stem(path: str) -> str:
    """A library's name up to the first dash or ".so"; "" for a file that is not the system's, whose name says
    nothing."""
    return os.path.basename(path).split(".so")[0].split("-")[0] if _is_system(path) else ""


@functools.cache
def _is_system(path: str) -> bool:
    return path.startswith(SYSTEM) or os.path.realpath(path).startswith(SYSTEM)


def own_time_of(job: Job, side: Side, candidate: Runner, builds: Builds) -> OwnTime | None:
    """Looks at a candidate that is being timed as `side`; to the candidate this is more of the same timing.

    None where there is nothing to tell apart: bare kernels, and modules for which nothing was built. Raises Failure.
    """
    if job.candidate.form == "kernel" or not builds.libraries:
        return None
    if 3 * side.call_ms * side.calls > 1000 * side.deadline():
        return OwnTime(problem="no time was left")
    rng = random.Random(secrets.randbits(64))

    def block() -> int:
        side.sample(rng)
        return side.calls

    longest_s = side.deadline() / 2
    with blamed_on_candidate(candidate, "timing", job.options.time_s, job.options.memory_bytes):
        return measure_own_time(block, lambda: family(candidate.pid), builds.libraries, longest_s)


def rule(seen: OwnTime | None, verdict: Draft) -> None:
    """Books the share as the verdict's coverage. Raises Failure where the candidate does next to nothing."""
    if seen is None:
        return
    if seen.problem:
        verdict.notes.append(f"the share of the candidate's own libraries cannot be seen here: {seen.problem}")
    if not seen.rules:
        return
    verdict.coverage = round(seen.share, 3)
    if seen.fails:
        raise Failure(
            "integrity",
            f"hardly any work is done by the candidate's own libraries: {seen.fails}",
            Finding(rule="coverage", evidence=seen.fails),
        )
    if seen.unrewarded:
        verdict.speed_rewarded = False
        verdict.notes.append(seen.unrewarded)
