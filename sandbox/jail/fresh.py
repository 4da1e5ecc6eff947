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
        arguments = [
            decode(entry["args"], [_tensor(memory, tensor, 0) for tensor in entry["tensors"]])
            for entry in calls
        ]
        places = [[_tensor(self._area, output, entry["offset"]) for output in outputs] for entry in calls]
        span_ns = 0
        for args, place in zip(arguments, places, strict=True):
            start_ns = time.perf_counter_ns()
            result = call(*args)
            span_ns += time.perf_counter_ns() - start_ns
            for target, output in zip(
                place, result if isinstance(result, (list, tuple)) else [result], strict=True
            ):
                if output.shape != target.shape or output.dtype != target.dtype:
                    raise TypeError(f"an output has type {output.dtype} and shape {list(output.shape)}")
                target.copy_(output)
        return span_ns / 1e6


def _tensor(memory: torch.Tensor, entry: dict[str, Any], base: int) -> torch.Tensor:
    dtype, shape = DTYPES[entry["dtype"]], torch.Size(entry["shape"])
    start = base + entry["offset"]
    return memory[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
