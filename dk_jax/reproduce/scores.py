"""Scores of an ablation's evaluations: by arm, over held-out siblings and held-out families apart, with two kinds of interval.

    low, high   bootstrap over tasks, samples and the clock (dk_jax.evaluation.fast_p), the seeds' samples taken together
    half        half the 95 % interval of Student's t over the seeds' own values; None for fewer than two seeds

The last turn counts. `share of the expert` is the mean over samples of the speedup over that of the fastest right expert kernel of the same
task, 0 for what is not correct; tasks without a right expert kernel are left out of it and counted.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scipy.special import stdtrit

from dk_jax.evaluation import fast_p
from dk_jax.evaluation.fast_p import Measured, Value
from dk_jax.evaluation.results import Result, measured, plain

BASELINE = "eager"
METRICS: dict[str, Callable[[fast_p.Scores], Value]] = {
    "compiled": lambda s: s.compiled,
    "correct": lambda s: s.fast[0.0],
    **{f"Fast_{p:g}": (lambda s, p=p: s.fast[p]) for p in fast_p.THRESHOLDS if p > 0},
    "mean speedup": lambda s: s.mean,
}
SHARE_OF_EXPERT = "share of the expert"
RISES = ("correct", "Fast_1", "Fast_1.5", "Fast_2")
"""Metrics whose rise over the cold start is told."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluations:
    """Results of one arm by seed, and those of the cold start that each seed began with (by the seed)."""

    own: Mapping[int, Sequence[Result]]
    starts: Mapping[int, Sequence[Result]] = dataclasses.field(default_factory=dict)

    def within(self, tasks: set[str]) -> Evaluations:
        return Evaluations(
            own={seed: found for seed, own in self.own.items() if (found := [r for r in own if r.key[0] in tasks])},
            starts={seed: found for seed, own in self.starts.items() if (found := [r for r in own if r.key[0] in tasks])},
        )


def half_interval(values: Sequence[float]) -> float | None:
    """Half the 95 % interval of a mean by Student's t; None for fewer than two values."""
    if len(values) < 2:
        return None
    return float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))


def ceilings(expert: Sequence[Result]) -> dict[str, float]:
    """Speedup of the fastest right expert kernel, by task; tasks without one are not in it."""
    found: dict[str, float] = {}
    for m in measured(expert, "last_turn", BASELINE):
        if m.correct and m.speedup > 0:
            found[m.task] = max(m.speedup, found.get(m.task, 0.0))
    return found


def row(evaluations: Evaluations, ceiling: Mapping[str, float], *, resamples: int) -> dict[str, Any]:
    """All metrics of one arm on one part of the tasks, and its rises, as plain data."""
    by_seed = {seed: measured(results, "last_turn", BASELINE) for seed, results in evaluations.own.items()}
    found: dict[str, Any] = {"seeds": sorted(by_seed), "tasks": len({m.task for own in by_seed.values() for m in own})}
    found["samples"] = sum(len(own) for own in by_seed.values())
    found["metrics"] = _cells(by_seed, METRICS, resamples)
    shares = {seed: own for seed, all_ in by_seed.items() if (own := _over_expert(all_, ceiling))}
    if shares:
        found["metrics"] |= _cells(shares, {SHARE_OF_EXPERT: METRICS["mean speedup"]}, resamples)
    found["rises"] = {}
    for name in RISES if set(evaluations.starts) >= set(by_seed) else ():
        start = {seed: measured(evaluations.starts[seed], "last_turn", BASELINE) for seed in by_seed}
        found["rises"][name] = contrast(start, by_seed, name, resamples=resamples)
    return found


def _over_expert(found: Sequence[Measured], ceiling: Mapping[str, float]) -> list[Measured]:
    return [dataclasses.replace(m, speedup=m.speedup / ceiling[m.task]) for m in found if m.task in ceiling]


def _cells(
    by_seed: Mapping[int, Sequence[Measured]], metrics: Mapping[str, Callable[[fast_p.Scores], Value]], resamples: int
) -> dict[str, Any]:
    together = fast_p.score([m for own in by_seed.values() for m in own], resamples=resamples)
    single = {seed: fast_p.score(own, resamples=1) for seed, own in by_seed.items()}
    return {
        name: plain(of(together)) | _over_seeds({seed: of(own).value for seed, own in single.items()}) for name, of in metrics.items()
    }


def _over_seeds(values: Mapping[int, float]) -> dict[str, Any]:
    """`mean` of the seeds' values, `half` of its interval, `by_seed`."""
    own = list(values.values())
    return {"mean": statistics.mean(own), "half": half_interval(own), "by_seed": {str(seed): value for seed, value in values.items()}}


def contrast(
    one: Mapping[int, Sequence[Measured]], other: Mapping[int, Sequence[Measured]], name: str, *, resamples: int
) -> dict[str, Any] | None:
    """How much more `other` scores than `one` by a metric, over the seeds and the tasks of both; None where they share none.

    Returns:
        Value, bootstrap interval (tasks drawn together), mean and half interval of the seeds' own differences, `seeds`.
    """
    seeds = sorted(set(one) & set(other))
    sides = [[m for seed in seeds for m in side[seed]] for side in (one, other)]
    if not seeds or not {m.task for m in sides[0]} & {m.task for m in sides[1]}:
        return None
    value, tasks = fast_p.difference(*sides, METRICS[name], resamples=resamples)
    own = {seed: fast_p.difference(one[seed], other[seed], METRICS[name], resamples=1)[0].value for seed in seeds}
    return plain(value) | _over_seeds(own) | {"seeds": seeds, "tasks": tasks}


def by_seed(evaluations: Evaluations) -> dict[int, list[Measured]]:
    return {seed: measured(results, "last_turn", BASELINE) for seed, results in evaluations.own.items()}


def sign(found: Mapping[str, Any] | None) -> int:
    """1 or -1 where a contrast is clear: its bootstrap interval, and with several seeds that over seeds too, lies on one side of 0; else 0."""
    if found is None or found["low"] is None:
        return 0
    intervals = [(found["low"], found["high"])]
    if found["half"] is not None:
        intervals.append((found["mean"] - found["half"], found["mean"] + found["half"]))
    return 1 if all(low > 0 for low, _ in intervals) else -1 if all(high < 0 for _, high in intervals) else 0
