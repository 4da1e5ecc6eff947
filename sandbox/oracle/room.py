"""Memory of a GPU that many processes share: kept free in time, and never held against the wrong one.

References stay warm in processes of their own, several to an oracle, several oracles to a card, and a trainer may hold
half of it. So an oracle gives up warm references while less than `RESERVE_SHARE` of the card is free, and a process
that ran out of memory on a card that others have filled has not failed: its evaluation is repeated.
"""

from __future__ import annotations

from collections.abc import Callable

from sandbox.jail import nvml
from sandbox.jail.device_cuda import memory_share, physical_index
from sandbox.jail.processes import members

RESERVE_SHARE = 0.1
"""Share of the card that is kept free for the evaluation at hand."""
CROWDED_BYTES = 4 << 30
"""With less than this left, running out says nothing about who asks for a little."""
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


def crowded(device: str, supervisor: int | None = None) -> str | None:
    """Why running out of memory was not the doing of the jail of `supervisor` (of nobody in particular), or None.

    A jail that holds more than `MODEST_SHARE` of its allowance is never excused.
    """
    if not device.startswith("cuda"):
        return None
    index = physical_index(device)
    total_bytes, free_bytes = nvml.gpu(index).total_bytes, nvml.free_bytes(index)
    if free_bytes >= CROWDED_BYTES:
        return None
    held = nvml.memory_by_process(index) if supervisor is not None else {}
    own_bytes = sum(held.get(pid, 0) for pid in members(supervisor)) if supervisor is not None else 0
    if own_bytes > MODEST_SHARE * memory_share() * total_bytes:
        return None
    return (
        f"only {free_bytes >> 20} of the {total_bytes >> 20} MiB of {device} are free and this evaluation holds "
        f"{own_bytes >> 20}: start the sandbox with fewer workers, or give other programs less of the card"
    )
