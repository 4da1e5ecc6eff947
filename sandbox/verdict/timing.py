"""Statistics of timings: medians with 95 % intervals, speedups, when to stop. Pure functions on numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sandbox.protocol import Span

Z95 = 1.96
MOST_UNREST = 1.1
"""A timing is noisy in which the reference took so many times more or less than usual, or the candidate than in a second timing: by
how much the other side was faster or slower too depends on what each of them needs of the machine."""


def is_noisy(low: float, high: float, unrest: float = 1.0) -> bool:
    """Whether a speedup says little: its interval contains 1, or the machine was not calm."""
    return low <= 1.0 <= high or unrest > MOST_UNREST


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A median and its 95 % interval."""

    median: float
    low: float
    high: float
    samples: int

    def as_span(self) -> Span:
        """The same in the protocol's form; the numbers are milliseconds."""
        return Span(median_ms=self.median, low_ms=self.low, high_ms=self.high, samples=self.samples)

    @property
    def relative_error(self) -> float:
        """Half the interval's width over the median."""
        return (self.high - self.low) / 2 / self.median if self.median > 0 else math.inf


def median_interval(samples: Sequence[float], apart: float = 0.0) -> Interval:
    """Median and its distribution-free 95 % interval from order statistics.

    With fewer than 6 samples no such interval exists, and the full range is given. The interval is wider by `apart` at
    both ends, for what all samples have in common; the lower end stays above a tenth of the median.
    Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    count = len(ordered)
    middle = ordered[count // 2] if count % 2 else (ordered[count // 2 - 1] + ordered[count // 2]) / 2
    rank = 0 if count < 6 else max(0, math.floor(count / 2 - Z95 * math.sqrt(count) / 2))
    low = min(ordered[rank], max(ordered[rank] - apart, 0.1 * middle))
    return Interval(median=middle, low=low, high=ordered[count - 1 - rank] + apart, samples=count)


def span(samples_ms: Sequence[float], apart_ms: float = 0.0) -> Span:
    """Per-call times of blocks as the protocol's `Span`; for `apart_ms` see `median_interval`."""
    return median_interval(samples_ms, apart_ms).as_span()


def undisturbed(samples: Sequence[float], share: float) -> list[float]:
    """The fastest `share` of the samples, at least 3 of them (or all there are).

    On a processor that others use too, a disturbance can only lengthen a block; both sides are trimmed alike.
    """
    return sorted(samples)[: max(math.ceil(share * len(samples)), min(3, len(samples)))]


def speedup(candidate_ms: Sequence[float], baseline_ms: Sequence[float], apart_ms: float = 0.0) -> Interval:
    """Ratio of the medians, baseline over candidate; the interval holds all ratios of the two 95 %
    intervals (for `apart_ms` see `median_interval`)."""
    candidate, baseline = (median_interval(times, apart_ms) for times in (candidate_ms, baseline_ms))
    return Interval(
        median=baseline.median / candidate.median,
        low=baseline.low / candidate.high,
        high=baseline.high / candidate.low,
        samples=min(candidate.samples, baseline.samples),
    )


def believed_ms(span_ms: float, wall_ms: float, empty_ms: float) -> tuple[float, bool]:
    """Time of a block that is believed: the runner's own span, unless the oracle's clock shows that more
    passed.

    Args:
      span_ms: what the runner claims.
      wall_ms: order sent to reply received, on the oracle's clock.
      empty_ms: upper bound of what a block without calls costs on that clock.

    Returns:
      (milliseconds, whether the oracle's clock ruled).
    """
    floor_ms = wall_ms - empty_ms
    return (floor_ms, True) if floor_ms > span_ms else (span_ms, False)


def hidden_ms(gaps_ms: Sequence[float], empty_ms: float) -> float:
    """Time per block that a runner's own clock leaves out in nearly every block.

    A busy machine delays some replies, a lying clock shortens all claims: so the low end of the gaps decides.

    Args:
      gaps_ms: wall time minus claimed span of each block.
      empty_ms: such a gap for a block without calls, generously.
    """
    ordered = sorted(gaps_ms)
    return max(0.0, ordered[len(ordered) // 10] - empty_ms)
