"""Fast_p and its uncertainty: how many of the kernels are right and more than p times as fast as a baseline (KernelBench, arXiv 2502.10517).

    fast_p = share of (task, sample) pairs whose kernel is correct and whose speedup is above p        fast_0: the share that is correct

What varies from one evaluation to the next is which tasks were asked, which samples were drawn, and what the clock said. So the interval
is a bootstrap of two stages (Davison and Hinkley 1997, section 3.8): tasks are drawn with replacement, then each one's samples, and each
drawn speedup is moved by an error of its own measurement's width. (A speedup that the judge could not tell from 1 is credited as 1, which
is not above 1, and is not moved.) Tasks without samples left count in nothing; none is dropped
silently, `Scores.tasks` says how many there were.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Float

THRESHOLDS = (0.0, 1.0, 1.2, 1.5, 2.0)
RESAMPLES = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One sample's kernel as it counts.

    Attributes:
        task: its name.
        speedup: over the baseline; 0 for a kernel that is not correct or whose speed does not count.
        spread: standard deviation of the logarithm of the measured speedup; 0 where it is not known, or the speedup is credited as 1.
        compiled, correct: what the judge found.
    """

    task: str
    speedup: float
    spread: float = 0.0
    compiled: bool = True
    correct: bool = True

    def __post_init__(self):
        if not (math.isfinite(self.speedup) and self.speedup >= 0 and math.isfinite(self.spread) and self.spread >= 0):
            raise ValueError(f"task {self.task!r}: a speedup of {self.speedup} with spread {self.spread}; both are finite and not negative")
        if self.speedup > 0 and not self.correct:
            raise ValueError(f"task {self.task!r}: a kernel that is not correct has no speedup, this one has {self.speedup}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Value:
    """A statistic with its bootstrap interval of 95 %."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """What a set of samples scores.

    Attributes:
        tasks, samples: their numbers.
        fast: by threshold; 0.0 is the share that is correct.
        compiled: share.
        geomean: geometric mean of the speedups that count, over the samples that have one; NaN where none has.
        mean: mean speedup, 0 for what does not count.
    """

    tasks: int
    samples: int
    fast: Mapping[float, Value]
    compiled: Value
    geomean: Value
    mean: Value


def score(measured: Sequence[Measured], *, seed: int = 0, resamples: int = RESAMPLES) -> Scores:
    """Scores with intervals.

    Args:
        measured: samples of any tasks in any order.
        seed, resamples: of the bootstrap; equal values give equal intervals.

    Raises:
        ValueError: no sample.
    """
    table = _Table.of(measured)
    names = [f"fast {p}" for p in THRESHOLDS] + ["compiled", "geomean", "mean"]
    found = _statistics(table.once())
    draws = np.stack([_statistics(drawn) for drawn in table.resampled(np.random.default_rng(seed), resamples)], axis=1)
    values = {}
    for name, value, own in zip(names, found, draws, strict=True):
        own = own[np.isfinite(own)]
        low, high = np.quantile(own, (0.025, 0.975)) if len(own) else (math.nan, math.nan)
        values[name] = Value(value=float(value), low=float(low), high=float(high))
    return Scores(
        tasks=table.tasks, samples=len(measured), fast={p: values[f"fast {p}"] for p in THRESHOLDS}, compiled=values["compiled"],
        geomean=values["geomean"], mean=values["mean"],
    )  # fmt: skip


def difference(
    one: Sequence[Measured], other: Sequence[Measured], of: Callable[[Scores], Value], *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[Value, int]:
    """How much more `other` scores than `one` by a statistic, over the tasks that both have, resampled together: (difference, tasks).

    Args:
        of: picks the statistic, such as `lambda scores: scores.fast[1.0]`.

    Raises:
        ValueError: no task is in both.
    """
    (value,), shared = differences(one, other, [of], seed=seed, resamples=resamples)
    return value, shared


def differences(
    one: Sequence[Measured],
    other: Sequence[Measured],
    of: Sequence[Callable[[Scores], Value]],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> tuple[list[Value], int]:
    """`difference` for several statistics, from the same draws: (differences, tasks)."""
    shared = {m.task for m in one} & {m.task for m in other}
    if not shared:
        raise ValueError("the two evaluations have no task in common: there is nothing to compare")
    left, right = (_Table.of([m for m in side if m.task in shared]) for side in (one, other))
    at = [_index_of(pick) for pick in of]
    draws = []
    rng = np.random.default_rng(seed)
    for _ in range(resamples):
        tasks = rng.integers(len(shared), size=len(shared))
        draws.append((_statistics(right.drawn(rng, tasks)) - _statistics(left.drawn(rng, tasks)))[at])
    values = []
    for value, own in zip((_statistics(right.once()) - _statistics(left.once()))[at], np.array(draws).T, strict=True):
        kept = own[np.isfinite(own)]
        low, high = np.quantile(kept, (0.025, 0.975)) if len(kept) else (math.nan, math.nan)
        values.append(Value(value=float(value), low=float(low), high=float(high)))
    return values, len(shared)


def curve(
    measured: Sequence[Measured], thresholds: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Float[np.ndarray, "3 P"]:
    """Fast_p at any thresholds: shares, and the lower and upper ends of their intervals (each by itself, the same draws for all).

    Raises:
        ValueError: no sample.
    """
    table = _Table.of(measured)
    draws = np.stack([_above(drawn, thresholds) for drawn in table.resampled(np.random.default_rng(seed), resamples)])
    return np.stack([_above(table.once(), thresholds), *np.quantile(draws, (0.025, 0.975), axis=0)])


def _above(drawn: _Drawn, thresholds: Sequence[float]) -> Float[np.ndarray, " P"]:
    """Shares above each threshold; at 0 the share that is correct."""
    counts = len(drawn.speedup) - np.searchsorted(np.sort(drawn.speedup), thresholds, side="right")
    return np.where(np.asarray(thresholds) == 0, drawn.correct.mean(), counts / len(drawn.speedup))


def _index_of(of: Callable[[Scores], Value]) -> int:
    """Which of `_statistics` a picker means: it is shown scores that hold their own places."""
    marks = [Value(value=float(i), low=0.0, high=0.0) for i in range(len(THRESHOLDS) + 3)]
    shown = Scores(
        tasks=0, samples=0, fast=dict(zip(THRESHOLDS, marks, strict=False)), compiled=marks[-3], geomean=marks[-2], mean=marks[-1]
    )
    return int(of(shown).value)


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """Arrays over samples: whether compiled, correct, and the speedup."""

    compiled: np.ndarray
    correct: np.ndarray
    speedup: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Table:
    """Samples as arrays, a task's in one run of rows."""

    compiled: np.ndarray
    correct: np.ndarray
    speedup: np.ndarray
    spread: np.ndarray
    starts: np.ndarray
    counts: np.ndarray

    @property
    def tasks(self) -> int:
        return len(self.starts)

    @classmethod
    def of(cls, measured: Sequence[Measured]) -> _Table:
        if not measured:
            raise ValueError("there is nothing to score: no sample")
        ordered = sorted(measured, key=lambda m: m.task)  # the same tasks in the same order, whatever theirs was
        names = np.array([m.task for m in ordered])
        _, starts, counts = np.unique(names, return_index=True, return_counts=True)
        columns = (np.array([getattr(m, name) for m in ordered], float) for name in ("compiled", "correct", "speedup", "spread"))
        return cls(*columns, starts, counts)

    def once(self) -> _Drawn:
        return _Drawn(self.compiled, self.correct, self.speedup)

    def drawn(self, rng: np.random.Generator, tasks: np.ndarray) -> _Drawn:
        """Samples of these tasks, as many of each as it has, drawn with replacement, their speedups moved by the clock's error."""
        counts = self.counts[tasks]
        rows = np.repeat(self.starts[tasks], counts) + (rng.random(counts.sum()) * np.repeat(counts, counts)).astype(int)
        moved = self.speedup[rows] * np.exp(self.spread[rows] * rng.standard_normal(len(rows)))
        return _Drawn(self.compiled[rows], self.correct[rows], moved)

    def resampled(self, rng: np.random.Generator, times: int):
        for _ in range(times):
            yield self.drawn(rng, rng.integers(self.tasks, size=self.tasks))


def _statistics(drawn: _Drawn) -> Float[np.ndarray, " S"]:
    """Fast_p by THRESHOLDS, compiled, geometric mean, mean."""
    own, n = drawn.speedup, len(drawn.speedup)
    fast = [np.count_nonzero(own > p if p else drawn.correct) / n for p in THRESHOLDS]
    right = own[own > 0]
    geomean = math.exp(np.log(right).sum() / len(right)) if len(right) else math.nan
    return np.array([*fast, np.count_nonzero(drawn.compiled) / n, geomean, own.sum() / n])
