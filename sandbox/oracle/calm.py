"""How calm the machine is, told by the one process that does the same in every evaluation of a task: its reference.

Other machines' work on the same host slows memory and caches for seconds, and not everybody alike: four elementwise operations of
the reference were seen to take 0.29 to 0.42 ms while one fused kernel stayed at 0.124 to 0.132.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sandbox.protocol import Timing
from sandbox.verdict.timing import MOST_UNREST, is_noisy

REMEMBERED = 32


class Calm:
    """Recent times of one reference in its timings."""

    def __init__(self) -> None:
        self._recent_ms: deque[float] = deque(maxlen=REMEMBERED)

    def note(self, timing: Timing, needed: int) -> bool:
        """Remembers a timing that was just made. Returns whether it was calm, as far as `needed` timings or more can tell."""
        self._recent_ms.append(timing.baselines["eager"].median_ms)
        return len(self._recent_ms) >= needed and self._unrest(timing) <= MOST_UNREST

    def judged(self, timings: Sequence[Timing]) -> Timing:
        """Of timings of one candidate, all noted, the one made in least unrest, which it now states."""
        timing = min(timings, key=self._unrest)
        unrest, low, high = self._unrest(timing), timing.speedup_low, timing.speedup_high
        assert low is not None and high is not None
        return timing.model_copy(update={"unrest": unrest, "noisy": is_noisy(low, high, unrest)})

    def _unrest(self, timing: Timing) -> float:
        return timing.baselines["eager"].median_ms / min(self._recent_ms)
