"""Times a candidate against its baselines: alternating blocks of calls, the larger of two clocks, an
adaptive end."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sandbox.jail.frames import Message
from sandbox.oracle.steady import Placement
from sandbox.protocol import Span, Timing
from sandbox.verdict.timing import Interval, believed_ms, hidden_ms, is_noisy, span, speedup, undisturbed

EMPTY_BLOCKS = 5
EMPTY_MARGIN_MS = 0.05
MAX_CALLS = 2000
MAX_CLAIM_MS = 1e9
"""No order takes so long; larger numbers only serve to break arithmetic."""
PROCESS_MS = 0.0006
"""By so much a process may lie off the others on a GPU in the time of the same call, as long as it lives: more samples of one do not
tell more than that. Seen: a standard deviation of 0.45 us among twelve processes for three short kernels in a row."""
SETTLE_BLOCKS, PLACED_SLOWER = 3, 1.3
"""Blocks with threads placed, and without, before the timing; so much slower placed ones may be: a kernel that starts threads of
its own is slower by more."""
FEW_CALLS = 8
"""So many calls tell how long one takes, unless they take longer than a block is meant to."""
SLOW_CALL_MS = 20.0
"""Calls this slow get fewer pairs: the budget is spent anyway."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long and how exactly to time.

    Attributes:
      budget_ms: after this the measurement ends, once `min_pairs` are in.
      block_ms: intended length of a block of calls.
      relative_error: of the speedup's interval; smaller ends the measurement early.
      trusted_share: fastest share of the blocks that counts; below 1 where other processes may disturb.
      tries: on a CPU a timing is made up to so often, as long as the machine is not calm (see `sandbox.oracle.calm`).
      slope_blocks: short and long blocks of back-to-back calls on a GPU; the faster half of either counts.
      audit_blocks: of calls on fresh inputs on a GPU, one of them a rehearsal.
    """

    budget_ms: float
    block_ms: float
    min_pairs: int
    max_pairs: int
    relative_error: float
    trusted_share: float = 0.5
    tries: int = 1
    slope_blocks: int = 12
    audit_blocks: int = 9


PLANS = {
    "quick": Plan(budget_ms=80.0, block_ms=1.0, min_pairs=10, max_pairs=60, relative_error=0.03),
    "full": Plan(budget_ms=400.0, block_ms=1.5, min_pairs=30, max_pairs=300, relative_error=0.01, tries=3),
}
GPU_PLANS = {
    "quick": Plan(budget_ms=40.0, block_ms=1.0, min_pairs=8, max_pairs=60, relative_error=0.03, slope_blocks=6, audit_blocks=4),
    "full": PLANS["full"],
}
"""A GPU has nobody else on it while it is timed, so fewer pairs tell as much."""


def claim_of(value: Any) -> float:
    """A span as a runner states it, in ms: 0 for anything that is not a positive number below `MAX_CLAIM_MS`."""
    return float(value) if type(value) in (int, float) and 0 < value < MAX_CLAIM_MS else 0.0


@dataclass
class Side:
    """One timed callable: how to order its runner about, which of its callables, and the input slots to
    rotate."""

    order: Callable[..., Message]
    slots: Sequence[int]
    deadline: Callable[[], float]
    """Seconds that an order may take now."""
    which: str = "eager"
    flushed: bool = False
    """The device clears its caches before each call. The wall time of such a block holds the clearing too,
    so the runner's span is taken as it is, and the slope over unflushed calls is what it is held against."""
    gap_ms: float = 0.0
    """What the runner's span of a flushed call holds beyond the device's work: the way from one event to the next."""
    placement: Placement | None = None
    """Of the runner's threads, on a CPU."""
    calls: int = 1
    slope_calls: int = 0
    """Of a short block of back-to-back calls; 0 until that is known."""
    call_ms: float = 0.0
    """First estimate of the time of one call."""
    empty_ms: float = 0.0
    """What a block without calls takes on the oracle's clock, in the middle and (generously) at most."""
    most_empty_ms: float = math.inf
    kept: int = 0
    """Index of the call whose outputs the runner still holds."""
    hosts_ms: list[float] = field(default_factory=list)
    """What the host took to issue a call, as the runner says of each block with cleared caches: reported, and no more."""
    claims_ms: list[float] = field(default_factory=list)
    walls_ms: list[float] = field(default_factory=list)
    slope_walls_ms: dict[int, list[float]] = field(default_factory=lambda: {1: [], 3: []})
    """Wall times of blocks of once and three times `slope_calls` back-to-back calls."""

    def block(self, calls: int, keep: int | None = None, flush: bool = True) -> tuple[float, float]:
        """Runs a block; returns (span claimed by the runner, wall time seen here), both for all calls, in
        ms."""
        start = time.perf_counter()
        message = self.order(
            "time_block",
            self.deadline(),
            calls=calls,
            slots=list(self.slots),
            keep=keep,
            flush=flush,
            which=self.which,
        )
        wall_ms = 1000 * (time.perf_counter() - start)
        claimed = message.header.get("span_ms")
        if self.flushed and flush and (host_ms := claim_of(message.header.get("host_ms"))):
            self.hosts_ms.append(host_ms)
        return claim_of(claimed), wall_ms

    def prepare(self, block_ms: float) -> None:
        """Warms up, measures what an empty block costs, and chooses the number of calls of a block."""
        self.block(1)
        empty_ms = sorted(self.block(0)[1] for _ in range(EMPTY_BLOCKS))
        self.empty_ms, self.most_empty_ms = empty_ms[EMPTY_BLOCKS // 2], 2 * empty_ms[-1] + EMPTY_MARGIN_MS
        calls = 2
        claimed_ms, wall_ms = self.block(calls)
        while (
            not self.flushed and max(claimed_ms, wall_ms - self.empty_ms) < block_ms / 2 and calls < MAX_CALLS
        ):
            # Step by step: a claim of next to nothing must not lead to thousands of slow calls at once.
            calls = min(4 * calls, MAX_CALLS)
            claimed_ms, wall_ms = self.block(calls)
        if self.flushed:
            # By now the pause before each call is as long as it needs to be.
            calls = int(min(max(block_ms * calls / max(claimed_ms, 1e-4), calls), FEW_CALLS))
            claimed_ms, wall_ms = self.block(calls)
            spent_ms = max(claimed_ms, wall_ms - self.empty_ms)  # most of it clears the caches
        else:
            claimed_ms = spent_ms = believed_ms(claimed_ms, wall_ms, self.empty_ms)[0]
        self.call_ms = max(claimed_ms / calls, 1e-4)
        self.calls = int(min(max(block_ms * calls / max(spent_ms, 1e-4), 1), MAX_CALLS))

    def settle(self) -> None:
        """Puts the runner's threads on a core each, unless that makes its calls slower than the scheduler's way."""
        if self.placement is None or self.flushed:
            return
        walls_ms: dict[bool, list[float]] = {True: [], False: []}
        for placed in (False, True) * SETTLE_BLOCKS:
            self.placement.use(placed)
            walls_ms[placed].append(self.block(self.calls)[1])
        self.placement.use(min(walls_ms[True]) <= PLACED_SLOWER * min(walls_ms[False]))

    def sample(self, rng: random.Random) -> None:
        """Times one block.

        Every block keeps the outputs of some call, so no block is special to the candidate; the last one's
        are checked.
        """
        keep = self.kept = rng.randrange(self.calls)
        claimed_ms, wall_ms = self.block(self.calls, keep)
        self.claims_ms.append(claimed_ms)
        self.walls_ms.append(wall_ms)

    def times_ms(self, trusted_share: float) -> tuple[list[float], bool]:
        """Believed times of a call, one a block that counts, and whether the oracle's clock ruled most of
        them.

        A claim is raised to what the oracle's clock shows for that very block, less a generous empty
        block; and all claims are raised by what they leave out systematically, which is known more exactly.
        """
        if self.flushed:
            return undisturbed([self._work_ms(claim / self.calls) for claim in self.claims_ms], trusted_share), False
        pairs = list(zip(self.claims_ms, self.walls_ms, strict=True))
        hidden = hidden_ms([wall - claim for claim, wall in pairs], 1.5 * self.empty_ms + EMPTY_MARGIN_MS)
        believed = [believed_ms(claim + hidden, wall, self.most_empty_ms) for claim, wall in pairs]
        times = [max(time_ms, 1e-6) / self.calls for time_ms, _ in believed]
        ruled = hidden > 0 or sum(by_clock for _, by_clock in believed) * 2 > len(believed)
        return undisturbed(times, trusted_share), ruled

    def span(self, times_ms: Sequence[float], apart_ms: float) -> Span:
        """Per-call times as the protocol's `Span`, with what the host took beside them."""
        found = span(times_ms, apart_ms)
        return found.model_copy(update={"host_ms": statistics.median(self.hosts_ms)}) if self.hosts_ms else found

    def _work_ms(self, span_ms: float) -> float:
        """A span without the gap; a tenth of it stays in any case, as nothing takes no time."""
        return max(span_ms - self.gap_ms, 0.1 * span_ms, 1e-6)

    def prepare_slope(self, block_ms: float) -> None:
        """Chooses the number of calls of a short block of back-to-back calls."""
        calls = max(1, min(FEW_CALLS, int(block_ms / self.call_ms)))
        a_call_ms = max(self.block(calls, flush=False)[1] - self.empty_ms, 1e-4) / calls
        self.slope_calls = int(min(max(block_ms / a_call_ms, calls), MAX_CALLS))

    def sample_slope(self) -> None:
        """Times one short and one long block of unflushed calls."""
        for factor, walls in self.slope_walls_ms.items():
            walls.append(self.block(factor * self.slope_calls, flush=False)[1])

    def slopes_ms(self, trusted_share: float) -> list[float]:
        """Wall time of one more back-to-back call: short and long blocks of like rank compared.

        The host's launches are part of it, on either side, as whoever calls waits for the slower of host and device.
        Never less than what the long block alone says: a candidate may draw out the short one.
        """
        short, long = (undisturbed(self.slope_walls_ms[factor], trusted_share) for factor in (1, 3))
        found = []
        for less, more in zip(short, long, strict=True):
            a_call = max((more - less) / (2 * self.slope_calls), (more - self.most_empty_ms) / (3 * self.slope_calls))
            found.append(max(a_call, 0.0))
        return found


def measure_slopes(sides: Sequence[Side], plan: Plan) -> None:
    """Samples the slopes of all sides in alternating order."""
    for side in sides:
        side.prepare_slope(plan.block_ms)
    for number in range(plan.slope_blocks):
        for side in sides if number % 2 == 0 else reversed(sides):
            side.sample_slope()


def measure(
    candidate: Side,
    baselines: dict[str, Side],
    plan: Plan,
    rng: random.Random,
    *,
    use_slope: bool = False,
    before_pair: Callable[[], None] = lambda: None,
) -> Timing:
    """Times `candidate` and every baseline in alternating order.

    Args:
      candidate, baselines: the sides; `baselines` holds "eager".
      plan: budget and precision.
      rng: chooses the calls whose outputs are kept for checking.
      use_slope: also believe the slope of the wall clock over back-to-back calls (devices that work
        asynchronously).
      before_pair: called before each pair of blocks.
    """
    eager = baselines["eager"]
    sides = [candidate, *baselines.values()]
    for side in sides:
        side.prepare(plan.block_ms)
        side.settle()
    min_pairs = plan.min_pairs if max(candidate.call_ms, eager.call_ms) < SLOW_CALL_MS else 3
    start = time.perf_counter()
    for pair in range(plan.max_pairs):
        before_pair()
        for side in sides if pair % 2 == 0 else reversed(sides):
            side.sample(rng)
        if pair + 1 >= min_pairs:
            if _ratio(candidate, eager, plan).relative_error <= plan.relative_error:
                break
            if 1000 * (time.perf_counter() - start) >= plan.budget_ms:
                break
    times_ms, ruled = candidate.times_ms(plan.trusted_share)
    baseline_ms = {name: side.times_ms(plan.trusted_share)[0] for name, side in baselines.items()}
    if use_slope:
        measure_slopes(sides, plan)
        times_ms, by_slope = _larger(times_ms, candidate.slopes_ms(plan.trusted_share))
        ruled = ruled or by_slope
        for name, side in baselines.items():
            baseline_ms[name], _ = _larger(baseline_ms[name], side.slopes_ms(plan.trusted_share))
    apart_ms = PROCESS_MS if candidate.flushed else 0.0
    ratio = speedup(times_ms, baseline_ms["eager"], apart_ms)
    return Timing(
        candidate=candidate.span(times_ms, apart_ms),
        baselines={name: baselines[name].span(samples, apart_ms) for name, samples in baseline_ms.items()},
        speedup=ratio.median,
        speedup_low=ratio.low,
        speedup_high=ratio.high,
        noisy=is_noisy(ratio.low, ratio.high),
        bound_by="oracle wall clock" if ruled else "runner span",
    )


def _larger(times_ms: list[float], slopes_ms: list[float]) -> tuple[list[float], bool]:
    """Those of two samples of a time whose middle is larger, and whether these are the slopes."""
    ruled = statistics.median(slopes_ms) > statistics.median(times_ms)
    return ([max(slope, 1e-6) for slope in slopes_ms], True) if ruled else (times_ms, False)


def _ratio(candidate: Side, eager: Side, plan: Plan) -> Interval:
    return speedup(candidate.times_ms(plan.trusted_share)[0], eager.times_ms(plan.trusted_share)[0])
