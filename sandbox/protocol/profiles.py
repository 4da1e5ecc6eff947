"""What a profiler sees of a candidate: shares of device time, the hardware's counters, the distance from the card's best."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from sandbox.protocol.base import Reply

_WORDS = {"none": False, "kernels": True, "ncu": "ncu"}


def _known_profile(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value not in _WORDS:
        raise PydanticCustomError(
            "profile_unknown", "profile {value} is not known: use false or none, true or kernels, or ncu", {"value": repr(value)[:60]}
        )
    return _WORDS[value]


Profile = Annotated[bool | Literal["ncu"], BeforeValidator(_known_profile)]
"""False (or "none"): nothing. True (or "kernels"): the kernels' shares of device time. "ncu": these and the hardware's counters."""


class KernelTime(Reply):
    """A kernel's share of the device time of one call; `own`: it is the candidate's; `launches`: how often the call launches it."""

    name: str
    share: float
    ms: float
    own: bool = False
    launches: int = 1


class KernelCounters(Reply):
    """What the hardware counted while a kernel ran, under Nsight Compute's names (`sandbox.profile.metrics` explains them).

    Advice and no evidence: the counters are read by a library in the process that also runs the candidate's code, so they enter neither
    verdict nor reward.

    Attributes:
      kernel: the function's name, without template arguments and parameters.
      own: it is the candidate's; None where the profile of kernels does not tell.
      launches: how many launches of one call were looked at; values are means over them.
      metrics: value by metric; one that the card does not have is missing.
      units: unit by metric, as Nsight Compute calls its base units ("byte", "%", "cycle", ...); "" for plain numbers.
    """

    kernel: str
    own: bool | None = None
    launches: int = 1
    metrics: dict[str, float] = {}
    units: dict[str, str] = {}


class Roofline(Reply):
    """How near a timing comes to what the card could do at best (Williams et al., "Roofline", CACM 2009), for the task as its reference states it.

    Attributes:
      bytes: that a call moves at least: what the reference reads of inputs and parameters, and its outputs, each once.
      flops: floating-point operations of the reference's matrix products, convolutions and attention; other arithmetic is not counted.
      floor_ms: time of the larger of both, at the card's measured memory speed and its data sheet's dense peak for the task's data type.
      share: `floor_ms` over the candidate's time. Above 1 where it needs less than the reference: algebra, TF32.
      bound: which of both is the larger; "unknown" where the card's peak is not known and there are operations to count.
    """

    bytes: float
    flops: float
    floor_ms: float
    share: float
    bound: Literal["memory", "compute", "unknown"]


class CounterSupport(Reply):
    """Whether `profile="ncu"` is taken; `problem` says why not. What only a run shows is found out by the first such evaluation."""

    available: bool = False
    problem: str = "this server knows no hardware counters"
