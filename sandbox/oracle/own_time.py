"""What share of a C++ candidate's time on a CPU is its own libraries'? Sampled from outside while it is called.

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

A module must have loaded one of the libraries that were built for it; code from elsewhere, be it a library that
lies in its source as bytes, is nobody's kernel. A bare kernel's call is its own library's unless it calls others
that happen to lie in its process, PyTorch's among them: a glance of some `GLANCE_LOOKS` looks tells, and only where
it points to that is it looked at as long as a module; a share counts where that look points there as well.

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
from contextlib import contextmanager, suppress
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

SYSTEM = tuple(
    os.path.realpath(path) + os.sep
    for path in {sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", os.path.dirname(os.__file__)}
)
NO_KERNEL = (
    "0% of the time is in the candidate's own kernels: it has loaded no library that was built from its source "
    "(a C++ module builds its kernels with torch.utils.cpp_extension.load_inline)"
)
CORES = os.sched_getaffinity(0)
"""Where this process may run, before a timing keeps one of its threads to a core."""
PERIOD_S = 0.002
SHORTEST_S, USUAL_S, LONGEST_S = 0.25, 1.5, 6.0
"""Looking ends after the first when all is clear, after the second when nothing points to a fig leaf, and after the
third anyhow: a busy machine shows few moments."""
FAMILY_EVERY = 25
"""Looks between two searches for new processes."""
GLANCE_LOOKS, GLANCE_S, GLANCE_PERIOD_S, FEW = 8, 0.1, 0.0005, 3
"""A glance at a bare kernel: moments with somebody at work that suffice, its longest time, the time between looks, moments
of libraries without which it points to nothing."""
TRIFLE_MS = 0.01
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
    while they were counted; `problem` says why nothing could be seen, "" if it could; `forbidden`: because looking was not
    allowed."""

    own: int = 0
    libraries: int = 0
    nobody: int = 0
    call_ms: float = 0.0
    problem: str = ""
    forbidden: bool = False

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
    def points_elsewhere(self) -> bool:
        """Whether a bare kernel seems to call libraries: a third of the moments or more are the libraries', and no trifle.

        Libraries that take 70 % or more of the time are seen so in 99 of 100 glances.
        """
        many = self.libraries >= FEW and 3 * self.libraries >= self.own + self.libraries
        return many and self.libraries_ms > TRIFLE_MS

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
    *,
    glance: bool = False,
) -> OwnTime:
    """Calls `block`, which makes some calls and returns their number, until the share is clear, and looks meanwhile.

    Args:
      family: the candidate's processes at this moment.
      own: (device, inode) of the libraries that were built for the candidate.
      longest_s: most time to look.
      glance: look more often, and only until somebody was at work in `GLANCE_LOOKS` moments.
    """
    calls, start, seen = 0, time.perf_counter(), OwnTime()

    def enough() -> bool:
        spent_s = time.perf_counter() - start
        done = seen.own + seen.libraries >= GLANCE_LOOKS if glance else spent_s >= seen.wanted_s
        return done or bool(seen.problem) or spent_s >= longest_s

    with _looking(family, own, GLANCE_PERIOD_S if glance else PERIOD_S) as looks:
        while not enough():
            calls += block()
            seen = OwnTime(
                own=looks.seen["own"],
                libraries=looks.seen["libraries"],
                nobody=looks.seen["nobody"],
                call_ms=1000 * (time.perf_counter() - start) / max(calls, 1),
                problem=looks.problem,
                forbidden=looks.forbidden,
            )
    return seen


