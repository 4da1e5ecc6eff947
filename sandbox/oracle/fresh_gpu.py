"""The audit of a timing on a GPU (see `sandbox.oracle.fresh`): fresh inputs and all outputs in shared device memory.

The oracle's clock starts before the inputs are written into the candidate's arena and stops when a random part of
every call's outputs has been read from it, so nothing is gained by work that was done before or is left for later.
Where both runners can record a block's calls (`sandbox.jail.arena_calls`) they replay them, so that what the
clock sees is the device's time and not that of the host's launches. Outputs are read where the calls have left them in
the arena: there is no copy whose time would have to be forgiven.
Every call has inputs of its own, at addresses of their own: those of the checks with every value changed a little, so
that they stay as valid as the author's and no answer known for others is near enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sandbox.jail.arena import padded, write
from sandbox.jail.carrier import ArenaCarrier
from sandbox.jail.frames import Message
from sandbox.jail.jitter import jittered
from sandbox.jail.tensors import DTYPES
from sandbox.oracle.clock import claim_of
from sandbox.oracle.fresh import Run
from sandbox.oracle.left import OutputsLost, Where, checked_places, element_numbers

BLOCK_MS = 4.0
"""Intended length of a block of the reference."""
MAX_CALLS = 1024
APART_MS = 0.2
"""What a block costs beyond its calls, messages and the device's way from process to process, is about 1.1 ms and differs by
so much between two processes, each as long as it lives (seen on an H200 machine: up to 0.2 ms)."""
MOST_ITEM_BYTES = 16
MAX_REASON_CHARS = 300


@dataclass(frozen=True)
class GpuBlock:
    """Inputs of one block of calls.

    Attributes:
      calls: of each its `args` as encoded and its `tensors` ({dtype, shape, offset} in the memory).
      memory: uint8, of the oracle; a runner gets a copy.
    """

    calls: list[dict[str, Any]]
    memory: torch.Tensor


def calls_of_block(eager_ms: float, input_bytes: int, output_bytes: int, part_bytes: int) -> int:
    """How many calls a block has: by time, and as many as fit into an arena's part each way; 0 if none does.

    Args:
      input_bytes, output_bytes: room that one call's tensors take, each padded.
    """
    by_time = max(2, round(BLOCK_MS / max(eager_ms, 1e-3)))
    room = [part_bytes // size for size in (input_bytes, output_bytes) if size]
    return min(by_time, MAX_CALLS, *room)


def draw_blocks(
    args: list[Any], bases: Sequence[Sequence[torch.Tensor]], calls: int, seed: int, blocks: int
) -> list[GpuBlock]:
    """`blocks` blocks of fresh inputs made of those that the checks have used, in turn. All blocks have the same layout."""
    device = bases[0][0].device if bases[0] else torch.device("cpu")
    generator = torch.Generator(device).manual_seed(seed)
    return [_block(args, bases, number, calls, generator) for number in range(blocks)]


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
    """What one runner's calls on a block of inputs return, where they leave it in its arena.

    Args:
      order: sends an order to the runner, as `Runner.call`.
      carrier: with the runner's arena.
      entries: {dtype, shape} of each output of a call.
      twice: have the runner do a block's calls a second time, when their memory is near.
      failing: makes the exception for a runner whose outputs cannot be found.

    Attributes:
      launch_ms: of a block's time, what its launch takes where it is recorded, as the runner says; 0 until `find_launch`.
      refused: why it has recorded nothing, as it says.
    """

    apart_ms = APART_MS

    def __init__(
        self,
        order: Callable[..., Message],
        carrier: ArenaCarrier,
        entries: Sequence[dict],
        *,
        twice: bool = False,
        failing: Callable[[str], Exception] = OutputsLost,
    ):
        self._order, self._carrier, self._twice, self._failing = order, carrier, twice, failing
        self.entries, offset = [], 0
        for entry in entries:
            self.entries.append({**entry, "offset": offset})
            offset += padded(_bytes(entry))
        self.stride_bytes = offset
        self._left: list[list[Where]] = []
        self._where: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._recorded = False
        self.launch_ms, self.refused = 0.0, ""

    def prepare(self, block: GpuBlock, timeout_s: float, *, record: bool) -> bool:
        """Has the runner get ready for blocks laid out like this one; returns whether it has recorded the calls.

        Args:
          record: whether it shall try.
        """
        self._give(block)
        calls = [{**call, "offset": number * self.stride_bytes} for number, call in enumerate(block.calls)]
        message = self._order(
            "prepare_arena", timeout_s, calls=calls, outputs=self.entries, record=record, twice=self._twice
        )
        self._left, self._recorded = [], record and message.header.get("recorded") is True
        self.refused = str(message.header.get("refused") or "")[:MAX_REASON_CHARS]
        return self._recorded

    def find_launch(self, timeout_s: float) -> None:
        """Has the runner, the reference's, find out `launch_ms`. To be called while the device is this evaluation's alone."""
        message = self._order("time_launch", timeout_s)
        self.launch_ms = claim_of(message.header.get("launch_ms"))

    def run(self, block: GpuBlock, places: Sequence[torch.Tensor], timeout_s: float) -> Run:
        """Has the runner do a block's calls; reads the elements numbered `places` (one tensor for each output)."""
        indices = [element_numbers(place, entry["shape"]) for place, entry in zip(places, self.entries, strict=True)]
        self._carrier.synchronize()
        start = time.perf_counter()
        self._give(block)
        known = self._recorded and bool(self._left)
        message = self._order("time_arena", timeout_s, where=not known)
        if not known:
            self._left = checked_places(message.header.get("left"), self.entries, len(block.calls), self._failing)
            self._where = [self._found(number) for number in range(len(self.entries))]
        columns = [self._column(*where, index) for where, index in zip(self._where, indices, strict=True)]
        wall_ms = 1000 * (time.perf_counter() - start)
        samples = [[column[number] for column in columns] for number in range(len(block.calls))]
        claim_ms, warm_ms = (claim_of(message.header.get(name)) for name in ("span_ms", "warm_ms"))
        return Run(claim_ms=claim_ms, wall_ms=wall_ms, samples=samples, warm_ms=warm_ms if self._twice else 0.0)

    def of_call(self, number: int) -> list[torch.Tensor]:
        """Views of one call's outputs, in memory that the runner can still change."""
        return [
            self._table(entry, [where])[where[0] // DTYPES[entry["dtype"]].itemsize :].as_strided(entry["shape"], where[1])
            if torch.Size(entry["shape"]).numel()
            else torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device=self._carrier.memory.device)
            for entry, where in zip(self.entries, self._left[number], strict=True)
        ]

    def _found(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where one output of every call lies: the arena as a tensor of its type, starts in it [calls], strides [calls,
        dimensions]."""
        entry, where = self.entries[number], [outputs[number] for outputs in self._left]
        dtype = DTYPES[entry["dtype"]]
        if not torch.Size(entry["shape"]).numel():
            where = [(0, [0] * len(entry["shape"]))] * len(where)
        starts = torch.tensor([offset // dtype.itemsize for offset, _ in where])
        return self._table(entry, where), starts, torch.tensor([strides for _, strides in where], dtype=torch.int64)

    @staticmethod
    def _column(table: torch.Tensor, starts: torch.Tensor, strides: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Some elements of one output of every call: [calls, places]; `index` is int64 [dimensions, places]."""
        return table[(starts[:, None] + strides @ index).to(table.device)].cpu()

    def _table(self, entry: dict, where: Sequence[Where]) -> torch.Tensor:
        """The arena as a tensor of an output's type, which holds all of these outputs."""
        memory, dtype = self._carrier.memory, DTYPES[entry["dtype"]]
        table = memory[: len(memory) // MOST_ITEM_BYTES * MOST_ITEM_BYTES].view(dtype)
        most = max(offset // dtype.itemsize for offset, _ in where)
        reach = max(
            sum((size - 1) * stride for size, stride in zip(entry["shape"], strides, strict=True))
            for strides in {tuple(strides) for _, strides in where}
        )
        if most + reach >= len(table) or any(offset % dtype.itemsize for offset, _ in where):
            raise self._failing(f"an output of shape {entry['shape']} does not lie in the {len(memory)} bytes shared")
        return table

    def _give(self, block: GpuBlock) -> None:
        self._carrier.part("inputs")[: len(block.memory)].copy_(block.memory)
        self._carrier.synchronize()


def _bytes(entry: dict) -> int:
    return torch.Size(entry["shape"]).numel() * DTYPES[entry["dtype"]].itemsize
