"""Coverage: the share of device time that a candidate spends in kernels of its own.

A candidate that leaves the work to PyTorch, cuBLAS or cuDNN has written no kernel, however fast it is. What
counts as its own is decided by evidence from the build, never by a list of library names: a Triton kernel is
own when it was compiled from a `@triton.jit` function of the candidate's file, a CUDA kernel when its symbol
is in a library that was built from the candidate's sources. So a kernel that is merely called like a
library's counts, and a library's does not.

Where the build also tells a kernel's registers and threads per block, an event must show the same: a decoy
with the name of a library kernel does not inherit the library's time.

This module does no profiling and imports nothing heavy: it judges lists that the runner and the build have
made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

MIN_COVERAGE = 0.05
"""Below this share the candidate is no kernel at all: an integrity failure."""

REWARDED_COVERAGE = 0.30
"""Below this share the candidate passes, but its speed is not its own doing and earns nothing."""


@dataclass(frozen=True, kw_only=True)
class DeviceEvent:
    """One piece of work that the profiler saw on the device.

    Attributes:
        name: Demangled kernel name, or the profiler's label of a copy or fill.
        ms: Duration on the device.
        kind: Copies and fills take device time, but are never anybody's kernel.
        block_threads: Threads per block, if known.
        registers: Registers per thread, if known.
        launches: Number of equal launches that `ms` is the sum of.
    """

    name: str
    ms: float
    kind: Literal["kernel", "memcpy", "memset"] = "kernel"
    block_threads: int | None = None
    registers: int | None = None
    launches: int = 1


@dataclass(frozen=True, kw_only=True)
class OwnKernel:
    """One kernel that the build side knows to be the candidate's, with what it knows of its compiled form."""

    name: str
    origin: Literal["triton", "cuda"]
    block_threads: int | None = None
    registers: int | None = None


@dataclass(frozen=True, kw_only=True)
class KernelShare:
    """Device time of one kernel name, summed over its launches, with its share of the total (0 to 1)."""

    name: str
    share: float
    ms: float
    launches: int
    own: bool


@dataclass(frozen=True, kw_only=True)
class CoverageReport:
    """What one profiled run showed.

    Attributes:
        coverage: Own share of device time, 0 to 1; None if the profiler saw no device work.
        kernels: By time, the longest first.
        busy_ms: Time of the call in which any stream was at work; 0 if unknown.
        note: Why `coverage` is None, or which names were refused as own; empty if there is nothing to say.
    """

    coverage: float | None
    kernels: tuple[KernelShare, ...]
    note: str = ""
    busy_ms: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CoverageVerdict:
    """What a coverage means for the result.

    Attributes:
        integrity: Evidence of an integrity failure, or None.
        speed_rewarded: Whether the measured speedup may earn reward.
        rewarded_share: The share that enters the coverage part of the reward (0 where nothing was measured).
        note: One sentence for the feedback; empty if all is well.
    """

    integrity: str | None
    speed_rewarded: bool
    rewarded_share: float
    note: str


LEAST_REGISTERS = 16
"""A GPU gives a thread at least so many, and the profiler reports what was given, not what the code needs."""


def _agrees(known: int | None, seen: int | None) -> bool:
    return known is None or seen is None or known == seen


def _registers_agree(known: int | None, seen: int | None) -> bool:
    return _agrees(known, seen) or _agrees(max(known or 0, LEAST_REGISTERS), seen)


def _form(kernel: DeviceEvent | OwnKernel) -> str:
    return f"{kernel.block_threads} threads, {kernel.registers} registers"


def _is_own(event: DeviceEvent, variants: Sequence[OwnKernel]) -> bool:
    return event.kind == "kernel" and any(
        _agrees(v.block_threads, event.block_threads) and _registers_agree(v.registers, event.registers)
        for v in variants
    )


def own_share(events: Iterable[DeviceEvent], own: Iterable[OwnKernel], top: int = 12) -> CoverageReport:
    """Measures the own share of device time in one profiled run.

    Args:
        events: Everything that the profiler saw on the device.
        own: The candidate's kernels. One name may come in several compiled variants (autotuning, several
            shapes). top: How many kernels to report.

    Returns:
        The report; `coverage` is None when there was no device time to take a share of.
    """
    variants: dict[str, list[OwnKernel]] = {}
    for kernel in own:
        variants.setdefault(kernel.name, []).append(kernel)
    sums: dict[tuple[str, bool], list[DeviceEvent]] = {}
    refused: dict[str, str] = {}
    for event in events:
        candidates = variants.get(event.name, ())
        mine = _is_own(event, candidates)
        if candidates and not mine:
            forms = " or ".join(sorted({_form(kernel) for kernel in candidates})[:3])
            refused[event.name] = f"{event.name} ({_form(event)}; the candidate's has {forms})"
        sums.setdefault((event.name, mine), []).append(event)
    total_ms = sum(event.ms for group in sums.values() for event in group)
    if total_ms <= 0:
        return CoverageReport(coverage=None, kernels=(), note="the profiler saw no work on the device")
    shares = []
    for (name, mine), group in sums.items():
        ms = sum(event.ms for event in group)
        launches = sum(event.launches for event in group)
        shares.append(KernelShare(name=name, share=ms / total_ms, ms=ms, launches=launches, own=mine))
    shares.sort(key=lambda k: k.ms, reverse=True)
    note = ""
    if refused:
        note = "named like a kernel of the candidate, but compiled otherwise: " + ", ".join(
            refused[name] for name in sorted(refused)[:3]
        )
    own_time = sum(k.share for k in shares if k.own)
    return CoverageReport(coverage=min(own_time, 1.0), kernels=tuple(shares[:top]), note=note)


def judge_coverage(
    coverage: float | None,
    *,
    kernels: Sequence[KernelShare] = (),
    minimum: float = MIN_COVERAGE,
    rewarded: float = REWARDED_COVERAGE,
) -> CoverageVerdict:
    """Applies the coverage rule: under 5 % an integrity failure, from 5 to 30 % correct but without speed
    reward.

    Args:
        coverage: Own share of device time, or None where no profile could be had.
        kernels: The profile, for the evidence text.
        minimum: Below this share the candidate fails.
        rewarded: From this share on speed earns reward.

    Returns:
        The verdict. An unmeasured coverage is never a pass: it earns neither coverage nor speed reward, and
        says so.
    """
    if coverage is None:
        note = "coverage could not be measured: speed and coverage earn no reward"
        return CoverageVerdict(integrity=None, speed_rewarded=False, rewarded_share=0.0, note=note)
    foreign = ", ".join(f"{k.name[:60]} ({k.share:.0%})" for k in kernels if not k.own and k.share >= 0.01)
    if coverage < minimum:
        evidence = (
            f"{coverage:.1%} of the device time is in the candidate's own kernels, {minimum:.0%} are needed"
        )
        if foreign:
            evidence += f"; the rest: {foreign[:300]}"
        return CoverageVerdict(
            integrity=evidence, speed_rewarded=False, rewarded_share=coverage, note=evidence
        )
    if coverage < rewarded:
        note = (
            f"only {coverage:.0%} of the device time is in the candidate's own kernels; "
            f"speed earns reward from {rewarded:.0%} on"
        )
        return CoverageVerdict(integrity=None, speed_rewarded=False, rewarded_share=coverage, note=note)
    return CoverageVerdict(integrity=None, speed_rewarded=True, rewarded_share=coverage, note="")
