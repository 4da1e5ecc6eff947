"""How exact a reference is itself: the measure for the exactness that a candidate owes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

FACTOR = 16.0
"""Another order of the same operations rounds otherwise, by a few times as much, and not evenly."""


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Error of one output against float64.

    Attributes:
      relative_rms: root mean square of the error over that of the output; infinite where the output is
        exactly zero.
      bounds: (atol, rtol) that an honest candidate keeps.
    """

    relative_rms: float
    bounds: tuple[float, float]

    def or_worse(self, other: Rounding) -> Rounding:
        """Of two draws what is larger."""
        bounds = (max(self.bounds[0], other.bounds[0]), max(self.bounds[1], other.bounds[1]))
        return Rounding(relative_rms=max(self.relative_rms, other.relative_rms), bounds=bounds)


def rounding(exact: torch.Tensor, value: torch.Tensor) -> Rounding:
    """The error of `value` against `exact` (the same in float64), both finite and of one shape."""
    if not value.is_floating_point():
        return Rounding(relative_rms=0.0, bounds=(0.0, 0.0))
    wide, narrow = exact.to(torch.float64), value.to(torch.float64)
    error, size = (narrow - wide).abs(), wide.square().mean().sqrt().item()
    epsilon = torch.finfo(value.dtype).eps
    beyond = (error - epsilon * wide.abs()).clamp_min(0).max().item()
    atol = FACTOR * max(beyond, epsilon * size)
    rms = error.square().mean().sqrt().item()
    # An output that is exactly zero but for rounding says nothing about the precision of another.
    relative = rms / size if size > 0 else math.inf
    return Rounding(relative_rms=relative, bounds=(atol, FACTOR * epsilon))
