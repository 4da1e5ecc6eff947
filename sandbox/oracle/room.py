"""Memory of a GPU that many processes share: kept free in time, and never held against the wrong one.

References stay warm in processes of their own, several to an oracle, several oracles to a card, and a trainer may hold
half of it. So an oracle gives up warm references while it holds more than its part of the card, or less than `RESERVE_SHARE` of it
is free, and a process that ran out of memory on a card that others have filled has not failed: its evaluation is repeated. (Free
memory alone is no measure: twelve oracles that see as much of it at the same time all take it.)
"""

from __future__ import annotations

import os
from collections.abc import Callable

from sandbox.jail import nvml
from sandbox.jail.device_cuda import memory_share, physical_index
from sandbox.jail.processes import members, watched_members

RESERVE_SHARE = 0.1
"""Share of the card that is kept free for the evaluation at hand. With less left a moment after a process has run out of memory, that
says nothing about one that asks for a little."""
MODEST_SHARE = 0.25
"""Part of its allowance up to which a process is taken to ask for a little."""


class DeviceFull(RuntimeError):
    """The card's memory is used up by others; the text says by how much and what to change."""


def lost(device: str) -> str | None:
    """Why a device can judge nothing any more, or None: a GPU that does not answer its driver makes every candidate look wrong."""
    if not device.startswith("cuda"):
        return None
    try:
        nvml.free_bytes(physical_index(device))
    except nvml.NvmlError as error:
        return (
            f"{device} does not answer its driver ({error}): look at nvidia-smi and the kernel's log, and restart the sandbox once "
            "it is back; verdicts given so far are kept"
        )
    return None


def make_room(device: str, evict: Callable[[], bool]) -> None:
    """Calls `evict` while too little of the card is free, until it answers that nothing is left to give up.

    Raises:
      NvmlError: the driver does not answer.
    """
    if not device.startswith("cuda"):
        return
    index = physical_index(device)
    reserve_bytes = RESERVE_SHARE * nvml.gpu(index).total_bytes
    while nvml.free_bytes(index) < reserve_bytes and evict():
        pass


def keep_to_part(device: str, evict: Callable[[], bool], part: float) -> None:
    """Calls `evict` while this oracle, its process and all that descend from it, holds more than half of its part of the card, until
    nothing is left to give up. The other half is for the evaluation that comes.

    Args:
      part: of what is not kept free, 0 to 1.

    Raises:
      NvmlError: the driver does not answer.
    """
    if not device.startswith("cuda") or part >= 1:
        return
    index = physical_index(device)
    kept_bytes = part * (1 - RESERVE_SHARE) / 2 * nvml.gpu(index).total_bytes
    while _held_bytes(index) > kept_bytes and evict():
        pass


def _held_bytes(index: int) -> int:
    """Of the card's memory, by this process and its descendants."""
    held = nvml.memory_by_process(index)
    return sum(held.get(pid, 0) for pid in watched_members(os.getpid()))


def crowded(device: str, supervisor: int | None = None) -> str | None:
    """Why running out of memory was not the doing of the jail of `supervisor` (of nobody in particular), or None.

    A jail that holds more than `MODEST_SHARE` of its allowance is never excused.
    """
    if not device.startswith("cuda"):
        return None
    index = physical_index(device)
    total_bytes, free_bytes = nvml.gpu(index).total_bytes, nvml.free_bytes(index)
    if free_bytes >= RESERVE_SHARE * total_bytes:
        return None
    held = nvml.memory_by_process(index) if supervisor is not None else {}
    own_bytes = sum(held.get(pid, 0) for pid in members(supervisor)) if supervisor is not None else 0
    if own_bytes > MODEST_SHARE * memory_share() * total_bytes:
        return None
    own = f" and this evaluation holds {own_bytes >> 20}" if supervisor is not None else ""
    return (
        f"only {free_bytes >> 20} of the {total_bytes >> 20} MiB of {device} are free{own}: "
        "start the sandbox with fewer workers, or give other programs less of the card"
    )