class _Looks:
    """Looks at processes and counts whose moments they were."""

    def __init__(
        self, family: Callable[[], Collection[int]], own: Collection[tuple[int, int]], period_s: float
    ):
        self._family, self._own, self._period_s = family, frozenset(own), period_s
        self._regions: dict[int, Regions] = {}
        self.seen: Counter[Owner] = Counter()
        self.problem, self.forbidden = "", False

    def until(self, end: threading.Event) -> None:
        _go_before_others()
        rng, number, pids = random.SystemRandom(), 0, self._family()
        try:
            while not end.wait(rng.uniform(0.3, 1.7) * self._period_s):
                if number % FAMILY_EVERY == FAMILY_EVERY - 1:
                    pids = self._family()
                number += 1
                self.seen[self._look(pids)] += 1
        except OSError as error:
            self.problem, self.forbidden = str(error), isinstance(error, PermissionError)

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


def _go_before_others() -> None:
    """Has this thread run as soon as it wakes, where that is allowed, and on any core: who looks only when a core has become free
    sees nobody at work."""
    thread = threading.get_native_id()
    with suppress(OSError):
        os.sched_setaffinity(thread, CORES)
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, -10)


@contextmanager
def _looking(
    family: Callable[[], Collection[int]], own: Collection[tuple[int, int]], period_s: float
) -> Iterator[_Looks]:
    looks, end = _Looks(family, own, period_s), threading.Event()
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

    None where there is nothing to tell apart: modules for which nothing was built, bare kernels that are a trifle as a
    whole or in which libraries turn out to have no part. Raises Failure.
    """
    bare = job.candidate.form == "kernel"
    if not builds.libraries or bare and side.call_ms <= TRIFLE_MS:
        return None
    rng = random.Random(secrets.randbits(64))

    def block() -> int:
        side.sample(rng)
        return side.calls

    def look(longest_s: float, glance: bool) -> OwnTime:
        with blamed_on_candidate(candidate, "timing", job.options.time_s, job.options.memory_bytes):
            return measure_own_time(
                block, lambda: family(candidate.pid), builds.libraries, longest_s, glance=glance
            )

    if 3 * side.call_ms * side.calls > 1000 * side.deadline():
        return OwnTime(problem="no time was left")
    if bare:
        seen = look(min(GLANCE_S, side.deadline() / 2), glance=True)
        if seen.problem or not seen.points_elsewhere:
            return seen if seen.problem else None
        seen = look(side.deadline() / 2, glance=False)
        # PyTorch allocates the outputs for the judge, which on a machine that has become slow is no trifle any more.
        return seen if seen.problem or seen.points_elsewhere else None
    return look(side.deadline() / 2, glance=False)


def rule(seen: OwnTime | None, verdict: Draft, *, may_look: bool) -> None:
    """Books the share as the verdict's coverage.

    Args:
      may_look: this host lets its jails be looked into, as was seen elsewhere.

    Raises:
      Failure: the candidate does next to nothing, or does not let itself be looked at.
    """
    if seen is None:
        return
    if seen.forbidden and may_look:
        evidence = f"its process forbids to look where it executes, which those of others do not ({seen.problem})"
        raise Failure("integrity", evidence, Finding(rule="coverage", evidence=evidence))
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


def check_own_code(job: Job, candidate: Runner, builds: Builds, verdict: Draft) -> None:
    """Raises Failure for a C++ module on a CPU that has loaded none of the libraries that were built for it: whatever else
    it executes is not what its source says. (A bare kernel is loaded by the judge.)"""
    if job.candidate.form == "kernel":
        return
    loaded = loaded_files(family(candidate.pid)) if builds.libraries else set()
    if loaded is None:
        verdict.notes.append("whether the candidate has loaded what was built for it cannot be seen here")
    elif not loaded & builds.libraries:
        verdict.coverage = 0.0
        raise Failure(
            "integrity",
            f"no work is done by a kernel of the candidate's own: {NO_KERNEL}",
            Finding(rule="coverage", evidence=NO_KERNEL),
        )


def loaded_files(pids: Collection[int]) -> set[tuple[int, int]] | None:
    """(Device, inode) of the files whose code is in the memory of processes; None where the kernel lets this process look
    into none of them."""
    found, seen = set(), False
    for pid in pids:
        try:
            found |= Regions(pid).files
            seen = True
        except OSError:
            continue
    return found if seen else None
