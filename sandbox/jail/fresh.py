"""Timed calls on inputs that come with the order itself, with outputs left where the oracle can see them.

The oracle's clock starts before the inputs are within reach of this process and stops after a part of the
outputs has been read, so whoever obeys neither this module nor the clock in it still has to do the work in
between.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sandbox.jail.device import Device
from sandbox.jail.tensors import DTYPES, decode

MADV_POPULATE_READ = 22


class FreshCalls:
    """Runs calls on mapped inputs and copies what they return into shared memory.

    Args:
      outputs_fd: memory shared with the oracle; closed here.
    """

    def __init__(self, outputs_fd: int):
        size = os.fstat(outputs_fd).st_size
        self._area = torch.frombuffer(mmap.mmap(outputs_fd, size), dtype=torch.uint8)
        os.close(outputs_fd)
        self._buffers: dict[tuple, torch.Tensor] = {}

    def time(
        self,
        call: Callable[..., Any],
        inputs_fd: int,
        calls: Sequence[dict[str, Any]],
        outputs: Sequence[dict[str, Any]],
    ) -> float:
        """Runs the calls and returns the time that they took together, in milliseconds.

        Args:
          call: the model, or the wrapper of a bare kernel.
          inputs_fd: sealed memory with the inputs; closed here.
          calls: for each call `args` (encoded), `tensors` ({dtype, shape, offset} in the inputs), `offset`
            (in the shared memory, of its first output).
          outputs: {dtype, shape, offset} of each output of one call.
        """
        size = os.fstat(inputs_fd).st_size
        area = mmap.mmap(inputs_fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(inputs_fd)
        memory = torch.frombuffer(area, dtype=torch.uint8)
        # Page faults are no part of a call; a kernel too old to know the advice has them there on both sides.
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(size), MADV_POPULATE_READ
        )
        mapped = [[_tensor(memory, tensor, 0) for tensor in entry["tensors"]] for entry in calls]
        places = [[_tensor(self._area, output, entry["offset"]) for output in outputs] for entry in calls]
        span_ns = 0
        for entry, tensors, place in zip(calls, mapped, places, strict=True):
            args = decode(entry["args"], [self._own(number, tensor) for number, tensor in enumerate(tensors)])
            start_ns = time.perf_counter_ns()
            result = call(*args)
            span_ns += time.perf_counter_ns() - start_ns
            for target, output in zip(
                place, result if isinstance(result, (list, tuple)) else [result], strict=True
            ):
                if output.shape != target.shape or output.dtype != target.dtype:
                    raise TypeError(f"an output has type {output.dtype} and shape {list(output.shape)}")
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


def time_calls(
    device: Device, call: Callable[..., Any], prepared: Sequence[tuple[Sequence[Any], Sequence[torch.Tensor]]]
) -> float:
    """Time of calls on a device whose outputs are copied to where the oracle reads them, in ms, without the copies.

    The copies are made once more by themselves to know what they cost.

    Args:
      prepared: for each call its arguments and where its outputs go.
    """
    device.synchronize()
    start_ns = time.perf_counter_ns()
    for args, places in prepared:
        result = call(*args)
        for place, output in zip(places, result if isinstance(result, (list, tuple)) else [result], strict=True):
            if output.shape != place.shape or output.dtype != place.dtype:
                raise TypeError(f"an output has type {output.dtype} and shape {list(output.shape)}")
            place.copy_(output)
    device.synchronize()
    middle_ns = time.perf_counter_ns()
    spare = [torch.empty_like(place) for place in prepared[0][1]]
    device.synchronize()
    copies_ns = time.perf_counter_ns()
    for _, places in prepared:
        for place, other in zip(places, spare, strict=True):
            other.copy_(place)
    device.synchronize()
    return max(0, (middle_ns - start_ns) - (time.perf_counter_ns() - copies_ns)) / 1e6


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
