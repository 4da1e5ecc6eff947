"""Times a candidate against its baselines: alternating blocks of calls, the larger of two clocks, an adaptive end."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sandbox.jail.frames import Message
from sandbox.protocol import Timing
from sandbox.verdict.timing import believed_ms, paired_speedup, span

EMPTY_BLOCKS = 3
EMPTY_MARGIN_MS = 0.05
MAX_CALLS = 2000
SLOW_CALL_MS = 20.0
"""Calls this slow get fewer pairs: the budget is spent anyway."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long and how exactly to time.

    Attributes:
      budget_ms: after this the measurement ends, once `min_pairs` are in.
      block_ms: intended length of a block of calls.
      relative_error: of the speedup's interval; smaller ends the measurement early.
    """

    budget_ms: float
    block_ms: float
    min_pairs: int
    max_pairs: int
    relative_error: float


PLANS = {
    "quick": Plan(budget_ms=80.0, block_ms=3.0, min_pairs=5, max_pairs=30, relative_error=0.03),
    "full": Plan(budget_ms=400.0, block_ms=6.0, min_pairs=9, max_pairs=100, relative_error=0.01),
}


@dataclass
class Side:
    """One timed callable: how to order its runner about, which of its callables, and the input slots to rotate."""

    order: Callable[..., Message]
    slots: Sequence[int]
    deadline: Callable[[], float]
    """Seconds that an order may take now."""
    which: str = "eager"
    calls: int = 1
    call_ms: float = 0.0
    """First estimate of the time of one call."""
    empty_ms: float = 0.0
    kept: int = 0
    """Index of the call whose outputs the runner still holds."""
    samples_ms: list[float] = field(default_factory=list)
    clock_ruled: int = 0

    def block(self, calls: int, keep: int | None = None, flush: bool = True) -> tuple[float, float]:
        """Runs a block; returns (span claimed by the runner, wall time seen here), both for all calls, in ms."""
        start = time.perf_counter()
        message = self.order(
            "time_block", self.deadline(), calls=calls, slots=list(self.slots), keep=keep, flush=flush, which=self.which
        )
        wall_ms = 1000 * (time.perf_counter() - start)
        claimed = message.header.get("span_ms")
        return (float(claimed) if isinstance(claimed, (int, float)) and claimed > 0 else 0.0), wall_ms

    def prepare(self, block_ms: float) -> None:
        """Warms up, measures what an empty block costs, and chooses the number of calls of a block."""
        self.block(1)
        self.empty_ms = 2 * max(self.block(0)[1] for _ in range(EMPTY_BLOCKS)) + EMPTY_MARGIN_MS
        claimed_ms, wall_ms = self.block(2)
        self.call_ms = max(believed_ms(claimed_ms, wall_ms, self.empty_ms)[0] / 2, 1e-4)
        self.calls = int(min(max(block_ms / self.call_ms, 1), MAX_CALLS))

    def sample(self, rng: random.Random) -> None:
        """Times one block and records the time of a call that is believed.

        Every block keeps the outputs of some call, so no block is special to the candidate; the last one's are checked.
        """
        keep = self.kept = rng.randrange(self.calls)
        claimed_ms, wall_ms = self.block(self.calls, keep)
        believed, ruled = believed_ms(claimed_ms, wall_ms, self.empty_ms)
        self.samples_ms.append(max(believed, 1e-6) / self.calls)
        self.clock_ruled += ruled

    def slope_ms(self) -> float:
        """Wall time of one more back-to-back call, from blocks of N and 3N calls without flushing."""
        walls = {factor: min(self.block(factor * self.calls, flush=False)[1] for _ in range(3)) for factor in (1, 3)}
        return max(walls[3] - walls[1], 0.0) / (2 * self.calls)


def measure(
    candidate: Side, baselines: dict[str, Side], plan: Plan, rng: random.Random, *, use_slope: bool = False
) -> Timing:
    """Times `candidate` and every baseline in alternating order.

    Args:
      candidate, baselines: the sides; `baselines` holds "eager".
      plan: budget and precision.
      rng: chooses the calls whose outputs are kept for checking.
      use_slope: also believe the slope of the wall clock over back-to-back calls (devices that work asynchronously).
    """
    eager = baselines["eager"]
    sides = [candidate, *baselines.values()]
    for side in sides:
        side.prepare(plan.block_ms)
    min_pairs = plan.min_pairs if max(candidate.call_ms, eager.call_ms) < SLOW_CALL_MS else 3
    start = time.perf_counter()
    for pair in range(plan.max_pairs):
        for side in sides if pair % 2 == 0 else reversed(sides):
            side.sample(rng)
        if pair + 1 >= min_pairs:
            speedup = paired_speedup(candidate.samples_ms, eager.samples_ms)
            if speedup.relative_error <= plan.relative_error:
                break
            if 1000 * (time.perf_counter() - start) >= plan.budget_ms:
                break
    bound_by = "runner span" if candidate.clock_ruled * 2 <= len(candidate.samples_ms) else "oracle wall clock"
    if use_slope:
        bound_by = _raise_to_slope(candidate, bound_by)
        for side in baselines.values():
            _raise_to_slope(side, "")
    speedup = paired_speedup(candidate.samples_ms, eager.samples_ms)
    timing = Timing(
        candidate=span(candidate.samples_ms), baselines={name: span(side.samples_ms) for name, side in baselines.items()},
        speedup=speedup.median, speedup_low=speedup.low, speedup_high=speedup.high,
        noisy=speedup.low <= 1.0 <= speedup.high, bound_by=bound_by,
    )  # fmt: skip
    return timing


def _raise_to_slope(side: Side, bound_by: str) -> str:
    """Raises samples that lie below the slope of the oracle's own clock; says which clock ruled."""
    slope_ms = side.slope_ms()
    raised = [max(sample, slope_ms) for sample in side.samples_ms]
    ruled = sum(slope_ms > sample for sample in side.samples_ms) * 2 > len(raised)
    side.samples_ms = raised
    return "oracle wall clock" if ruled else bound_by
