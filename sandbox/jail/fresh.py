"""Timed calls on inputs that this process has not seen before, with outputs left where the oracle can see them.

Inputs are written into this process's memory while it is stopped, or come with the order itself. The oracle's clock starts before
they are within reach and stops after a part of the outputs has been read, so whoever obeys neither this module nor the
clock in it still has to do the work in between.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sandbox.jail.pages import huge_zeros
from sandbox.jail.tensors import DTYPES, decode

MADV_POPULATE_READ = 22
READY, GO, DONE, FAILED = b"r", b"g", b"d", b"f"
"""What a runner (GO: the oracle) says in the middle of an audited block."""


class FreshCalls:
    """Runs calls on fresh inputs; what they return stays where they have put it, for the oracle to read.

    A call gets its inputs where they have arrived, so there is nothing to do beside the calls whose time would have to be
    forgiven, and which a candidate could leave out. What a call returned is given up just before the same call of the
    next block, which so finds memory that is in use already, as ordinary calls do.

    Args:
      outputs_fd: memory shared with the oracle that outputs are to be copied into instead, and inputs are copied out of the mapping
        first, so that calls may change them; closed here.
      inputs_bytes: of the memory that the oracle writes inputs to.
      twice: make every call again afterwards, when its inputs are near.

    Attributes:
      inputs: uint8 [inputs_bytes], written by the oracle while this process is stopped.
      left: for each call of the last block and each of its outputs the address and the strides.
      warm_ms: time of the calls of `again` together.
    """

    def __init__(self, outputs_fd: int | None = None, *, inputs_bytes: int = 0, twice: bool = False):
        self.inputs = huge_zeros(inputs_bytes)
        self._area: torch.Tensor | None = None
        if outputs_fd is not None:
            size = os.fstat(outputs_fd).st_size
            self._area = torch.frombuffer(mmap.mmap(outputs_fd, size), dtype=torch.uint8)
            os.close(outputs_fd)
        self._twice = twice
        self._buffers: dict[tuple, torch.Tensor] = {}
        self._ready: list[list[Any]] = []
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []
        self._held: list[list[torch.Tensor]] = []
        self.left: list[list[tuple[int, list[int]]]] = []
        self.warm_ms = 0.0

    def prepare(self, calls: Sequence[dict[str, Any]], outputs: Sequence[dict[str, Any]]) -> None:
        """Gets ready for blocks whose inputs will be written to `self.inputs`.

        Args:
          calls: for each call `args` (encoded) and `tensors` ({dtype, shape, offset} in the inputs).
          outputs: {dtype, shape} of each output of one call.
        """
        self._ready = _arguments(self.inputs, calls)
        self._kinds = [(torch.Size(entry["shape"]), DTYPES[entry["dtype"]]) for entry in outputs]
        self._held = [[] for _ in calls]

    def time(self, call: Callable[..., Any]) -> float:
        """Runs the prepared calls on what the inputs are now and returns the time that they took together, in milliseconds.

        Args:
          call: the model, or the wrapper of a bare kernel.
        """
        span_ns = 0
        for number, args in enumerate(self._ready):
            self._held[number] = []
            start_ns = time.perf_counter_ns()
            result = call(*args)
            span_ns += time.perf_counter_ns() - start_ns
            held = outputs_of(result, self._kinds)
            if any(output.is_neg() or output.is_conj() for output in held):  # still to be computed
                start_ns = time.perf_counter_ns()
                held = [output.resolve_conj().resolve_neg() for output in held]
                span_ns += time.perf_counter_ns() - start_ns
            self._held[number] = held
        self.left = [[(output.data_ptr(), list(output.stride())) for output in held] for held in self._held]
        return span_ns / 1e6

    def again(self, call: Callable[..., Any]) -> None:
        """Where calls are made twice: the same ones when all is near. They come after the others and not between them, or these would
        find near what a candidate's do not."""
        if not self._twice:
            return
        span_ns = 0
        for args in self._ready:
            call(*args)
            start_ns = time.perf_counter_ns()
            call(*args)
            span_ns += time.perf_counter_ns() - start_ns
        self.warm_ms = span_ns / 1e6

    def places(self) -> bytes:
        """`left` as numbers of 8 bytes each, one after the other."""
        numbers = [number for outputs in self.left for address, strides in outputs for number in (address, *strides)]
        return struct.pack(f"={len(numbers)}q", *numbers)

    def time_copying(
        self, call: Callable[..., Any], inputs_fd: int, calls: Sequence[dict[str, Any]], outputs: Sequence[dict[str, Any]]
    ) -> float:
        """Runs calls on inputs that come with the order, copies them out of reach of each other, and the outputs into the oracle's
        memory; the copies are no part of the time.

        Args:
          inputs_fd: sealed memory with the inputs; closed here.
          calls: as for `prepare`, with `offset` (in the shared memory, of its first output).
          outputs: {dtype, shape, offset} of each output of one call.
        """
        memory = _map(inputs_fd)
        mapped = [[_tensor(memory, tensor, 0) for tensor in entry["tensors"]] for entry in calls]
        kinds = [(torch.Size(entry["shape"]), DTYPES[entry["dtype"]]) for entry in outputs]
        places = [[_tensor(self._area, output, entry["offset"]) for output in outputs] for entry in calls]
        span_ns = 0
        for entry, tensors, place in zip(calls, mapped, places, strict=True):
            args = decode(entry["args"], [self._own(number, tensor) for number, tensor in enumerate(tensors)])
            start_ns = time.perf_counter_ns()
            result = call(*args)
            span_ns += time.perf_counter_ns() - start_ns
            for target, output in zip(place, outputs_of(result, kinds), strict=True):
                _copy(target, output)
        return span_ns / 1e6

    def _own(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in memory of this process and in the cache, where the inputs of ordinary timed calls are; else
        both sides would mostly wait for the same memory, and a fast kernel would look like the reference."""
        key = (number, tensor.dtype, tensor.shape)
        if key not in self._buffers:
            self._buffers[key] = torch.empty_like(tensor)
        _copy(self._buffers[key], tensor)
        return self._buffers[key]


def _arguments(memory: torch.Tensor, calls: Sequence[dict[str, Any]]) -> list[list[Any]]:
    return [decode(entry["args"], [_tensor(memory, tensor, 0) for tensor in entry["tensors"]]) for entry in calls]


def _map(inputs_fd: int) -> torch.Tensor:
    """Sealed memory as this process's own; changes stay here. Closes the descriptor."""
    size = os.fstat(inputs_fd).st_size
    area = mmap.mmap(inputs_fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(inputs_fd)
    memory = torch.frombuffer(area, dtype=torch.uint8)
    # Page faults are no part of a call; a kernel too old to know the advice has them there on both sides.
    ctypes.CDLL(None).madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(size), MADV_POPULATE_READ)
    return memory


def outputs_of(result: Any, kinds: Sequence[tuple[torch.Size, torch.dtype]]) -> list[torch.Tensor]:
    """What a call returned as a list. Raises TypeError where that is not what the task's calls return."""
    found = list(result) if isinstance(result, (list, tuple)) else [result]
    for (shape, dtype), output in zip(kinds, found, strict=True):
        if output.shape != shape or output.dtype != dtype:
            raise TypeError(f"an output has type {output.dtype} and shape {list(output.shape)}")
    return found


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies on this thread alone: PyTorch's own copy would wake its threads, ready for the reference, not for others."""
    if source.is_contiguous():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        target.copy_(source)


def _tensor(memory: torch.Tensor, entry: dict[str, Any], base: int) -> torch.Tensor:
    dtype, shape = DTYPES[entry["dtype"]], torch.Size(entry["shape"])
    start = base + entry["offset"]
    return memory[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
