"""Simulated verifications of skills: what candidates with and without a skill reach, and the rules of dk_jax.skills.verification on many at once.

Three layers of noise. Candidates of one task differ: most lie near a mode, some are far slower, some fail. Tasks differ in what is
reached on them and in what the skill is worth. And a clock errs. The task that a skill was distilled from is drawn as a run draws it: one whose
rollout improved on its first turn (`dk_jax.rollout.episode.triggers`), here by luck alone, since all turns are drawn alike.

Speeds are natural logarithms of speedups over eager; NaN is a failed candidate.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dk_jax.skills.verification import FAILED_RANK, PaperRule, SequentialTest, sign_patterns  # noqa: E402

# Verifications worked on at once: 16,384 sign patterns each of f64 are 16 MiB.
_CHUNK = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise:
    """What makes speeds differ that is not the skill; standard deviations of the natural logarithm.

    Attributes:
        sample: of correct candidates for one task.
        failures: share of candidates that fail, with the skill and without.
        slow_share, slow_ratio: so many candidates are slower than the mode by an exponential time whose mean is slow_ratio times the
            standard deviation around the mode.
        timing: of the clock. outlier_share, outlier: so many timings err by the latter instead.
        base_mean, base_family, base_task: speed without the skill: mean, spread over families of tasks, and within a family.
        rollouts, turns: of the task that triggers the summary. Its trigger is the rollout whose best turn is most above its first.
        trigger: its best turn must reach so many times the first, and so many times eager.
    """

    sample: float
    failures: float
    slow_share: float = 0.15
    slow_ratio: float = 4.0
    timing: float = 0.02
    outlier_share: float = 0.01
    outlier: float = 0.15
    base_mean: float = 0.25
    base_family: float = 0.8
    base_task: float = 0.5
    rollouts: int = 6
    turns: int = 2
    trigger: float = 1.2

    def samples(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Deviations of correct candidates from their task's mean: mean 0, standard deviation `sample`."""
        share, ratio = self.slow_share, self.slow_ratio
        unit = math.sqrt(1.0 + ratio**2 * share * (2.0 - share))
        slow = ratio * rng.standard_exponential(shape) * (rng.random(shape) < share)
        return self.sample / unit * (rng.standard_normal(shape) - slow + share * ratio)

    @property
    def mode(self) -> float:
        """Mode of a task's candidates, above their mean."""
        share, ratio = self.slow_share, self.slow_ratio
        return self.sample / math.sqrt(1.0 + ratio**2 * share * (2.0 - share)) * share * ratio

    def clock(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Errors of timings."""
        return rng.standard_normal(shape) * np.where(rng.random(shape) < self.outlier_share, self.outlier, self.timing)

    def judged(self, rng: np.random.Generator, means: np.ndarray) -> np.ndarray:
        """Verdicts on candidates of tasks with these means; NaN for those that fail."""
        speeds = means + self.samples(rng, means.shape) + self.clock(rng, means.shape)
        return np.where(rng.random(means.shape) < self.failures, np.nan, speeds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkillKind:
    """A skill's true effect on correct candidates: ratio of speeds (geometric mean over tasks), its logarithm's deviation over tasks."""

    name: str
    ratio: float
    task: float = 0.05


@dataclasses.dataclass(frozen=True)
class Draws:
    """Verifications as the rules see them. Pairs take turns between the trigger's task (0) and its sibling (1)."""

    control: Float[np.ndarray, "N n"]
    treated: Float[np.ndarray, "N n"]
    task: Int[np.ndarray, " n"]
    first: Float[np.ndarray, " N"]
    """The trigger's first turn."""
    greedy: Float[np.ndarray, " N"]
    """One more turn on the trigger's task, with the skill, as any other candidate."""
    greedy_mode: Float[np.ndarray, " N"]
    """The same with the kernel at the mode, which never fails: only the clock errs."""


def trigger_tasks(noise: Noise, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Family mean, mean and first turn, f64[n] each, of tasks that came to trigger a summary.

    Raises:
        ValueError: under this noise next to no task does.
    """
    families, tasks, firsts, found, asked = [], [], [], 0, 0
    while found < n:
        m = max(2 * n, 256)
        family = rng.normal(noise.base_mean, noise.base_family, m)
        task = family + rng.normal(0.0, noise.base_task, m)
        speeds = np.exp(noise.judged(rng, np.broadcast_to(task[:, None, None], (m, noise.rollouts, noise.turns))))
        speeds = np.nan_to_num(speeds, nan=0.0)
        first, best = speeds[:, :, 0], speeds.max(-1)
        earned = best >= np.maximum(noise.trigger * first, noise.trigger)
        gain = np.where(earned, best / np.maximum(first, 0.1), -1.0)
        which = gain.argmax(1)
        keep = earned.any(1)
        families.append(family[keep])
        tasks.append(task[keep])
        firsts.append(first[np.arange(m), which][keep])
        found, asked = found + int(keep.sum()), asked + m
        if asked > 1000 * n and found < n / 10:
            raise ValueError(f"of {asked} tasks {found} triggered a summary: raise noise.sample or noise.failures")
    with np.errstate(divide="ignore"):
        first = np.log(np.concatenate(firsts)[:n])
    return np.concatenate(families)[:n], np.concatenate(tasks)[:n], np.where(np.isinf(first), np.nan, first)


def draw(noise: Noise, kind: SkillKind, n: int, pairs: int, rng: np.random.Generator) -> Draws:
    """n verifications of skills of one kind, with `pairs` pairs each."""
    family, trigger, first = trigger_tasks(noise, n, rng)
    means = np.stack([trigger, family + rng.normal(0.0, noise.base_task, n)], axis=1)
    effects = rng.normal(math.log(kind.ratio), kind.task, (n, 2))
    task = np.arange(pairs) % 2
    greedy = means[:, 0] + effects[:, 0]
    return Draws(
        control=noise.judged(rng, means[:, task]),
        treated=noise.judged(rng, (means + effects)[:, task]),
        task=task,
        first=first,
        greedy=noise.judged(rng, greedy),
        greedy_mode=greedy + noise.mode + noise.clock(rng, greedy.shape),
    )


def paper_accepts(rule: PaperRule, first: Float[np.ndarray, " N"], treated: Float[np.ndarray, " N"]) -> Bool[np.ndarray, " N"]:
    """`PaperRule.decide` for many."""
    first, treated = (np.nan_to_num(np.exp(x), nan=0.0) for x in (first, treated))
    return (treated >= rule.min_absolute) & (treated >= rule.min_ratio * first)


def evidence(test: SequentialTest, control: np.ndarray, treated: np.ndarray, task: np.ndarray) -> np.ndarray:
    """What the pairs so far say for the skill, f64[N, n], as `SequentialTest` has it."""
    floor = math.log(test.fail_speedup)
    control, treated = np.maximum(control, floor), np.maximum(treated, floor) - math.log(test.min_ratio)
    if test.statistic == "differences":
        mixed = math.log(test.mixed_ratio) * (np.isnan(control).astype(float) - np.isnan(treated))
        return np.where(np.isnan(treated - control), mixed, treated - control)
    out = np.empty_like(control)
    for name in np.unique(task):
        own = task == name
        arms = np.concatenate([control[:, own], treated[:, own]], axis=1)
        correct = ~np.isnan(arms)
        below = (arms[:, None, :] < arms[:, :, None]).sum(-1) + (arms[:, None, :] <= arms[:, :, None]).sum(-1)
        scores = np.where(correct, below / np.maximum(correct.sum(1, keepdims=True), 1) - 1.0, FAILED_RANK)
        out[:, own] = scores[:, own.sum() :] - scores[:, : own.sum()]
    return out


def decide_many(
    test: SequentialTest, control: Float[np.ndarray, "N n"], treated: Float[np.ndarray, "N n"], task: Int[np.ndarray, " n"]
) -> tuple[Bool[np.ndarray, " N"], Int[np.ndarray, " N"]]:
    """`SequentialTest.decide` for many, each asked look by look until it decides.

    Args:
        control, treated: logarithms of speedups, NaN for failed candidates; at least as many pairs as the last look has.
        task: of each pair.

    Returns:
        Whether each skill was accepted, and after how many pairs it was decided.
    """
    accepted, pairs = np.zeros(len(control), bool), np.full(len(control), test.looks[-1])
    for start in range(0, len(control), _CHUNK):
        part = slice(start, start + _CHUNK)
        accepted[part], pairs[part] = _decide_chunk(test, control[part], treated[part], task)
    return accepted, pairs


def _decide_chunk(test, control, treated, task):
    signs = sign_patterns(test.looks[-1])
    floor = math.log(test.fail_speedup)
    gain = np.fmax(treated, floor) - np.fmax(control, floor)
    n, patterns = len(control), len(signs)
    accepted, pairs = np.zeros(n, bool), np.full(n, test.looks[-1])
    rows, passed = np.arange(n), np.zeros((n, patterns), bool)
    for look in test.looks:
        last = look == test.looks[-1]
        found = evidence(test, control[rows, :look], treated[rows, :look], task[:look])
        sums = found @ signs[:, :look].T
        slack = 1e-9 * np.abs(found).sum(1)
        extreme = sums >= (sums[:, 0] - slack)[:, None]
        room = math.floor(test.alpha * (look / test.looks[-1]) ** test.spend_power * patterns * (1 + 1e-12))
        if last:  # only the observed pattern matters
            own = passed[:, 0] | ((passed | extreme).sum(1) <= room)
        else:
            _spend(np.where(passed, -np.inf, sums), passed, room, slack)
            own = passed[:, 0]
        # -inf where none was correct; no bar is passed then
        best = np.fmax.reduce(treated[rows, :look], axis=1, initial=-np.inf)
        ok = own & (gain[rows, :look].mean(1) > math.log(test.min_ratio)) & (best >= _log(test.bar))
        stop = np.full(len(rows), last) | ok | (~own & (extreme.mean(1) > test.futility))
        accepted[rows[ok]] = True
        pairs[rows[stop]] = look
        rows, passed = rows[~stop], passed[~stop]
        if not len(rows):
            break
    return accepted, pairs


def _spend(open_sums: np.ndarray, passed: np.ndarray, room: int, slack: np.ndarray) -> None:
    """Marks in `passed` the open patterns with the largest sums that fit into `room` with those passed before; ties go together."""
    for i, left in enumerate(room - passed.sum(1)):
        if left >= 0:
            # The largest sum that is left out: those equal to it are left out too.
            after = np.partition(open_sums[i], -left - 1)[-left - 1]
            passed[i] |= np.isfinite(open_sums[i]) & (open_sums[i] > after + slack[i])


def _log(speedup: float) -> float:
    return math.log(speedup) if speedup > 0 else -math.inf
