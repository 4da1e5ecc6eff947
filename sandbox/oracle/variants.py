"""Other distributions of a task's inputs, for answers that are right only on the one that its author drew
from.

Whatever structure inputs may have survives: zeros stay zeros, a symmetric or triangular matrix stays one, a
range that starts at 0 is not left.
"""

from __future__ import annotations

import torch

from sandbox.protocol import InputVariant

SCALE = 3.0
KEPT_SHARE = 0.25
"""Share of the elements that a sparse variant keeps."""


def varied(tensors: list[torch.Tensor], variant: InputVariant, seed: int) -> list[torch.Tensor] | None:
    """Inputs of another distribution; None where the variant would leave all of them as they are."""
    generators: dict[torch.device, torch.Generator] = {}
    changed = []
    for tensor in tensors:
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device).manual_seed(seed)
        changed.append(_vary(tensor, variant, generators[tensor.device]))
    if all(new is None for new in changed):
        return None
    return [old if new is None else new for old, new in zip(tensors, changed, strict=True)]


def _vary(tensor: torch.Tensor, variant: InputVariant, generator: torch.Generator) -> torch.Tensor | None:
    if not tensor.is_floating_point() or tensor.numel() < 2:
        return None
    low, high = tensor.min().item(), tensor.max().item()
    both_signs = low < 0 < high
    if variant == "scaled":
        return tensor * (SCALE if both_signs else 1 / SCALE)
    if variant == "shifted":
        if not both_signs:
            return None
        by = tensor.to(torch.float32).std().item()
        return torch.where(tensor != 0, tensor + by, tensor)
    if not (both_signs or 0 <= low < 0.05 * high):
        return None
    return torch.where(_mask(tensor.shape, generator), tensor, torch.zeros_like(tensor))


def _mask(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Which elements stay; for square matrices rows and columns of the same numbers, so that symmetry
    survives."""
    if len(shape) >= 2 and shape[-1] == shape[-2]:
        rows = torch.rand(shape[-1], generator=generator, device=generator.device) < KEPT_SHARE**0.5
        return (rows[:, None] & rows[None, :]).expand(shape)
    return torch.rand(shape, generator=generator, device=generator.device) < KEPT_SHARE
