"""Test-time scaling: what the best of a budget of candidates is worth, by the way in which they are spent, and what they take.

A way is so many samples of so many turns. Serial refinement is one sample, parallel sampling first turns alone. Where a strategy decides by
its samples which of them go on (dk_jax.search.schemes), some of them alone are no smaller budget's: then only the whole is a way, and first
turns are. Everything is over tasks, which count alike; intervals are of tasks drawn with replacement.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from dk_jax.evaluation.fast_p import RESAMPLES, Value
from dk_jax.evaluation.results import Result, counted, plain

Way = Literal["serial", "parallel", "both", "whole"]
STATISTICS = ("correct", "fast_1", "geomean")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spent:
    """A budget and how it is spent: `samples` of a task, `turns` of each; the way "whole" is all that there is of so many on average."""

    way: Way
    samples: int
    turns: int

    @property
    def candidates(self) -> int:
        return self.samples * self.turns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Of an evaluation: samples a task and turns a sample. adaptive: which samples get how many turns was decided by what they were worth."""

    samples: int
    turns: int
    adaptive: bool = False

    @property
    def whole(self) -> Spent:
        return Spent(way="whole", samples=self.samples, turns=self.turns)

    def ways(self, candidates: int) -> list[Spent]:
        """The ways to spend so many candidates. Of those with several samples and turns the one with the most turns."""
        found = []
        if not self.adaptive and candidates <= self.turns:
            found.append(Spent(way="serial", samples=1, turns=candidates))
        if candidates <= self.samples:
            found.append(Spent(way="parallel", samples=candidates, turns=1))
        if self.adaptive:
            return found + ([self.whole] if candidates == self.whole.candidates else [])
        splits = [(candidates // t, t) for t in range(2, self.turns + 1) if candidates % t == 0 and 1 < candidates // t <= self.samples]
        return found + [Spent(way="both", samples=samples, turns=turns) for samples, turns in splits[-1:]]


def shape_of(settings: Mapping[str, Any]) -> Shape:
    """Of an evaluation with these settings (dk_jax.evaluation.harness.settings_of)."""
    adaptive = settings.get("search", {"name": "turns"})["name"] == "schemes"
    return Shape(samples=settings["samples"], turns=settings["turns"], adaptive=adaptive)


def scaling(results: Sequence[Result], baseline: str, shape: Shape, *, seed: int, resamples: int = RESAMPLES) -> list[dict[str, Any]]:
    """The best of k candidates of a task: k turns of one sample (`serial`), the first turn of k samples (`parallel`), or all turns of some
    samples (`both`), k = 1, 2, 4, ... and the most there are.

    Serial: the mean over all samples of the best of their first k turns. Parallel and both: no particular k of a task's n samples, but the
    expectation over all choices of k of them (for shares the estimator of pass@k, Chen et al. 2021, arXiv 2107.03374, eq. 1). The geometric
    mean is over what is correct. A sample that ended before has its best turn so far.

    Returns:
        For each way and k: `way`, `candidates`, `samples` and `turns` that these are, `correct`, `fast_1`, `geomean`, and what they take a
        task: `calls` (messages) and `tokens`, None where nobody counts those.
    """
    ways = [Spent(way="parallel", samples=k, turns=1) for k in _ks(shape.samples)]
    if shape.adaptive:
        ways.append(shape.whole)
    else:
        ways = [Spent(way="serial", samples=1, turns=k) for k in _ks(shape.turns)] + ways
        if shape.turns > 1 and shape.samples > 1:
            ways += [Spent(way="both", samples=k, turns=shape.turns) for k in _ks(shape.samples)]
    return _rows(results, baseline, ways, seed=seed, resamples=resamples)


def budgets(results: Sequence[Result], baseline: str, shape: Shape, *, seed: int, resamples: int = RESAMPLES) -> list[list[dict[str, Any]]]:
    """Ways compared at equal budgets of 2, 4, 8, ... candidates and at the largest: for each for which there are several, rows as of `scaling`."""
    found = [shape.ways(candidates) for candidates in _ks(shape.whole.candidates)]
    return [_rows(results, baseline, ways, seed=seed, resamples=resamples) for ways in found if len(ways) > 1 and ways[0].candidates > 1]


def at_equal_budget(
    own: Sequence[Result], other: Sequence[Result], baselines: Sequence[str], shapes: tuple[Shape, Shape], *, seed: int,
    resamples: int = RESAMPLES,
) -> dict[str, Any] | None:  # fmt: skip
    """How much better the best of equally many candidates is in `own` than in `other`, over the tasks of both, drawn together: of the smaller
    evaluation's whole budget, and of the larger one as much, with as many turns as there are.

    Args:
        shapes: of both.

    Returns:
        `candidates`, `own` and `other` (`samples`, `turns`, `calls`, `tokens`), and `differences` by baseline and statistic. None where the
        larger one can't be cut to that budget.
    """
    budget = min(shape.whole.candidates for shape in shapes)
    ways = [_cut(shape, budget) for shape in shapes]
    tasks = {r.trajectory.task for r in own} & {r.trajectory.task for r in other}
    if None in ways or not tasks:
        return None
    sides = [_by_task([r for r in side if r.trajectory.task in tasks]) for side in (own, other)]
    draws = _draws(len(tasks), seed, resamples)
    differences = {}
    for baseline in baselines:
        sums = [_sums(side, baseline, way) for side, way in zip(sides, ways, strict=True)]
        point = np.subtract(*(_shares(s.mean(axis=0)) for s in sums))
        drawn = np.subtract(*(_shares(s[draws].mean(axis=1)) for s in sums))
        differences[baseline] = _values(point, drawn)
    said = [{"samples": w.samples, "turns": w.turns, **_taken(side, w)} for side, w in zip(sides, ways, strict=True)]
    return {"candidates": budget, "own": said[0], "other": said[1], "differences": differences}


def _cut(shape: Shape, budget: int) -> Spent | None:
    if shape.whole.candidates == budget:
        return shape.whole
    ways = shape.ways(budget)
    return max(ways, key=lambda way: way.turns) if ways and not shape.adaptive else None


def _rows(results: Sequence[Result], baseline: str, ways: Sequence[Spent], *, seed: int, resamples: int) -> list[dict[str, Any]]:
    by_task = _by_task(results)
    draws, out = _draws(len(by_task), seed, resamples), []
    for way in ways:
        sums = _sums(by_task, baseline, way)
        values = _values(_shares(sums.mean(axis=0)), _shares(sums[draws].mean(axis=1)))
        shown = {"way": way.way, "candidates": way.candidates, "samples": way.samples, "turns": way.turns}
        out.append({**shown, **values, **_taken(by_task, way)})
    return out


def _by_task(results: Sequence[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda r: r.trajectory.task):
        found.setdefault(result.trajectory.task, []).append(result)
    return found


def _draws(tasks: int, seed: int, resamples: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(tasks, size=(resamples, tasks))


def _ks(most: int) -> list[int]:
    return sorted({k for i in range(most.bit_length()) if (k := 2**i) <= most} | ({most} if most else set()))


def _sums(by_task: dict[str, list[Result]], baseline: str, way: Spent) -> np.ndarray:
    """`_expected` of every task."""
    out = []
    for own in by_task.values():
        samples = [[(counted(v, baseline) or 0.0) if v.correct else None for v in r.trajectory.verdicts] for r in own]
        if way.way == "whole":
            out.append(_expected([_best([speedup for turns in samples for speedup in turns])], 1))
        else:
            out.append(_expected([_best(turns[: way.turns]) for turns in samples], min(way.samples, len(samples))))
    return np.array(out)


def _taken(by_task: dict[str, list[Result]], way: Spent) -> dict[str, float | None]:
    """Messages and tokens that a way takes a task, on average."""
    calls, tokens = [], []
    for own in by_task.values():
        cut = None if way.way == "whole" else way.turns
        share = (len(own) if way.way == "whole" else way.samples) / len(own)
        calls.append(share * sum(sum(r.calls[:cut]) if r.calls else len(r.trajectory.turns[:cut]) for r in own))
        tokens.append(share * sum(sum(r.tokens[:cut]) for r in own))
    return {"calls": sum(calls) / len(calls), "tokens": sum(tokens) / len(tokens) if any(tokens) else None}


def _values(point: np.ndarray, drawn: np.ndarray) -> dict[str, dict[str, float | None]]:
    found = {}
    for name, value, values in zip(STATISTICS, point, drawn.T, strict=True):
        kept = values[np.isfinite(values)]
        low, high = np.quantile(kept, (0.025, 0.975)) if len(kept) else (math.nan, math.nan)
        found[name] = plain(Value(value=float(value), low=float(low), high=float(high)))
    return found


def _best(turns: Sequence[float | None]) -> float | None:
    """Of the speedups of turns, None where not correct."""
    return max((speedup for speedup in turns if speedup is not None), default=None)


def _expected(values: Sequence[float | None], k: int) -> tuple[float, float, float, float]:
    """Over all choices of k of the values: the expected shares whose best one is correct, above 1, above 0, and the expected logarithm
    of that best one where it is above 0 (and 0 elsewhere). The i-th smallest of n is the best of C(i - 1, k - 1) choices out of C(n, k)."""
    ordered = sorted(-1.0 if value is None else value for value in values)
    weights = [math.comb(i, k - 1) / math.comb(len(ordered), k) for i in range(len(ordered))]
    pairs = list(zip(weights, ordered, strict=True))
    return (
        sum(w for w, v in pairs if v >= 0), sum(w for w, v in pairs if v > 1), sum(w for w, v in pairs if v > 0),
        sum(w * math.log(v) for w, v in pairs if v > 0),
    )  # fmt: skip


def _shares(sums: np.ndarray) -> np.ndarray:
    """Correct, Fast_1 and the geometric mean (NaN where nothing has a speedup) from means of `_expected`, along the last axis."""
    timed = sums[..., 2]
    geomean = np.where(timed > 0, np.exp(sums[..., 3] / np.where(timed > 0, timed, 1.0)), math.nan)
    return np.stack([sums[..., 0], sums[..., 1], geomean], axis=-1)
