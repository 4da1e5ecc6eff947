"""The audit of a timing: calls on inputs that the candidate has never seen, between two readings of our clock.

A runner's word counts for nothing here. Inputs come within its reach only after the oracle's clock has started: they are
written to its memory while it is stopped, or lie in sealed memory whose descriptor it then gets. The clock stops when a random
part of every call's outputs has been read from where they lie. Work done before (replays, caches, precomputed answers) or after
(threads, lazy results) the span is therefore impossible, and a call that is left out shows in the outputs. What the messages cost is
taken from the reference, which does the same on the same inputs, and whose own clock is believed. Written inputs are where the
process has its pages already, and near; a mapping costs milliseconds, and each page of it again when it is first used.

Calls on fresh memory are still slower than the ordinary ones, whose inputs are in the cache. By how much is seen with the
reference, which makes each audited call a second time (`cold_ms`); a candidate is forgiven as much, since nobody can
read and write that memory without waiting for it. What a candidate could leave out is not there to be forgiven: inputs
are used where they arrive, outputs are read where they were left (`sandbox.oracle.left`). Copies remain only where calls
change their inputs or return them, and on hosts where the memory of jails cannot be read; there, work can hide in the
time of a copy.
"""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sandbox.jail.frames import Message
from sandbox.jail.tensors import DTYPES, describe
from sandbox.oracle.clock import claim_of
from sandbox.verdict.timing import (
    Interval,
    believed_ms,
    hidden_ms,
    median_interval,
    undisturbed,
)

if TYPE_CHECKING:
    from sandbox.oracle.reference import Inputs

ALIGN_BYTES = 64
AUDIT_SLOT = 1003
"""Slot of the reference's runner through which the pool's inputs are drawn."""
BLOCK_MS = 1.2
"""Intended length of a block of the reference; below this the cost of messages would drown it."""
BLOCKS, FEW_BLOCKS = 8, 4
MAX_CALLS, FEW_CALLS = 32, 4
MAX_BLOCK_BYTES = 16 << 20
MAX_POOL_BYTES = 192 << 20
SLOW_CALL_MS = 20.0
TRUSTED_SHARE = 0.5
"""Share of the blocks that counts, the fastest, as others use the processor too."""
SAMPLES = 64
"""Elements of each output of each call that are read while the clock runs."""
LEAST_SHARE = 0.3
"""What stays of an audited call's time, however much is forgiven for memory that was not near."""
_PIECE_BYTES = 1 << 18
USES = 16
"""Evaluations that one pool serves: a candidate keeps nothing, but what it prints might tell of a few
numbers."""

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


