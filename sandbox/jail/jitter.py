"""Inputs like given ones, with other values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

JITTER = 0.02
"""Width of the factor by which each value changes: far above every tolerance."""


def jittered(tensors: Sequence[torch.Tensor], generator: torch.Generator | None = None) -> list[torch.Tensor]:
    """The same tensors with every floating-point value changed by up to `JITTER` / 2 of itself, within their range."""
    found = []
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            factor = torch.rand(tensor.shape, generator=generator, device=tensor.device, dtype=torch.float32)
            moved = (tensor * (1 + JITTER * (factor - 0.5))).to(tensor.dtype)
            found.append(torch.minimum(torch.maximum(moved, tensor.min()), tensor.max()))
        else:
            found.append(tensor)
    return found
