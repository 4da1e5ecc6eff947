"""The oracle's part of judging on, or for, a GPU: coverage from a profile, and whether kernels compile.

What a runner reports here is a claim like any other: its shape is checked, and the profile is held against
the kernels that the build side knows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sandbox.build.triton import CompileReport
from sandbox.jail import nvml
from sandbox.jail.device_cuda import (
    SHARE_VARIABLE,
    memory_share,
    physical_index,
)
from sandbox.jail.faults import JailError, JailReply, ZygoteLost
from sandbox.jail.frames import Message
from sandbox.jail.processes import watched_members
from sandbox.jail.tensors import encode, pack
from sandbox.oracle.clock import MAX_CLAIM_MS, Side
from sandbox.oracle.failures import MALFORMED
from sandbox.protocol import Timing
from sandbox.verdict.coverage import CoverageReport, DeviceEvent, OwnKernel, own_share

MAX_NAME_CHARS = 1000
MAX_EVENTS = 5000
CONTEXT_BYTES = 2 << 30
PROFILE_EXCESS = 1.5
PROFILE_SLACK_MS = 0.01
GAP_S = 60.0
GAP_CALLS, GAP_BLOCKS = 200, 5
NO_CALL = """
import torch


class NoCall(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.cuda.set_stream(torch.cuda.default_stream())

    def forward(self, x):
        return x
"""
"""On the legacy default stream, because events around nothing lie as far apart there (2.0 us on an H200) as those around a kernel
lie further apart, on any stream, than the device's counters say of the kernel. On a thread's own default stream they lie 1.3 us
apart around nothing."""


ONE_CALL = NO_CALL.replace("class NoCall", "class OneCall").replace("        return x\n", "        return x.add_(1)\n")
"""The least that a call can do on a GPU: a kernel for one number."""
LEAST_SHARE = 0.95
"""So much of the least call's time every call takes that launches anything; what honest calls may be raised by is less than two
processes differ."""


@dataclass(frozen=True)
class CallTimes:
    """What a card's clock says of next to nothing, in ms: of flushed calls without work, and (less that) of one with the least."""

    gap_ms: float
    least_ms: float


def runner_environment() -> dict[str, str]:
    """Variables of a runner on a GPU: what this process is set to."""
    return {name: os.environ[name] for name in (SHARE_VARIABLE,) if name in os.environ}


def device_watch(device: str) -> Callable[[int], str | None] | None:
    """A check that a jail stays within its share of the GPU's memory, or None for a device that has none.

    PyTorch's own allocator keeps to the share by itself; this sees what extensions allocate past it, and the
    context that every process on the GPU pays for (`CONTEXT_BYTES`).
    """
    if not device.startswith("cuda"):
        return None
    index = physical_index(device)
    limit_bytes = int(memory_share() * nvml.gpu(index).total_bytes) + CONTEXT_BYTES

    def excess(supervisor: int) -> str | None:
        held = nvml.memory_by_process(index)
        used_bytes = sum(held.get(pid, 0) for pid in watched_members(supervisor))
        if used_bytes <= limit_bytes:
            return None
        return f"used {used_bytes >> 20} MiB of the GPU's memory, {limit_bytes >> 20} MiB are allowed"

    return excess


def measure_coverage(
    order: Callable[..., Message],
    slot: int,
    timeout_s: float,
    built: Sequence[OwnKernel] = (),
) -> CoverageReport:
    """Profiles one call of the candidate and takes the share of its own kernels.

    Args:
        order: Sends an order to the candidate's runner and returns the reply, as `Runner.call`.
        slot: Inputs to run on.
        timeout_s: For the profiler's start, and again for the profiled call.
        built: CUDA kernels in the libraries that were built for the candidate; the process cannot add to
          them.

    Returns:
        The report. `coverage` is None, with the reason in `note`, where the profiler failed or saw nothing.

    Raises:
        JailError: The candidate's process died or hung.
    """
    try:
        order("start_profiler", timeout_s)
        header = order("profile", timeout_s, slot=slot).header
    except JailReply as error:
        return CoverageReport(coverage=None, kernels=(), note=f"the profiler failed: {str(error)[:300]}")
    try:
        events = [_event(entry) for entry in _list(header, "kernels")]
        own = [*map(_own, _list(header, "own")), *built]
        busy_ms = _milliseconds(header["busy_ms"])
    except MALFORMED as error:
        return CoverageReport(
            coverage=None, kernels=(), note=f"the process sent a malformed profile ({error!r})"
        )
    return replace(own_share(events, own), busy_ms=busy_ms)


def raise_to_profile(timing: Timing, busy_ms: float) -> Timing:
    """The timing, raised where the profile shows that a call keeps the device busy for longer than its span.

    That is work on streams that the events around a call do not see. The profiler slows kernels a
    little, so only a clear excess (`PROFILE_EXCESS`) counts.
    """
    excess = busy_ms > PROFILE_EXCESS * timing.candidate.median_ms + PROFILE_SLACK_MS
    return _raised(timing, busy_ms, "profile") if excess else timing


def raise_to_launch(timing: Timing, least_ms: float) -> Timing:
    """The timing, raised to what a call takes that launches anything (`CallTimes`), where it claims less.

    The shortest calls take twice as long by themselves as in the audit's recordings, where one follows the other at once, so there the
    audit bears out a claim of half the time.
    """
    floor_ms = LEAST_SHARE * least_ms
    return _raised(timing, floor_ms, "shortest launch") if timing.candidate.median_ms < floor_ms else timing


def _raised(timing: Timing, median_ms: float, bound_by: str) -> Timing:
    span, factor = timing.candidate, median_ms / timing.candidate.median_ms
    bounds = (timing.speedup_low, timing.speedup_high)
    low, high = (bound / factor if bound is not None else None for bound in bounds)
    slower = {"median_ms": median_ms, "low_ms": span.low_ms * factor, "high_ms": span.high_ms * factor}
    return timing.model_copy(
        update={
            "candidate": span.model_copy(update=slower),
            "speedup": timing.speedup / factor,
            "speedup_low": low,
            "speedup_high": high,
            "noisy": timing.noisy or (low is not None and high is not None and low <= 1.0 <= high),
            "bound_by": bound_by,
        }
    )


def measure_call_times(order: Callable[..., Message], device: str) -> CallTimes:
    """What the events around a flushed call take by themselves (they are put around nothing), and what the least call takes beyond.

    The device's own counters show as much less for a kernel than the events around it.

    Args:
        order: Sends an order to a fresh runner, which executes nothing but the trusted sources above.
        device: Such as `cuda:0`.

    Raises:
        JailError: The runner failed.
    """
    gap_ms = _call_ms(order, device, NO_CALL, "NoCall")
    return CallTimes(gap_ms, max(0.0, _call_ms(order, device, ONE_CALL, "OneCall") - gap_ms))


def _call_ms(order: Callable[..., Message], device: str, source: str, name: str) -> float:
    loaded = {"dtype": "float32", "language": "triton", "seed": 0, "init": [], "tensors": []}
    order("load_module", GAP_S, source=source, entry_point=name, device=device, **loaded)
    tensors: list[torch.Tensor] = []
    args = encode([torch.ones(1)], tensors)
    entries, buffers = pack(tensors)
    order("set_inputs", GAP_S, buffers, slot=0, args=args, tensors=entries)
    side = Side(order=order, slots=[0], deadline=lambda: GAP_S, flushed=True, calls=GAP_CALLS)
    side.block(GAP_CALLS)
    return sorted(side.block(GAP_CALLS)[0] / GAP_CALLS for _ in range(GAP_BLOCKS))[GAP_BLOCKS // 2]


def compile_for(order: Callable[..., Message], slot: int, timeout_s: float, arch: str) -> CompileReport:
    """Has a runner with an `aot:` device compile what the candidate would launch.

    Args:
        order: Sends an order to that runner, which has loaded the candidate and holds inputs in `slot`.
        slot: Inputs to run on.
        timeout_s: For all compilations together.
        arch: Such as `sm_90`; only names the report of a failure.

    Returns:
        The report; a runner that died or hung leaves `compiles` None and says so in `stopped`.

    Raises:
        ZygoteLost: The judge itself is at fault.
    """
    try:
        header = order("compile_report", timeout_s, slot=slot).header
    except ZygoteLost:
        raise
    except JailError as error:
        return CompileReport(arch=arch, builds=(), stopped=str(error)[:500])
    try:
        report = CompileReport.from_json(header["report"])
        report.summary_parts()  # what it is made of can be read
        return report
    except MALFORMED as error:
        return CompileReport(arch=arch, builds=(), stopped=f"the process sent a malformed report ({error!r})")


def _list(header: dict[str, Any], name: str) -> list[dict[str, Any]]:
    entries = header[name]
    if not isinstance(entries, list) or len(entries) > MAX_EVENTS:
        raise ValueError(f"{name} is not a list of at most {MAX_EVENTS}")
    return entries


def _whole(value: Any) -> int | None:
    if value is not None and type(value) is not int:
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _milliseconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < MAX_CLAIM_MS:
        raise ValueError("no such time")
    return float(value)


def _name(value: Any) -> str:
    """A kernel's name as text that every encoding can carry."""
    return str(value)[:MAX_NAME_CHARS].encode("utf-8", "replace").decode()


def _event(entry: dict[str, Any]) -> DeviceEvent:
    ms = _milliseconds(entry["ms"])
    if entry["kind"] not in ("kernel", "memcpy", "memset"):
        raise ValueError("no such device event")
    return DeviceEvent(
        name=_name(entry["name"]),
        ms=ms,
        kind=entry["kind"],
        block_threads=_whole(entry["block_threads"]),
        registers=_whole(entry["registers"]),
        launches=_whole(entry["launches"]) or 1,
    )


def _own(entry: dict[str, Any]) -> OwnKernel:
    if entry["origin"] != "triton":
        raise ValueError("only Triton's kernels are known to the process alone")
    return OwnKernel(
        name=_name(entry["name"]),
        origin=entry["origin"],
        block_threads=_whole(entry["block_threads"]),
        registers=_whole(entry["registers"]),
    )
