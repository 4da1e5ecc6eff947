"""Where a step's time goes: sampling and judging are timed where they happen, the rest by whoever holds the clock.

    step_s            from the end of the step before to the end of this one
    collect_s         rollouts, judging included; sampling_s and judging_s: in the sampler, in the judge
    update_s          learning
    share_rollouts    (collect_s - judging_s) / step_s;  share_judging, share_training: judging_s and update_s, over step_s
    share_other       what is left: skills, files, checkpoints, logs
    tokens_per_s      sampled tokens / sampling_s;  evaluations_per_s: candidates that the judge was asked about / judging_s
    episodes_per_s    policy rollouts / step_s
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any


class StepClock:
    """Adds up seconds and things done, by name, until they are read."""

    def __init__(self):
        self._began = time.monotonic()
        self._seconds: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Adds the time that passes to `name`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] += time.monotonic() - started

    def count(self, name: str, number: int) -> None:
        self._counts[name] += number

    def read(self) -> dict[str, float]:
        """The metrics of the step that ends now (see above); the next one begins."""
        now = time.monotonic()
        s, n, whole = self._seconds, self._counts, max(now - self._began, 1e-9)
        found = {"step_s": whole} | {f"{name}_s": s[name] for name in ("collect", "sampling", "judging", "update")}
        shares = {"rollouts": s["collect"] - s["judging"], "judging": s["judging"], "training": s["update"]}
        shares["other"] = whole - sum(shares.values())
        found |= {f"share_{name}": seconds / whole for name, seconds in shares.items()}
        for name, of, seconds in (("tokens", "tokens", s["sampling"]), ("evaluations", "evaluations", s["judging"]), ("episodes", "episodes", whole)):
            found[f"{name}_per_s"] = n[of] / seconds if seconds > 0 else 0.0
        self._began, self._seconds, self._counts = now, Counter(), Counter()
        return found


class TimedJudge:
    """A judge whose time goes to the clock's `judging`; all else is the judge's own."""

    def __init__(self, judge: Any, clock: StepClock):
        self._judge, self._clock = judge, clock

    def evaluate(self, requests, **options):
        self._clock.count("evaluations", len(requests))
        with self._clock.during("judging"):
            return self._judge.evaluate(requests, **options)

    def verify(self, arms, **options):
        self._clock.count("evaluations", sum(len(arm.control) + len(arm.treated) for arm in arms))
        with self._clock.during("judging"):
            return self._judge.verify(arms, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._judge, name)


class TimedSampler:
    """A sampler whose time goes to the clock's `sampling`; all else is the sampler's own."""

    def __init__(self, sampler: Any, clock: StepClock):
        self._sampler, self._clock = sampler, clock

    def sample(self, *arguments, **options):
        with self._clock.during("sampling"):
            samples = self._sampler.sample(*arguments, **options)
        self._clock.count("tokens", sum(len(sample.tokens) for sample in samples))
        return samples

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)
