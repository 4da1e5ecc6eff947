"""Timed calls on arguments in shared device memory, with outputs left where the oracle can see them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sandbox.jail.device import Device
from sandbox.jail.fresh import outputs_of
from sandbox.jail.jitter import jittered

LAUNCHES = 9

Prepared = tuple[Sequence[Any], Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""A call's arguments, the tensors among them, and places for outputs that do not stay where they are."""


class ArenaCalls:
    """Calls on arguments in an arena; what they return stays where PyTorch's allocator has put it: in the arena's pool.

    Between two readings of a clock stand the host's launches too, which for short kernels take longer than the kernels.
    So the calls are recorded, where the device can do that (`Device.record`), and replayed at once. A recording counts
    only if it proves to work on whatever its inputs hold by then: work that went past it (another stream) shows when
    two calls exchange their inputs (or, where there is room for one call only, when they are changed a little).

    An output that lies elsewhere (memory of the candidate's own, a pool that is full), or where another call's does, is
    copied to its place. That is a part of the calls and of their time: whoever is spared a copy gains nothing that would
    have to be forgiven the others.

    Args:
      prepared: for each call what it works on and where its outputs go if they are copied.
      memory: the arena: uint8.
      pool: of `Device.open_pool`.
      record: whether to try it.
      twice: do all calls a second time after they were timed.

    Attributes:
      recorded: whether `time` replays a recording; else it does the calls anew.
      refused: why it does not, where it was to.
      left: for each call of the last `time` and each of its outputs the offset in `memory` and the strides.
      warm_ms: time of its second calls together.

    Raises:
      TypeError: a call's outputs have another form than the task's.
    """

    def __init__(
        self,
        device: Device,
        call: Callable[..., Any],
        prepared: Sequence[Prepared],
        memory: torch.Tensor,
        pool: Any,
        *,
        record: bool,
        twice: bool,
    ):
        self._device, self._call, self._prepared = device, call, prepared
        self._memory, self._pool, self._twice = memory, pool, twice
        self._held: list[list[torch.Tensor]] = []
        self._little = torch.zeros(1, device=memory.device)
        self._copy_all = True
        self._replay: Callable[[], None] | None = None
        self.left: list[list[tuple[int, list[int]]]] = []
        self.warm_ms = 0.0
        self.refused = ""
        self._do()  # whatever is compiled or tried out at first belongs to no pool and no recording
        ends = self._held[0], self._held[-1]
        before = [[output.clone() for output in held] for held in ends]
        self._copy_all = False
        if record:
            try:
                self._replay = self._recording(before) if len(prepared) > 1 else self._recording_of_one(before[0])
            except torch.OutOfMemoryError:
                if len(prepared) > 1:
                    raise
                self._device.trim()  # of one call's inputs there was no room for another copy
            if self._replay is None:
                self.refused = self._device.refused or "what was recorded does not follow its inputs"
        if self._replay is None:
            self._copy_all = False
            self._do_in_pool()
            self._copy_all = _share_memory(self._held)

    @property
    def recorded(self) -> bool:
        return self._replay is not None

    def time(self) -> float:
        """Does the calls and leaves their outputs; returns the time that they took in ms."""
        work = self._replay or self._do_in_pool
        span_ms = self._timed(work)
        if self._twice:
            self.warm_ms = self._timed(work)
        if self._replay and self.left:
            return span_ms  # a recording leaves its outputs in the same places every time
        first = self._memory.data_ptr()
        self.left = [[(output.data_ptr() - first, list(output.stride())) for output in held] for held in self._held]
        return span_ms

    def launch_ms(self) -> float:
        """What a recording of next to nothing takes, from its launch to its end; 0 where there is no recording. To be found out while
        nobody else works on the device: what others' work adds would be taken off the calls' time, and nothing of short ones be left."""
        if self._replay is None:
            return 0.0
        self._next_to_nothing()  # what is recorded must have been done once
        recorded = self._device.record(self._next_to_nothing)
        return sorted(self._timed(recorded) for _ in range(LAUNCHES))[LAUNCHES // 2] if recorded else 0.0

    def _next_to_nothing(self) -> None:
        self._little.add_(1)

    def _timed(self, work: Callable[[], None]) -> float:
        self._next_to_nothing()  # the device comes from another process, which takes longer than many a block of calls
        self._device.synchronize()
        start_ns = time.perf_counter_ns()
        work()
        self._device.synchronize()
        return (time.perf_counter_ns() - start_ns) / 1e6

    def _do_in_pool(self) -> None:
        with self._device.taking_from(self._pool):
            self._do()

    def _do(self) -> None:
        self._held = []  # the next outputs find memory that is in use already, as those of ordinary calls do
        self._held = [self._settled(self._call(*args), places) for args, _, places in self._prepared]

    def _settled(self, result: Any, places: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One call's outputs where they may stay until they are read."""
        settled = []
        for place, output in zip(places, outputs_of(result, [(place.shape, place.dtype) for place in places]), strict=True):
            stays = self._pool.holds(output) and not (self._copy_all or output.is_neg() or output.is_conj())
            settled.append(output if stays else place.copy_(output))
        return settled

    def _recording_of_one(self, before: Sequence[torch.Tensor]) -> Callable[[], None] | None:
        """A recording of the only call, tried with its inputs changed a little. `before`: its outputs on inputs as they are."""
        inputs = self._prepared[0][1]
        others = jittered(inputs)
        _exchange(inputs, others)
        self._do()
        after = [output.clone() for output in self._held[0]]
        _exchange(inputs, others)
        return self._recording([before, after], others)

    def _recording(
        self, before: Sequence[Sequence[torch.Tensor]], others: Sequence[torch.Tensor] | None = None
    ) -> Callable[[], None] | None:
        """A recording of the calls that has passed the trial with the inputs of first and last call exchanged.

        Args:
          before: outputs of these two on inputs as they are.
          others: inputs that the first call gets in the trial, where there is no other call; `before` holds its outputs on them
            instead of the last one's.
        """
        recorded = self._device.record(self._do, self._pool)
        if recorded is not None and _share_memory(self._held):
            self._copy_all, self._held, recorded = True, [], None  # the pool takes one recording at a time
            recorded = self._device.record(self._do, self._pool)
        if recorded is None:
            return None
        first_inputs, last_inputs = self._prepared[0][1], self._prepared[-1][1] if others is None else others
        _exchange(first_inputs, last_inputs)
        try:
            recorded()
            self._device.synchronize()
            first, last = self._held[0], self._held[-1]
            follows = _took_over(first, before[1], before[0]) and (others is not None or _took_over(last, before[0], before[1]))
        finally:
            _exchange(first_inputs, last_inputs)
        return recorded if follows else None


def _share_memory(outputs: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether outputs of different calls lie in the same memory."""
    owners: dict[int, int] = {}
    for number, tensors in enumerate(outputs):
        for tensor in tensors:
            if tensor.numel() and owners.setdefault(tensor.data_ptr(), number) != number:
                return True
    return False


def _exchange(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> None:
    for one, other in zip(left, right, strict=True):
        held = one.clone()
        one.copy_(other)
        other.copy_(held)


def _took_over(got: Sequence[torch.Tensor], right: Sequence[torch.Tensor], old: Sequence[torch.Tensor]) -> bool:
    """Whether outputs are those of other inputs now (up to what the order of additions changes); outputs that do not
    depend on the inputs can't tell."""
    if all(torch.equal(one, other) for one, other in zip(right, old, strict=True)):
        return False
    pairs = [(_distance(a, b), _distance(a, c)) for a, b, c in zip(got, right, old, strict=True)]
    return all(near <= 0.1 * far or near == 0 for near, far in pairs)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    if not one.numel():
        return 0.0
    wide = [torch.nan_to_num((t.abs() if t.is_complex() else t).to(torch.float64)) for t in (one, other)]
    return float((wide[0] - wide[1]).abs().max())
