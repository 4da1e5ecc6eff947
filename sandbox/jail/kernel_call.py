"""The wrapper around a bare C kernel: allocates outputs, passes pointers, and can stand guard around a
call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

GUARD_BYTES = 64
POISON_INTEGER = {torch.bool: 1, torch.uint8: 0xA5}


class GuardError(RuntimeError):
    """The kernel wrote outside its outputs."""


class KernelCall:
    """Calls `void kernel(inputs..., state..., outputs...)` like the reference's forward.

    Args:
      library: path that the dynamic loader accepts.
      state: parameters and buffers in the order of the signature.
      outputs: (dtype, shape) of each output.
      is_tuple: whether the reference returns a tuple, even of one.

    Raises:
      OSError: the library cannot be loaded. AttributeError: it lacks `kernel`.
    """

    def __init__(
        self,
        library: str,
        state: Sequence[torch.Tensor],
        outputs: Sequence[tuple[torch.dtype, list[int]]],
        is_tuple: bool,
    ):
        self._function = ctypes.CDLL(library).kernel
        self._function.restype = None
        self._state = list(state)
        self._state_pointers = [tensor.data_ptr() for tensor in state]
        self._outputs = list(outputs)
        self._is_tuple = is_tuple
        self._typed = False

    def __call__(self, *args: Any) -> Any:
        outputs = [torch.empty(shape, dtype=dtype) for dtype, shape in self._outputs]
        self._launch(args, outputs)
        return tuple(outputs) if self._is_tuple else outputs[0]

    def guarded(self, *args: Any) -> Any:
        """As a call, but outputs start as NaN (integers as a pattern) and lie between guards that must
        survive.

        Raises:
          GuardError: a guard changed.
        """
        guards, outputs = [], []
        for dtype, shape in self._outputs:
            count = torch.Size(shape).numel()
            margin = GUARD_BYTES // dtype.itemsize
            whole = torch.empty(count + 2 * margin, dtype=dtype)
            _poison(whole)
            raw = whole.view(torch.uint8)
            outputs.append(whole[margin : margin + count].view(shape))
            guards.append((raw[:GUARD_BYTES], raw[:GUARD_BYTES].clone(), "before"))
            guards.append((raw[-GUARD_BYTES:], raw[-GUARD_BYTES:].clone(), "after the end of"))
        self._launch(args, outputs)
        for number, (now, then, where) in enumerate(guards):
            if not torch.equal(now, then):
                raise GuardError(f"the kernel wrote {where} its output {number // 2}")
        return tuple(outputs) if self._is_tuple else outputs[0]

    def _launch(self, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
        pointers = [arg.data_ptr() for arg in args if isinstance(arg, torch.Tensor)]
        pointers += self._state_pointers
        pointers += [tensor.data_ptr() for tensor in outputs]
        if not self._typed:
            self._function.argtypes = [ctypes.c_void_p] * len(pointers)
            self._typed = True
        self._function(*pointers)


def _poison(tensor: torch.Tensor) -> None:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype in POISON_INTEGER:
        tensor.fill_(POISON_INTEGER[tensor.dtype])
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min + 0x5A)
