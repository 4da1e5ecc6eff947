"""What a schedule is: a named way to write the kernel of one segment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from dk_jax.sft.triton_ops import Module
from dk_jax.sft.triton_plan import Segment

Intent = Literal["good", "slow"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One way to compute a segment.

    Attributes:
      write: adds the kernel and its launch to a module.
      intent: whether it is meant to be fast.
      techniques: keys of `triton_kernels.TECHNIQUES`.
      fits: whether it can compute a segment.
    """

    write: Callable[[Module, Segment], None]
    intent: Intent
    techniques: frozenset[str]
    fits: Callable[[Segment], bool]


def schedule(
    write: Callable[..., None],
    intent: Intent,
    techniques: str = "",
    *,
    fits: Callable[[Segment], bool] = lambda segment: True,
    **options: int | str | bool,
) -> Schedule:
    """A schedule.

    Args:
      write: called with a module, a segment and `options`.
      intent: whether it is meant to be fast.
      techniques: separated by spaces.
      fits: whether it can compute a segment.
      **options: keyword arguments of `write`.
    """
    used = frozenset(techniques.split())
    return Schedule(write=partial(write, **options), intent=intent, techniques=used, fits=fits)


def launch(kernel: str, grid: list[str], arguments: list[str], warps: int, **constants: int | str) -> str:
    """Text of a launch; Triton's default of four warps is left unsaid."""
    options = [f"{name}={value}" for name, value in constants.items()] + (
        [f"num_warps={warps}"] if warps != 4 else []
    )
    extents = ", ".join(grid) + ("," if len(grid) == 1 else "")
    return f"{kernel}[({extents})]({', '.join([*arguments, *options])})"
