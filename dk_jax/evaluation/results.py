"""What an evaluation has found: its results as a file, their scores, test-time scaling, and comparison with another one.

Everything here is computed from results.jsonl, a line a (task, sample), and from what the evaluation remembers of itself; nothing is judged
again. Scores are those of dk_jax.evaluation.fast_p. A sample without a kernel, for whatever reason, counts as one that is wrong.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dk_jax.evaluation.fast_p import RESAMPLES, THRESHOLDS, Measured, Value, difference, score
from dk_jax.rollout.trajectory import Trajectory, Turn, Verdict

log = logging.getLogger(__name__)
RESULTS, SUMMARY = "results.jsonl", "summary.json"
Which = Literal["last_turn", "best_turn"]
REFUSED, UNFIT = "task_refused", "does_not_fit"
"""The `stop` of a turn that nobody was asked for: the sandbox refuses the task, or its prompt leaves no room for an answer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One sample of one task.

    Attributes:
        trajectory: its turns with their verdicts, without tokens. `member` is the sample.
        level, family, split: of the task.
        prompt_tokens, answer_tokens, cost: of its policy turns; 0 and None where nobody counts them.
    """

    trajectory: Trajectory
    level: int
    family: str
    split: str
    prompt_tokens: int = 0
    answer_tokens: int = 0
    cost: float | None = None

    @property
    def key(self) -> tuple[str, int]:
        """Task and sample."""
        return self.trajectory.task, self.trajectory.member

    def to_dict(self) -> dict[str, Any]:
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "trajectory"}
        bare = dataclasses.replace(self.trajectory, tokens=[], turn_index=[], logp_sample=[], starts=())
        return {"task": self.trajectory.task, "sample": self.trajectory.member, **data, "trajectory": bare.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Result:
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in names} | {"trajectory": Trajectory.from_dict(data["trajectory"])})


class ResultsFile:
    """Append-only JSONL of results. A line that a crash cut short is dropped with a warning; a damaged one elsewhere is an error.

    Args:
        read_only: a line cut short stays where it is, and nothing can be appended.

    Attributes:
        results: by (task, sample).

    Raises:
        ValueError: a line is damaged; names file and line.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False):
        self.path, self.read_only = Path(path), read_only
        self.results: dict[tuple[str, int], Result] = {}
        if self.path.exists():
            self._read()

    def _read(self) -> None:
        whole = 0
        *lines, last = self.path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                result = Result.from_dict(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{self.path}:{number}: not a result ({error}). Delete that line and run the same command again: what was answered and "
                    "judged is taken from the journals."
                ) from error
            self.results.setdefault(result.key, result)
            whole += len(line) + 1
        if last:
            log.warning("%s: the last line was cut short and is dropped", self.path)
            if not self.read_only:
                os.truncate(self.path, whole)

    def append(self, results: Iterable[Result]) -> None:
        """Appends those that are not there yet."""
        if self.read_only:
            raise ValueError(f"{self.path} was opened for reading alone")
        new = {result.key: result for result in results if result.key not in self.results}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(result.to_dict()) + "\n" for result in new.values()))
            file.flush()
            os.fsync(file.fileno())
        self.results |= new


# --- what counts ----------------------------------------------------------------------------------------------------------------------


def counted(verdict: Verdict, baseline: str) -> float | None:
    """The speedup over a baseline that counts: 0 where the kernel is not correct, was not timed, or owes its speed to others' kernels; None
    where it would count, but that baseline was not timed."""
    if not verdict.correct or not verdict.speed_rewarded or verdict.speedup <= 0:
        return 0.0
    return verdict.speedups.get(baseline, verdict.speedup if baseline == "eager" else None)


def turn_of(trajectory: Trajectory, which: Which, baseline: str) -> Turn | None:
    """The last turn, or the one that is correct with the highest counted speedup; None without any turn."""
    if not trajectory.turns or which == "last_turn":
        return trajectory.turns[-1] if trajectory.turns else None
    return max(trajectory.turns, key=lambda turn: (turn.verdict.correct, counted(turn.verdict, baseline) or 0.0, turn.verdict.compiled))


def measured(results: Iterable[Result], which: Which, baseline: str) -> list[Measured]:
    """Samples as `fast_p.score` takes them; one without a turn is wrong, and a speedup that was not measured is 0."""
    found = []
    for result in results:
        turn = turn_of(result.trajectory, which, baseline)
        if turn is None:
            found.append(Measured(task=result.trajectory.task, speedup=0.0, compiled=False, correct=False))
            continue
        speedup = counted(turn.verdict, baseline) or 0.0
        spread = turn.verdict.spread if speedup not in (0.0, 1.0) else 0.0
        found.append(
            Measured(
                task=result.trajectory.task, speedup=speedup, spread=spread, compiled=turn.verdict.compiled, correct=turn.verdict.correct
            )
        )
    return found


# --- scores ---------------------------------------------------------------------------------------------------------------------------


