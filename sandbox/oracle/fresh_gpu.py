"""The audit of a timing on a GPU (see `sandbox.oracle.fresh`): fresh inputs and all outputs in shared device memory.

The oracle's clock starts before the inputs are written into the candidate's arena and stops when a random part of
every call's outputs has been read from it, so nothing is gained by work that was done before or is left for later.
Where both runners can record a block's calls (`sandbox.jail.fresh.ArenaCalls`) they replay them, so that what the
clock sees is the device's time and not that of the host's launches.
Every call has inputs of its own, at addresses of their own: those of the checks with every value changed a little, so
that they stay as valid as the author's and no answer known for others is near enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sandbox.jail.arena import padded, read, write
from sandbox.jail.carrier import ArenaCarrier
from sandbox.jail.frames import Message
from sandbox.jail.tensors import DTYPES
from sandbox.oracle.clock import claim_of
from sandbox.oracle.fresh import Run

BLOCK_MS = 2.0
"""Intended length of a block of the reference; messages cost about 0.2 ms."""
BLOCKS = 5
MAX_CALLS = 64
RECORDINGS = ("apart", "together", "")
"""Ways to record calls (see `sandbox.jail.fresh.ArenaCalls`), the most exact first."""
JITTER = 0.02
"""Width of the factor by which each value changes: far above every tolerance."""


@dataclass(frozen=True)
class GpuBlock:
    """Inputs of one block of calls.

    Attributes:
      calls: of each its `args` as encoded and its `tensors` ({dtype, shape, offset} in the memory).
      memory: uint8, of the oracle; a runner gets a copy.
    """

    calls: list[dict[str, Any]]
    memory: torch.Tensor


def calls_of_block(eager_ms: float, input_bytes: int, output_bytes: int, half_bytes: int) -> int:
    """How many calls a block has: by time, and as many as fit into half an arena each way; 0 if none does.

    Args:
      input_bytes, output_bytes: room that one call's tensors take, each padded.
    """
    by_time = max(2, round(BLOCK_MS / max(eager_ms, 1e-3)))
    room = [half_bytes // size for size in (input_bytes, output_bytes) if size]
    return min(by_time, MAX_CALLS, *room)


def jittered(tensors: Sequence[torch.Tensor], generator: torch.Generator) -> list[torch.Tensor]:
    """The same tensors with every floating-point value changed by up to `JITTER` / 2 of itself, within their range."""
    found = []
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            factor = torch.rand(tensor.shape, generator=generator, device=tensor.device, dtype=torch.float32)
            moved = (tensor * (1 + JITTER * (factor - 0.5))).to(tensor.dtype)
            found.append(torch.minimum(torch.maximum(moved, tensor.min()), tensor.max()))
        else:
            found.append(tensor)
    return found


def draw_blocks(
    args: list[Any], bases: Sequence[Sequence[torch.Tensor]], calls: int, seed: int
) -> list[GpuBlock]:
    """Blocks of fresh inputs made of those that the checks have used, in turn. All blocks have the same layout."""
    device = bases[0][0].device if bases[0] else torch.device("cpu")
    generator = torch.Generator(device).manual_seed(seed)
    return [_block(args, bases, number, calls, generator) for number in range(BLOCKS)]


def _block(
    args: list[Any], bases: Sequence[Sequence[torch.Tensor]], number: int, calls: int, generator: torch.Generator
) -> GpuBlock:
    sets = [jittered(bases[(number + call) % len(bases)], generator) for call in range(calls)]
    room = sum(padded(tensor.nbytes) for tensors in sets for tensor in tensors)
    memory = torch.empty(room, dtype=torch.uint8, device=generator.device)
    entries = write(memory, [tensor for tensors in sets for tensor in tensors])
    assert entries is not None
    each = len(entries) // calls
    return GpuBlock(
        [{"args": args, "tensors": entries[n * each : (n + 1) * each]} for n in range(calls)], memory
    )


class ArenaOutputs:
    """Where one runner leaves the outputs of a block's calls.

    Args:
      order: sends an order to the runner, as `Runner.call`.
      carrier: with the runner's arena.
      entries: {dtype, shape} of each output of a call.
    """

    def __init__(self, order: Callable[..., Message], carrier: ArenaCarrier, entries: Sequence[dict]):
        self._order, self._carrier = order, carrier
        self.entries, offset = [], 0
        for entry in entries:
            self.entries.append({**entry, "offset": offset})
            offset += padded(_bytes(entry))
        self.stride_bytes = offset

    def prepare(self, block: GpuBlock, timeout_s: float, *, record: str) -> str:
        """Has the runner get ready for blocks laid out like this one; returns how it has recorded the calls.

        Args:
          record: the way to try, one of `RECORDINGS`.
        """
        self._give(block)
        calls = [{**call, "offset": number * self.stride_bytes} for number, call in enumerate(block.calls)]
        message = self._order("prepare_arena", timeout_s, calls=calls, outputs=self.entries, record=record)
        recorded = message.header.get("recorded")
        return recorded if recorded in RECORDINGS[RECORDINGS.index(record) :] else ""

    def run(self, block: GpuBlock, places: Sequence[torch.Tensor], timeout_s: float) -> Run:
        """Has the runner do a block's calls; reads the elements numbered `places` (one tensor for each output)."""
        count = len(block.calls)
        grid = self._carrier.half(False)[: count * self.stride_bytes].view(count, self.stride_bytes)
        tables = [
            grid[:, entry["offset"] : entry["offset"] + _bytes(entry)].view(DTYPES[entry["dtype"]])
            for entry in self.entries
        ]
        places = [place.to(grid.device) for place in places]
        self._carrier.synchronize()
        start = time.perf_counter()
        self._give(block)
        message = self._order("time_arena", timeout_s)
        taken = [table[:, place] for table, place in zip(tables, places, strict=True)]
        columns = [part.cpu() for part in taken]
        wall_ms = 1000 * (time.perf_counter() - start)
        samples = [[column[number] for column in columns] for number in range(count)]
        return Run(claim_ms=claim_of(message.header.get("span_ms")), wall_ms=wall_ms, samples=samples)

    def of_call(self, number: int) -> list[torch.Tensor]:
        """Views of one call's outputs, in memory that the runner can still change."""
        shifted = [{**entry, "offset": number * self.stride_bytes + entry["offset"]} for entry in self.entries]
        return read(self._carrier.half(False), shifted)

    def _give(self, block: GpuBlock) -> None:
        self._carrier.half(True)[: len(block.memory)].copy_(block.memory)
        self._carrier.synchronize()


def _bytes(entry: dict) -> int:
    return torch.Size(entry["shape"]).numel() * DTYPES[entry["dtype"]].itemsize
