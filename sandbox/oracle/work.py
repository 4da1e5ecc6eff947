"""How near a candidate's time comes to the least that its task takes on this card: a line of advice, not a judgement.

Unlike the floor of `sandbox.oracle.roofline`, which must hold against whatever a candidate may find, this takes the reference's own
reads, writes and products for granted.
"""

from __future__ import annotations

from dataclasses import dataclass

from sandbox.jail import nvml
from sandbox.jail.device_cuda import physical_index
from sandbox.oracle.failures import MALFORMED
from sandbox.oracle.reference import Reference, TaskRejected
from sandbox.oracle.roofline import Bandwidth
from sandbox.profile.peaks import peak_flops, roofline
from sandbox.protocol import Roofline, Timing

MOST = 1 << 60


@dataclass(frozen=True)
class Work:
    """Bytes that a call of a task must move, and operations that its products take (see `sandbox.jail.work`)."""

    bytes: int
    flops: int


def find_work(reference: Reference, slot: int, check_s: float) -> None:
    """Has the reference's own process count its work on the inputs in a slot, once for a reference: `reference.work`, which stays None
    where that fails.

    Raises:
      TaskRejected: the reference broke down.
    """
    if reference.work_is_known:
        return
    reference.work_is_known = True
    try:
        header = reference.order("work", check_s, slot=slot).header
        read, written, flops = (_count(header[name]) for name in ("read_bytes", "written_bytes", "flops"))
    except TaskRejected:
        if not reference.alive:
            raise
    except MALFORMED:
        return
    else:
        reference.work = Work(read + written, flops)


def nearness(work: Work | None, timing: Timing, bandwidth: Bandwidth, device: str, dtype: str) -> Roofline | None:
    """The candidate's time beside the card's best; None where nothing is known of the work."""
    if work is None:
        return None
    peak = peak_flops(nvml.gpu(physical_index(device)).name, dtype)
    return roofline(n_bytes=work.bytes, flops=work.flops, ms=timing.candidate.median_ms, bytes_per_s=bandwidth.read, peak=peak)


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < MOST:
        raise ValueError("no such number")
    return value