def plain(value: Value) -> dict[str, float | None]:
    """A value with its interval for JSON, which has no NaN: None."""
    return {name: number if math.isfinite(number) else None for name, number in dataclasses.asdict(value).items()}


def scores(results: Sequence[Result], which: Which, baseline: str, *, seed: int, resamples: int = RESAMPLES) -> dict[str, Any]:
    """Scores over all levels ("all") and by level ("level 1"), as plain data: tasks, samples, compiled, fast (by threshold), geomean, mean."""
    groups = {"all": list(results)} | {
        f"level {level}": [r for r in results if r.level == level] for level in sorted({r.level for r in results})
    }
    found = {}
    for name, group in groups.items():
        own = score(measured(group, which, baseline), seed=seed, resamples=resamples)
        found[name] = {
            "tasks": own.tasks, "samples": own.samples, "compiled": plain(own.compiled),
            "fast": {f"{p:g}": plain(value) for p, value in own.fast.items()}, "geomean": plain(own.geomean), "mean": plain(own.mean),
        }  # fmt: skip
    return found


def faults(results: Sequence[Result], baselines: Sequence[str]) -> dict[str, Any]:
    """What to know of results beside their scores, counted.

    Returns:
        `missing`: samples whose last turn holds no kernel, and `reasons`. `integrity`: kernels of any turn, by the rule that fired.
        `noisy`: of the kernels of last turns that were timed (Verdict.noisy). `speed_not_counted`: correct kernels of last
        turns that owe their speed to others'. `not_timed_against`: such whose speed counts, by the baseline that was not timed. `outcomes` of
        last turns.
    """
    last = [result.trajectory.turns[-1] if result.trajectory.turns else None for result in results]
    verdicts = [turn.verdict for turn in last if turn is not None]
    reasons = Counter(_reason(turn) for turn in last if turn is None or turn.source is None)
    timed = [v for v in verdicts if v.correct and v.speedup > 0]
    every = [v for result in results for v in result.trajectory.verdicts]
    return {
        "missing": {"samples": reasons.total(), "reasons": dict(reasons.most_common())},
        "integrity": dict(Counter(rule for verdict in every for rule in set(verdict.findings)).most_common()),
        "noisy": {"kernels": sum(v.noisy for v in timed), "of": len(timed)},
        "speed_not_counted": sum(v.correct and not v.speed_rewarded for v in verdicts),
        "not_timed_against": {b: n for b in baselines if (n := sum(counted(v, b) is None for v in verdicts))},
        "outcomes": dict(Counter(v.outcome for v in verdicts).most_common()),
    }


def _reason(turn: Turn | None) -> str:
    if turn is None:
        return "no turn"
    return {"eos": turn.error, "length": "cut at its bound of tokens"}.get(turn.stop, turn.stop)


# --- test-time scaling ----------------------------------------------------------------------------------------------------------------


def scaling(results: Sequence[Result], baseline: str, *, turns: int, seed: int, resamples: int = RESAMPLES) -> list[dict[str, Any]]:
    """The best of the first k candidates of a task, for the ways to spend them: k turns of one sample (`serial`), the first turn of k
    samples (`parallel`), or all turns of some samples (`both`), k = 1, 2, 4, ... and the most there are.

    Serial: the mean over all samples of the best of their first k turns. Parallel and both: no particular k of a task's n samples, but the
    expectation over all choices of k of them (for shares the estimator of pass@k, Chen et al. 2021, arXiv 2107.03374, eq. 1). Tasks count
    alike; the geometric mean is over what is correct. Intervals: tasks drawn with replacement.

    Args:
        turns: of a whole trajectory. One that ended before has its best turn so far.

    Returns:
        For each way and k: `way`, `candidates`, `samples` and `turns` that these are, `correct`, `fast_1`, `geomean`.
    """
    by_task: dict[str, list[list[float | None]]] = {}
    for result in results:
        found = [(counted(v, baseline) or 0.0) if v.correct else None for v in result.trajectory.verdicts]
        by_task.setdefault(result.trajectory.task, []).append(found)
    most = min((len(samples) for samples in by_task.values()), default=0)
    rows = [("serial", 1, k) for k in _ks(turns)] + [("parallel", k, 1) for k in _ks(most)]
    rows += [("both", k, turns) for k in _ks(most)] if turns > 1 and most > 1 else []
    draws = np.random.default_rng(seed).integers(len(by_task), size=(resamples, len(by_task))) if by_task else None
    out = []
    for way, samples, within in rows:
        sums = np.array([_expected([_best(turns_[:within]) for turns_ in own], samples) for _, own in sorted(by_task.items())])
        point, drawn = _shares(sums.mean(axis=0)), _shares(sums[draws].mean(axis=1))
        own = {}
        for name, value, values in zip(("correct", "fast_1", "geomean"), point, drawn.T, strict=True):
            kept = values[np.isfinite(values)]
            low, high = np.quantile(kept, (0.025, 0.975)) if len(kept) else (math.nan, math.nan)
            own[name] = plain(Value(value=float(value), low=float(low), high=float(high)))
        out.append({"way": way, "candidates": samples * within, "samples": samples, "turns": within, **own})
    return out


