"""Outputs of audited calls, read from the memory of the runner that made them (see `sandbox.oracle.fresh`).

A copy into memory that the oracle shares takes about as long as a short call, and would have to be forgiven: a
candidate that computes straight into that memory could hide its work in the time of a copy. So nothing is copied. The
runner says where outputs lie, is stopped, and with it the oracle's clock, and the oracle takes what it wants from there. Whatever
a runner says is held against the values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from sandbox.jail.frames import Channel, Message
from sandbox.jail.fresh import DONE, GO, READY
from sandbox.jail.peek import gather, inside, may_read, read, write
from sandbox.jail.processes import stopped
from sandbox.jail.tensors import DTYPES
from sandbox.oracle.clock import claim_of
from sandbox.oracle.fresh import Block, Run
from sandbox.oracle.idle import family

MAX_ADDRESS = 1 << 62
SPREAD = 4
"""Memory that an output with strides of its own may extend over, in multiples of its size."""

Where = tuple[int, list[int]]
"""Address of an output and its strides."""


class Unreadable(Exception):
    """The memory of a runner cannot be read; the text says why."""


class OutputsLost(Exception):
    """What a runner's calls returned is not where it says, or it does not say where; the text says why."""


class LeftOutputs:
    """What one runner's calls on a block of inputs return, where they leave it.

    Args:
      order: sends an order to the runner, as `Runner.call`.
      supervisor: of the runner's processes.
      entries: {dtype, shape} of each output of a call.
      timeout_s: of the first order.
      inputs_bytes: of the largest block.
      twice: have the runner make each call a second time, on inputs that are near by then.
      failing: makes the exception for a runner whose outputs cannot be found, then or later.
      stopped: within what it makes of `supervisor` no thread of the runner runs.

    Raises:
      Unreadable. OutputsLost (or what `failing` makes). What an order raises.
    """

    launch_ms = apart_ms = 0.0

    def __init__(
        self,
        order: Callable[..., Message],
        supervisor: int,
        entries: Sequence[dict],
        timeout_s: float,
        *,
        inputs_bytes: int,
        twice: bool = False,
        failing: Callable[[str], Exception] = OutputsLost,
        stopped: Callable[[int], AbstractContextManager[None]] = stopped,
    ):
        self._order, self._failing, self.entries = order, failing, [{**entry, "offset": 0} for entry in entries]
        self._stopped, self._twice = lambda: stopped(supervisor), twice
        header = order("open_outputs", timeout_s, twice=twice, inputs_bytes=inputs_bytes).header
        claimed, self._inputs = header.get("pid"), header.get("inputs")
        pid = inside(family(supervisor), claimed) if type(claimed) is int else None
        if pid is None:
            raise failing(f"no process of its own is number {str(claimed)[:20]}")
        if not may_read(pid):
            raise Unreadable("this process may not read the memory of its jails")
        if type(self._inputs) is not int or not 0 <= self._inputs < MAX_ADDRESS:
            raise failing(f"the place for inputs is {str(self._inputs)[:60]}")
        self._pid = pid
        self._prepared: list[dict[str, Any]] | None = None
        self._left: list[list[Where]] = []

    def run(self, block: Block, places: Sequence[torch.Tensor], timeout_s: float) -> Run:
        """Has the runner do a block's calls; reads the elements numbered `places` (one tensor for each output)."""
        indices = [element_numbers(place, entry["shape"]) for place, entry in zip(places, self.entries, strict=True)]
        if block.calls != self._prepared:
            self._order("prepare_fresh", timeout_s, calls=block.calls, outputs=self.entries)
            self._prepared = block.calls
        calls, wall_ms = len(block.calls), 0.0
        columns: list[torch.Tensor] = []
        lost: list[Exception] = []

        def between(channel: Channel) -> None:
            nonlocal wall_ms
            channel.take(len(READY))
            try:
                with self._stopped():
                    write(self._pid, self._inputs, block.memory)
                    start = time.perf_counter()
            except OSError as error:
                lost.append(self._failing(str(error)))
            channel.put(GO)
            if channel.take(len(DONE)) != DONE:
                return
            numbers = channel.take(8 * calls * sum(1 + len(entry["shape"]) for entry in self.entries))
            if lost:
                return
            try:
                with self._stopped():
                    wall_ms = 1000 * (time.perf_counter() - start)
                    self._left = places_of(numbers, self.entries, self._failing)
                    columns.extend(self._column(number, index) for number, index in enumerate(indices))
            except Exception as error:  # first the conversation ends, then this counts
                lost.append(error)

        message = self._order("time_fresh", timeout_s, meanwhile=between)
        if lost:
            raise lost[0]
        samples = [[column[call] for column in columns] for call in range(calls)]
        claim_ms, warm_ms = (claim_of(message.header.get(name)) for name in ("span_ms", "warm_ms"))
        if not self._twice:
            return Run(claim_ms=claim_ms, wall_ms=wall_ms, samples=samples)
        # The second calls come after our clock has stopped.
        return Run(claim_ms=claim_ms, wall_ms=wall_ms + warm_ms, samples=samples, warm_ms=warm_ms)

    def of_call(self, number: int) -> list[torch.Tensor]:
        """Copies of one call's outputs."""
        return [self._whole(entry, *where) for entry, where in zip(self.entries, self._left[number], strict=True)]

    def _column(self, number: int, index: torch.Tensor) -> torch.Tensor:
        """Some elements of one output of every call: [calls, places]; `index` is int64 [dimensions, places]."""
        dtype = DTYPES[self.entries[number]["dtype"]]
        where = [outputs[number] for outputs in self._left]
        starts = torch.tensor([address for address, _ in where])
        strides = torch.tensor([strides for _, strides in where], dtype=torch.int64)
        addresses = starts[:, None] + dtype.itemsize * (strides @ index)
        taken = self._safely(lambda: gather(self._pid, addresses.reshape(-1), dtype.itemsize))
        return taken.view(dtype).view(addresses.shape)

    def _whole(self, entry: dict, address: int, strides: list[int]) -> torch.Tensor:
        dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
        if not torch.Size(shape).numel():
            return torch.empty(shape, dtype=dtype)
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if extent > SPREAD * torch.Size(shape).numel():
            raise self._failing(f"an output of shape {shape} is spread over {extent} elements")
        flat = self._safely(lambda: read(self._pid, address, extent * dtype.itemsize)).view(dtype)
        return flat.as_strided(shape, strides).contiguous()

    def _safely(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except OSError as error:
            raise self._failing(str(error)) from error


def places_of(numbers: bytes, entries: Sequence[dict], failing: Callable[[str], Exception]) -> list[list[Where]]:
    """What a runner says about where the outputs of its calls lie, from numbers of 8 bytes, address and strides of each output of
    each call. Raises what `failing` makes for places that cannot be."""
    found = torch.frombuffer(bytearray(numbers), dtype=torch.int64).tolist() if numbers else []
    if not all(0 <= number < MAX_ADDRESS for number in found):
        raise failing("an output's place is no address")
    left, rest = [], iter(found)
    calls = len(found) // max(1, sum(1 + len(entry["shape"]) for entry in entries))
    for _ in range(calls):
        left.append([(next(rest), [next(rest) for _ in entry["shape"]]) for entry in entries])
    return left


def checked_places(
    left: Any, entries: Sequence[dict], calls: int, failing: Callable[[str], Exception]
) -> list[list[Where]]:
    """What a runner says about where the outputs of its calls lie, in the form that it has to have.

    Args:
      left: of each call and each of its outputs (address, strides).
      entries: {dtype, shape} of each output of a call.
      failing: makes the exception for anything else.
    """
    if not isinstance(left, list) or len(left) != calls:
        raise failing("it does not say where each call's outputs lie")
    return [_of_a_call(outputs, entries, failing) for outputs in left]


def _of_a_call(outputs: Any, entries: Sequence[dict], failing: Callable[[str], Exception]) -> list[Where]:
    if not isinstance(outputs, list) or len(outputs) != len(entries):
        raise failing("it does not say where each output lies")
    found = []
    for entry, where in zip(entries, outputs, strict=True):
        address, strides = where if isinstance(where, list | tuple) and len(where) == 2 else (None, None)
        numbers = [address, *(strides if isinstance(strides, list) else [None])]
        count = 1 + len(entry["shape"])
        if len(numbers) != count or not all(type(n) is int and 0 <= n < MAX_ADDRESS for n in numbers):
            raise failing(f"an output's place is {str(where)[:60]}")
        found.append((numbers[0], numbers[1:]))
    return found


def element_numbers(places: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Elements numbered `places` in row-major order by their index in each dimension: int64 [dimensions, places]."""
    if not shape or not len(places):
        return torch.zeros(len(shape), len(places), dtype=torch.int64)
    rest, found = places, []
    for size in reversed(shape):
        found.append(rest % size)
        rest = rest // size
    return torch.stack(found[::-1])  # torch.unravel_index would import two seconds' worth of modules first
