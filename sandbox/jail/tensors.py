"""Tensors and plain Python values as message headers and buffers. Knows torch; executes nothing it
receives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    """Header entry of a tensor. Raises TypeError for a data type that cannot be sent."""
    if tensor.dtype not in NAMES or tensor.layout is not torch.strided:
        raise TypeError(f"a tensor of {tensor.dtype}, {tensor.layout} cannot be sent")
    return {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape)}


def pack(tensors: Sequence[torch.Tensor]) -> tuple[list[dict[str, Any]], list[memoryview]]:
    """Header entries and buffers of contiguous-made host tensors; the buffers share the tensors' memory."""
    entries, buffers = [], []
    for tensor in tensors:
        entries.append(describe(tensor))
        flat = tensor.detach().contiguous().reshape(-1)
        buffers.append(memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b""))
    return entries, buffers


def unpack(entries: Any, buffers: Sequence[memoryview]) -> list[torch.Tensor]:
    """Tensors over the received memory (no copy).

    Raises:
      ValueError: entries and buffers do not agree, or name an unknown data type.
    """
    if not isinstance(entries, list) or len(entries) != len(buffers):
        raise ValueError("number of tensors and of buffers differ")
    tensors = []
    for entry, buffer in zip(entries, buffers, strict=True):
        dtype = DTYPES.get(entry.get("dtype")) if isinstance(entry, dict) else None
        shape = entry.get("shape") if dtype else None
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError("malformed tensor description")
        count = math.prod(shape)
        if buffer.nbytes != count * dtype.itemsize:
            raise ValueError(f"{buffer.nbytes} bytes for a {dtype} tensor of shape {shape}")
        flat = torch.frombuffer(buffer, dtype=dtype) if count else torch.empty(0, dtype=dtype)
        try:
            tensors.append(flat.reshape(shape))
        except (RuntimeError, OverflowError) as error:  # an empty tensor with sizes beyond all bounds
            raise ValueError(f"no tensor has the shape {shape}") from error
    return tensors


def encode(value: Any, tensors: list[torch.Tensor]) -> Any:
    """JSON form of None, bool, int, float, str, dtype, and lists, tuples, dicts of them; tensors join
    `tensors`."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, torch.dtype):
        return {"dtype": NAMES[value]}
    if isinstance(value, tuple):
        return {"tuple": [encode(item, tensors) for item in value]}
    if isinstance(value, list):
        return [encode(item, tensors) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key, tensors), encode(item, tensors)] for key, item in value.items()]}
    raise TypeError(f"an argument of type {type(value).__name__} cannot be sent")


def decode(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Inverse of `encode`."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        if kind == "tensor":
            return tensors[content]
        if kind == "dtype":
            return DTYPES[content]
        if kind == "tuple":
            return tuple(decode(item, tensors) for item in content)
        if kind == "dict":
            return {decode(key, tensors): decode(item, tensors) for key, item in content}
        raise ValueError(f"unknown value kind {kind!r}")
    return value