def _ks(most: int) -> list[int]:
    return sorted({k for i in range(most.bit_length()) if (k := 2**i) <= most} | ({most} if most else set()))


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


# --- comparison -----------------------------------------------------------------------------------------------------------------------

STATISTICS = {
    **{f"Fast_{p:g}": (lambda scores, p=p: scores.fast[p]) for p in THRESHOLDS},
    "geomean": lambda scores: scores.geomean,
    "mean": lambda scores: scores.mean,
}


def compare(
    own: Sequence[Result], other: Sequence[Result], baselines: Sequence[str], *, seed: int, resamples: int = RESAMPLES
) -> dict[str, Any]:
    """How much more `own` scores than `other`, over the tasks in both, drawn together (fast_p.difference).

    Returns:
        `tasks` in both, `only_own` and `only_other` counts, `differences` by turn, baseline and statistic.

    Raises:
        ValueError: no task is in both.
    """
    tasks, others = ({result.trajectory.task for result in side} for side in (own, other))
    found: dict[str, Any] = {}
    several = any(len(result.trajectory.turns) > 1 for result in (*own, *other))
    for which in ("last_turn", "best_turn") if several else ("last_turn",):
        for baseline in baselines:
            a, b = measured(other, which, baseline), measured(own, which, baseline)
            found.setdefault(which, {})[baseline] = {
                name: plain(difference(a, b, of, seed=seed, resamples=resamples)[0]) for name, of in STATISTICS.items()
            }
    return {"tasks": len(tasks & others), "only_own": len(tasks - others), "only_other": len(others - tasks), "differences": found}


# --- summary --------------------------------------------------------------------------------------------------------------------------


def summarise(
    results: Sequence[Result],
    settings: Mapping[str, Any],
    *,
    sessions: Sequence[Mapping[str, Any]] = (),
    refused: Mapping[str, str] | None = None,
    spent: Mapping[str, Any] | None = None,
    resamples: int = RESAMPLES,
) -> dict[str, Any]:
    """All that is reported of an evaluation, as plain data (summary.json).

    Args:
        settings: what is evaluated (dk_jax.evaluation.harness.settings_of).
        sessions: of the work (dk_jax.evaluation.harness.Sessions).
        refused: tasks that the sandbox does not admit, and why; such that it rejected when it judged their kernels are found in the results.
        spent: what an endpoint was paid in all, also for answers that stand in no result.
    """
    names, samples, baselines, seed = list(settings["tasks"]), settings["samples"], settings["sandbox"]["baselines"], settings["seed"]
    missing = [name for name in names if sum(r.trajectory.task == name for r in results) < samples]
    unfit = {r.trajectory.task: r.trajectory.turns[0].error for r in results if r.trajectory.turns and r.trajectory.turns[0].stop == UNFIT}
    rejected = {
        r.trajectory.task: " ".join(v.feedback.split())[:200] for r in results for v in r.trajectory.verdicts if v.outcome == "task_rejected"
    }
    known = [r for r in results if r.answer_tokens or r.prompt_tokens]
    tokens = {"prompt": sum(r.prompt_tokens for r in known), "answers": sum(r.answer_tokens for r in known)} if known else None
    costs = [r.cost for r in results if r.cost is not None]
    judged = {(r.trajectory.task, turn.source) for r in results for turn in r.trajectory.turns if turn.source is not None}
    turns = [turn for r in results for turn in r.trajectory.turns]
    found = {"last_turn": {b: scores(results, "last_turn", b, seed=seed, resamples=resamples) for b in baselines} if results else {}}
    several = settings["turns"] > 1 and results
    found["best_turn"] = {b: scores(results, "best_turn", b, seed=seed, resamples=resamples) for b in baselines} if several else found["last_turn"]
    return {
        "partial": len(results) < len(names) * samples,
        "samples": {"there": len(results), "of": len(names) * samples},
        "tasks_not_finished": missing,
        "tasks_refused": {**rejected, **(refused or {})},
        "tasks_that_do_not_fit": unfit,
        "scores": found,
        "scaling": {b: scaling(results, b, turns=settings["turns"], seed=seed, resamples=resamples) for b in baselines} if results else {},
        **faults(results, baselines),
        "tokens": tokens,
        "cost": {"of_results": sum(costs) if costs else None, **(spent or {})},
        "candidates": {"handed_in": sum(turn.source is not None for turn in turns), "distinct": len(judged), "turns": len(turns)},
        "wall_s": sum(session["seconds"] for session in sessions),
        "sessions": list(sessions),
        "settings": dict(settings),
    }


def save_json(path: Path, data: Mapping[str, Any]) -> None:
    """Complete or not at all."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(data, indent=1, allow_nan=False), encoding="utf-8")
    partial.replace(path)
