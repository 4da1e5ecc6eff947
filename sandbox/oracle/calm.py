"""How calm the machine is while a CPU is timed, told by what should take the same time every time.

Other machines' work on the same host slows memory and caches for seconds, and not everybody alike: four elementwise operations of
the reference were seen to take 0.29 to 0.42 ms while one fused kernel stayed at 0.124 to 0.132. So a reference is compared with
what it took in the calmer ones of earlier timings, a candidate with its own in the timings of one evaluation; and since unrest only
ever adds to a time, of several timings each side's calmest counts. Where the machine itself is slower (`sandbox.oracle.yardstick`), all
of them are in doubt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from sandbox.protocol import Span, Timing
from sandbox.verdict.timing import MOST_UNREST, is_noisy

REMEMBERED = 256
CALM_QUARTER = 4
"""Of the remembered times the fastest one in four are calm: a host that is busy for minutes must not pass for the usual one."""


class Calm:
    """Recent times of one reference in its timings."""

    def __init__(self) -> None:
        self._recent_ms: deque[float] = deque(maxlen=REMEMBERED)
        self._latest = 0

    def timed(self, measure: Callable[[], Timing], tries: int, slowdown: Callable[[], float] = lambda: 1.0) -> Timing:
        """One candidate's timing: of one `measure` if `tries` is 1; else of two, and of more where they show unrest.

        Args:
          measure: makes a timing.
          tries: at most so many.
          slowdown: by what factor the machine itself was slower during the last one than when it is calm.
        """
        timings: list[Timing] = []
        self._latest = 0
        while len(timings) < tries:
            timing = measure()
            timings.append(timing.model_copy(update={"unrest": slowdown()}))
            self._recent_ms.append(_eager(timing).median_ms)
            self._latest += 1
            if len(timings) > 1 and self._unrest(timings) <= MOST_UNREST:
                break
        return self._calmest(timings)

    def take_back(self) -> None:
        """Forgets the reference's times of the last `timed`."""
        for _ in range(min(self._latest, len(self._recent_ms))):
            self._recent_ms.pop()
        self._latest = 0

    def _calmest(self, timings: Sequence[Timing]) -> Timing:
        first = min(timings, key=lambda timing: timing.candidate.median_ms)
        eager, own = min(map(_eager, timings), key=lambda span: span.median_ms), first.candidate
        unrest, low, high = self._unrest(timings), first.speedup_low, first.speedup_high
        assert low is not None and high is not None
        speedup = first.speedup
        if eager != _eager(first):
            speedup, low, high = eager.median_ms / own.median_ms, eager.low_ms / own.high_ms, eager.high_ms / own.low_ms
        update = {
            "baselines": {
                name: min((timing.baselines[name] for timing in timings), key=lambda span: span.median_ms) for name in first.baselines
            },
            "speedup": speedup,
            "speedup_low": low,
            "speedup_high": high,
            "unrest": unrest,
            "noisy": is_noisy(low, high, unrest),
        }
        return first.model_copy(update=update)

    def _unrest(self, timings: Sequence[Timing]) -> float:
        """The largest of three ratios: of the reference's calmest time here to that of calm timings, whichever is larger over the
        other; of the candidate's second calmest to its calmest; and of the machine's own slowdown in the two timings that count."""
        first, opposed = (min(timings, key=lambda timing: span(timing).median_ms) for span in (_own, _eager))
        eager_ms = _eager(opposed).median_ms
        usual_ms = sorted(self._recent_ms)[(len(self._recent_ms) - 1) // CALM_QUARTER]
        own_ms = sorted(timing.candidate.median_ms for timing in timings)
        machine = max(first.unrest, opposed.unrest)
        return max(machine, eager_ms / usual_ms, usual_ms / eager_ms, own_ms[min(1, len(own_ms) - 1)] / own_ms[0])


def _own(timing: Timing) -> Span:
    return timing.candidate


def _eager(timing: Timing) -> Span:
    return timing.baselines["eager"]
