"""Work of a GPU recorded as a CUDA graph, and PyTorch's allocator left in order where that fails."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any


class CaptureFailed(RuntimeError):
    """Work can't be captured; the text says why."""


def record(work: Callable[[], None], memory: tuple[int, int], device: Any) -> Callable[[], None]:
    """A replay of the work, which must have been done once before.

    Args:
      memory: id of the pool that holds what it makes; it serves one capture.
      device: a `torch.device` with its index; all its streams are idle, and its current one is not the legacy default
        stream, which can't be captured.

    Raises:
      CaptureFailed: the work waits for the device, or uses a stream of its own that it does not join.
    """
    import torch

    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()  # what it finds to free, a capture may not free
    try:
        graph.capture_begin(pool=memory)
        try:
            work()
        finally:
            graph.capture_end()
    except Exception as error:
        _abandon(memory, device)
        raise CaptureFailed(f"{type(error).__name__}: {error}") from error
    finally:
        if collects:
            gc.enable()
    return graph.replay


def _abandon(memory: tuple[int, int], device: Any) -> None:
    """Ends what the capture has begun with the allocator, and clears its error: the driver reports that once more, to
    whoever asks next."""
    import torch

    with contextlib.suppress(RuntimeError):  # the capture had not even begun
        torch._C._cuda_endAllocateToPool(device.index, memory)
        torch._C._cuda_releasePool(device.index, memory)
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)
