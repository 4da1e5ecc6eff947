"""What a profiler's trace says of the device: pieces of work, and how long any of it was going on."""

from __future__ import annotations

from typing import Any

from sandbox.verdict.coverage import DeviceEvent

_WORK = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
"""Categories of device work in a trace, and what they are called here."""


def trace_events(trace: dict[str, Any]) -> list[DeviceEvent]:
    """Device work in a Chrome trace of torch.profiler: kernels with their launch facts, copies and fills."""
    events = []
    for entry in trace.get("traceEvents", ()):
        kind = _WORK.get(entry.get("cat", ""))
        if kind is None or entry.get("ph") != "X":
            continue
        facts = entry.get("args", {})
        block = facts.get("block")
        events.append(
            DeviceEvent(
                name=entry["name"],
                ms=float(entry["dur"]) / 1e3,
                kind=kind,
                block_threads=block[0] * block[1] * block[2] if block else None,
                registers=facts.get("registers per thread"),
            )
        )
    return events


def busy_ms(trace: dict[str, Any]) -> float:
    """Time in which any stream of the device was at work, in ms: overlapping work counts once."""
    spans = sorted(
        (float(entry["ts"]), float(entry["ts"]) + float(entry["dur"]))
        for entry in trace.get("traceEvents", ())
        if entry.get("cat") in _WORK and entry.get("ph") == "X"
    )
    busy_us, end_us = 0.0, float("-inf")
    for first, last in spans:
        busy_us += max(0.0, last - max(first, end_us))
        end_us = max(end_us, last)
    return busy_us / 1e3
