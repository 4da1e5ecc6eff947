"""Where a step's time goes: sampling and judging are timed where they happen, the rest by whoever holds the clock.

    step_s            from the end of the step before to the end of this one
    collect_s         rollouts being made, judging included; sampling_s and judging_s: in the sampler, in the judge
    update_s          learning
    overlap_s         rollouts being made and learning, both at once (rl.staleness=1); it is part of collect_s and of update_s
    device_wait_s     rollouts and learning, each while the other one had the devices (dk_jax.train.device_turns); in none of those above
    share_rollouts    (collect_s - judging_s) / step_s;  share_judging, share_training, share_overlap: judging_s, update_s, overlap_s over step_s
    share_other       what is left: skills, files, checkpoints, logs;  rollouts + judging + training + other - overlap = 1
    tokens_per_s      sampled tokens / seconds in the sampler;  evaluations_per_s: candidates that were judged / seconds in the judge;
                      of the calls that ended in the step
    episodes_per_s    policy rollouts / step_s

What goes on beyond the end of a step counts for each step with the time that lies in it. All of it may be used by several threads.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any


class StepClock:
    """Adds up seconds and things done, by name, until they are read.

    Names that `read` tells of: "collect" and "update"; "sampling" and "judging"; "collect_wait" and "update_wait" while a thread waits for
    the devices, "update_turn" while one that learns has them.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._began = self._last = time.monotonic()
        self._going: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()
        self._whole: Counter[str] = Counter()
        """Seconds from beginning to end of what has ended, whichever steps they lie in."""
        self._counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Adds the time that passes to `name`; once, if several threads do so at the same time."""
        with self._lock:
            started = self._pass()
            self._going[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._whole[name] += self._pass() - started
                self._going[name] -= 1

    def count(self, name: str, number: int) -> None:
        with self._lock:
            self._counts[name] += number

    def _pass(self) -> float:
        """Gives the time since the last change to all that went on meanwhile; returns the present time."""
        now = time.monotonic()
        passed, self._last = now - self._last, now
        going, s = self._going, self._seconds
        for name in ("sampling", "judging"):
            s[name] += passed * (going[name] > 0)
        # Several threads may learn: they wait when none of them has the devices.
        waits = {"collect": going["collect_wait"] > 0, "update": going["update_wait"] > 0 and not going["update_turn"]}
        works = {name: going[name] > 0 and not waits[name] for name in waits}
        for name in waits:
            s[name] += passed * works[name]
            s["device_wait"] += passed * (going[name] > 0 and waits[name])
        s["overlap"] += passed * all(works.values())
        s["either"] += passed * any(works.values())
        return now

    def read(self) -> dict[str, float]:
        """The metrics of the step that ends now (see above); the next one begins."""
        with self._lock:
            now = self._pass()
            s, n, ended, whole = self._seconds, self._counts, self._whole, max(now - self._began, 1e-9)
            self._began, self._seconds, self._whole, self._counts = now, Counter(), Counter(), Counter()
        found = {"step_s": whole} | {f"{name}_s": s[name] for name in ("collect", "sampling", "judging", "update", "overlap", "device_wait")}
        shares = {"rollouts": s["collect"] - s["judging"], "judging": s["judging"], "training": s["update"], "overlap": s["overlap"]}
        shares["other"] = max(whole - s["either"], 0.0)
        found |= {f"share_{name}": seconds / whole for name, seconds in shares.items()}
        for name, seconds in (("tokens", ended["sampling"]), ("evaluations", ended["judging"]), ("episodes", whole)):
            found[f"{name}_per_s"] = n[name] / seconds if seconds > 0 else 0.0
        return found


class TimedJudge:
    """A judge whose time goes to the clock's `judging`; all else is the judge's own."""

    def __init__(self, judge: Any, clock: StepClock):
        self._judge, self._clock = judge, clock

    def evaluate(self, requests, **options):
        with self._clock.during("judging"):
            verdicts = self._judge.evaluate(requests, **options)
        self._clock.count("evaluations", len(requests))
        return verdicts

    def verify(self, arms, **options):
        with self._clock.during("judging"):
            verdicts = self._judge.verify(arms, **options)
        self._clock.count("evaluations", sum(len(arm.control) + len(arm.treated) for arm in arms))
        return verdicts

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