@dataclass(frozen=True)
class Block:
    """Inputs of one block of calls: sealed memory and where in it the arguments of each call lie."""

    fd: int
    calls: list[dict[str, Any]]

    @property
    def bytes(self) -> int:
        return os.fstat(self.fd).st_size

    @functools.cached_property
    def memory(self) -> torch.Tensor:
        """All of it, uint8 [bytes], to be read only."""
        area = mmap.mmap(self.fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        return torch.frombuffer(area, dtype=torch.uint8)

    def warm(self) -> None:
        """Reads it all, so that whoever comes first does not wait longer for the memory than who comes second."""
        with mmap.mmap(self.fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) as area:
            for start in range(0, len(area), _PIECE_BYTES):
                area[start : start + _PIECE_BYTES]


class Pool:
    """Blocks of fresh inputs of one task, drawn by its reference. Closing it frees the memory."""

    def __init__(self, blocks: Sequence[Block]):
        self.blocks, self.uses = list(blocks), 0

    @classmethod
    def draw(cls, inputs: Callable[[int, int], Inputs], eager_ms: float, outputs_bytes: int) -> Pool:
        """A new pool; the number of calls in a block follows from the reference's speed and the size of
        inputs.

        Args:
          inputs: draws inputs by (seed, slot), as `Reference.inputs`.
          eager_ms: time of one call of the reference.
          outputs_bytes: of one call.
        """
        rng = random.SystemRandom()
        first = inputs(rng.getrandbits(40), AUDIT_SLOT)
        each_bytes = max(first.bytes + outputs_bytes, 1)
        by_time = 1 if eager_ms >= SLOW_CALL_MS else max(FEW_CALLS, round(BLOCK_MS / max(eager_ms, 1e-3)))
        by_room = max(MAX_BLOCK_BYTES // each_bytes, min(FEW_CALLS, MAX_POOL_BYTES // FEW_BLOCKS // each_bytes))
        calls = max(1, min(by_time, MAX_CALLS, by_room))
        blocks = FEW_BLOCKS if eager_ms >= SLOW_CALL_MS else BLOCKS
        blocks = max(FEW_BLOCKS, min(blocks, MAX_POOL_BYTES // (calls * each_bytes)))
        pool = cls([])
        try:
            for _ in range(blocks):
                sets = [inputs(rng.getrandbits(40), AUDIT_SLOT) for _ in range(calls)]
                pool.blocks.append(_sealed(sets))
        except BaseException:
            pool.close()
            raise
        return pool

    def close(self) -> None:
        while self.blocks:
            os.close(self.blocks.pop().fd)


class CopiedOutputs:
    """Memory into which one runner copies the outputs of a block's calls, and where each lies.

    Args:
      order: sends an order to the runner, as `Runner.call`.
      entries: {dtype, shape} of each output of a call.
      calls: most calls of a block.
      timeout_s: of the order.
    """

    launch_ms = apart_ms = 0.0

    def __init__(self, order: Callable[..., Message], entries: Sequence[dict], calls: int, timeout_s: float):
        self._order = order
        self.entries, offset = [], 0
        for entry in entries:
            self.entries.append({**entry, "offset": offset})
            offset += _padded(_bytes(entry))
        self._stride = offset
        fd = os.memfd_create("outputs", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, calls * self._stride)
            self._memory = torch.frombuffer(mmap.mmap(fd, calls * self._stride), dtype=torch.uint8)
            order("open_outputs", timeout_s, twice=False, inputs_bytes=0, fds=[fd])
        finally:
            os.close(fd)

    def run(self, block: Block, places: Sequence[torch.Tensor], timeout_s: float) -> Run:
        """Has the runner do a block's calls; reads the elements numbered `places` (one tensor for each
        output)."""
        calls = [{**call, "offset": number * self._stride} for number, call in enumerate(block.calls)]
        views = [self.of_call(number) for number in range(len(calls))]
        block.warm()
        start = time.perf_counter()
        message = self._order("time_copying", timeout_s, calls=calls, outputs=self.entries, fds=[block.fd])
        samples = [
            [output.reshape(-1)[place] for output, place in zip(outputs, places, strict=True)]
            for outputs in views
        ]
        wall_ms = 1000 * (time.perf_counter() - start)
        return Run(claim_ms=claim_of(message.header.get("span_ms")), wall_ms=wall_ms, samples=samples)

    def of_call(self, number: int) -> list[torch.Tensor]:
        """Views of one call's outputs, in memory that the runner can still change."""
        found = []
        for entry in self.entries:
            start = number * self._stride + entry["offset"]
            flat = self._memory[start : start + _bytes(entry)].view(DTYPES[entry["dtype"]])
            found.append(flat.view(entry["shape"]))
        return found


@dataclass(frozen=True, kw_only=True)
class Run:
    """One block: what the runner claims, what our clock says, the elements read of each call's outputs."""

    claim_ms: float
    wall_ms: float
    samples: list[list[torch.Tensor]]
    warm_ms: float = 0.0
    """What it claims for the second calls, where it makes any."""


@dataclass(kw_only=True)
class Audit:
    """Blocks of candidate and reference on the same inputs, and what they say about one call's time."""

    calls: int
    launch_ms: float = 0.0
    """Of a block's time on either side, what its launch takes and the wait for its end."""
    apart_ms: float = 0.0
    """By so much the gaps of two processes differ that do the same."""
    fewer: float = 1.0
    """How many times more threads of the reference wait for memory at once than of the candidate."""
    candidate: list[Run] = field(default_factory=list)
    reference: list[Run] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return self.apart_ms > 0

    @property
    def cold_ms(self) -> float:
        """What memory that is not near costs a call of the reference; 0 where it makes no second calls.

        On a GPU the fastest block of either kind counts: a device's clock only errs upward, and what is forgiven too much here is the
        candidate's to claim. (Seen on an H200, in one audit of sixty beside eight busy workers: with the middle of the faster half 26 us
        of a kernel of 30 were taken for memory's.)
        """
        both = [run for run in self.reference if run.warm_ms]
        if not both:
            return 0.0
        if self.on_gpu:
            return max(0.0, min(run.claim_ms for run in both) - min(run.warm_ms for run in both)) / self.calls
        first, second = (self._interval([getattr(run, name) for run in both]) for name in ("claim_ms", "warm_ms"))
        return max(0.0, first.median - second.median)

    def times_ms(self) -> tuple[Interval, Interval]:
        """Time of one call of (candidate, reference), the candidate's less `cold_ms` for each thread of its that waits for as much
        memory as one of the reference's.

        The reference's clock is believed, so the gap between it and ours is what a block costs beyond its
        calls: on a CPU the small ones of its gaps, as the candidate's smallest is held against them, and on a machine with other work
        most of either side's are long. A candidate's claim is raised by what its gaps have beyond that in nearly every block, and for
        each block to what no gap of the reference's explains, or on a CPU none but its largest quarter: a block that was
        disturbed more is not among the faster half of the blocks, which counts, on both sides. Of the reference the second
        calls count, where there are any.
        """
        cold = self.cold_ms * self.fewer * self.calls
        believed = [max(time_ms - cold, LEAST_SHARE * time_ms) for time_ms in self._believed_ms()]
        eager = [max((run.warm_ms or run.claim_ms) - self.launch_ms, 1e-6) for run in self.reference]
        return self._interval(believed), self._interval(eager)

    def pairs_ms(self) -> list[tuple[Interval, Interval]]:
        """What the sides may be compared by: `times_ms`, and on a CPU first calls with nothing taken off. What memory costs a call is
        known of the reference alone, so taking it off makes more of a difference than there is between two that do the same."""
        return [self.times_ms()] if self.on_gpu else [self.times_ms(), self._first_times_ms()]

    def _first_times_ms(self) -> tuple[Interval, Interval]:
        eager = [max(run.claim_ms - self.launch_ms, 1e-6) for run in self.reference]
        return self._interval(self._believed_ms()), self._interval(eager)

    def _believed_ms(self) -> list[float]:
        """Times of the candidate's blocks."""
        gaps_ms = sorted(run.wall_ms - run.claim_ms - run.warm_ms for run in self.reference)
        n = len(gaps_ms)
        # On a GPU the middle one, with which `apart_ms` was found.
        small, largest = (gaps_ms[n // 2], gaps_ms[-1]) if self.on_gpu else (gaps_ms[n // 4], gaps_ms[3 * n // 4])
        usual, most = small + self.apart_ms, largest + self.apart_ms
        hidden = hidden_ms([run.wall_ms - run.claim_ms for run in self.candidate], usual)
        found = []
        for run in self.candidate:
            found.append(max(believed_ms(run.claim_ms + hidden, run.wall_ms, most)[0] - self.launch_ms, 1e-6))
        return found

    def _interval(self, blocks_ms: list[float]) -> Interval:
        return median_interval(undisturbed([ms / self.calls for ms in blocks_ms], TRUSTED_SHARE))


def sample_places(entries: Sequence[dict], rng: random.Random) -> list[torch.Tensor]:
    """Random element numbers for each output."""
    places = []
    for entry in entries:
        count = torch.Size(entry["shape"]).numel()
        places.append(torch.tensor([rng.randrange(count) for _ in range(min(SAMPLES, count))], dtype=torch.int64))
    return places


def _sealed(sets: Sequence[Inputs]) -> Block:
    fd = os.memfd_create("inputs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        calls, offset = [], 0
        for inputs in sets:
            entries = []
            for tensor in inputs.tensors:
                entries.append({**describe(tensor), "offset": offset})
                if tensor.numel():
                    _write(fd, tensor.contiguous().reshape(-1).view(torch.uint8).numpy(), offset)
                offset += _padded(tensor.nbytes)
            calls.append({"args": inputs.args, "tensors": entries})
        os.ftruncate(fd, max(offset, ALIGN_BYTES))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return Block(fd, calls)


def _write(fd: int, data: Any, offset: int) -> None:
    view = memoryview(data)
    while view.nbytes:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _padded(size: int) -> int:
    return max(ALIGN_BYTES, -(-size // ALIGN_BYTES) * ALIGN_BYTES)


def _bytes(entry: dict) -> int:
    return torch.Size(entry["shape"]).numel() * DTYPES[entry["dtype"]].itemsize
