"""What an evaluation has found: its results as a file, their scores, the schemes they were made with, and comparison with another one.

Everything here is computed from results.jsonl, a line a (task, sample), and from what the evaluation remembers of itself; nothing is judged
again. Scores are those of dk_jax.evaluation.fast_p; test-time scaling is dk_jax.evaluation.scaling. A sample without a kernel, for whatever
reason, counts as one that is wrong.
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

from dk_jax.evaluation.fast_p import RESAMPLES, THRESHOLDS, Measured, Value, difference, score
from dk_jax.rollout.trajectory import Trajectory, Turn, Verdict
from dk_jax.search.schemes import origin

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
        prompt_tokens, answer_tokens, cost: of its turns and further calls; 0 and None where nobody counts them.
        calls, tokens: of each turn the messages, those of further calls included, and the tokens of all of them; () where nobody counted.
        further: calls that were made for it and are no candidates: a judge's, and the selection agent's at the first sample of a scheme.
    """

    trajectory: Trajectory
    level: int
    family: str
    split: str
    prompt_tokens: int = 0
    answer_tokens: int = 0
    cost: float | None = None
    calls: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    further: tuple[Trajectory, ...] = ()

    @property
    def key(self) -> tuple[str, int]:
        """Task and sample."""
        return self.trajectory.task, self.trajectory.member

    def to_dict(self) -> dict[str, Any]:
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in ("trajectory", "further")}
        if self.further:
            data["further"] = [_bare(call) for call in self.further]
        return {"task": self.trajectory.task, "sample": self.trajectory.member, **data, "trajectory": _bare(self.trajectory)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Result:
        names = {field.name for field in dataclasses.fields(cls)}
        kept = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items() if name in names}
        further = tuple(Trajectory.from_dict(call) for call in data.get("further", ()))
        return cls(**kept | {"trajectory": Trajectory.from_dict(data["trajectory"]), "further": further})


def _bare(trajectory: Trajectory) -> dict[str, Any]:
    return dataclasses.replace(trajectory, tokens=[], turn_index=[], logp_sample=[], starts=()).to_dict()


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


# --- schemes of a selection search ----------------------------------------------------------------------------------------------------


def by_scheme(results: Sequence[Result], selections: int, first_turns: int, baseline: str, *, seed: int, resamples: int = RESAMPLES):
    """Scores by who chose a sample's skills (dk_jax.search.schemes): the null scheme beside those that the selection agent or retrieval chose.

    First turns compare the schemes; in best turns is also that the better ones got more turns.

    Returns:
        By origin: `samples`, `candidates`, `went_on` (samples that got more than the first turns), and of `first_turn` and `best_turn` what
        `scores` says of all levels.
    """
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(origin(result.trajectory.scheme, selections), []).append(result)
    found = {}
    for name, own in sorted(groups.items(), key=lambda item: ("null", "chosen", "bm25").index(item[0])):
        first = [dataclasses.replace(r, trajectory=dataclasses.replace(r.trajectory, turns=r.trajectory.turns[:1])) for r in own]
        found[name] = {
            "samples": len(own),
            "candidates": sum(len(r.trajectory.turns) for r in own),
            "went_on": sum(len(r.trajectory.turns) > first_turns for r in own),
            "first_turn": scores(first, "last_turn", baseline, seed=seed, resamples=resamples)["all"],
            "best_turn": scores(own, "best_turn", baseline, seed=seed, resamples=resamples)["all"],
        }
    return found


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
    marked: Mapping[str, Sequence[str]] | None = None,
    spent: Mapping[str, Any] | None = None,
    growth: Mapping[str, Any] | None = None,
    resamples: int = RESAMPLES,
) -> dict[str, Any]:
    """All that is reported of an evaluation, as plain data (summary.json).

    Args:
        settings: what is evaluated (dk_jax.evaluation.harness.settings_of); `search` may be absent, for "turns".
        sessions: of the work (dk_jax.evaluation.harness.Sessions).
        refused: tasks that the sandbox can't use, and why; such that it rejected when it judged their kernels are found in the results.
        marked: what is to be told of others (dk_jax.train.admission.marks).
        spent: what an endpoint was paid in all, also for answers that stand in no result.
        growth: of the library (dk_jax.search.growth.grown), None where it does not grow.
    """
    from dk_jax.evaluation import scaling

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
    several, search = settings["turns"] > 1 and results, settings.get("search", {"name": "turns"})
    shape = scaling.shape_of(settings)
    ways = dict(seed=seed, resamples=resamples)
    found["best_turn"] = {b: scores(results, "best_turn", b, seed=seed, resamples=resamples) for b in baselines} if several else found["last_turn"]
    return {
        "partial": len(results) < len(names) * samples or growth is not None and growth["chunks"] < growth["of"],
        "samples": {"there": len(results), "of": len(names) * samples},
        "tasks_not_finished": missing,
        "tasks_refused": {**rejected, **(refused or {})},
        "tasks_that_do_not_fit": unfit,
        "tasks_marked": {name: list(said) for name, said in (marked or {}).items()},
        "scores": found,
        "scaling": {b: scaling.scaling(results, b, shape, **ways) for b in baselines} if results else {},
        "budgets": {b: scaling.budgets(results, b, shape, **ways) for b in baselines} if results else {},
        "schemes": (
            {b: by_scheme(results, search["selections"], search["first_turns"], b, **ways) for b in baselines}
            if search["name"] == "schemes" and results
            else {}
        ),
        "growth": growth,
        **faults(results, baselines),
        "tokens": tokens,
        "cost": {"of_results": sum(costs) if costs else None, **(spent or {})},
        "calls": {
            "messages": sum(sum(r.calls) or len(r.trajectory.turns) for r in results),
            "further": sum(len(call.turns) for r in results for call in r.further),
        },
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
