"""What a report's sections are made from: samples with their verdicts under one name, and the summary of them.

They come from the folder of an evaluation, or from the rollouts that a run kept of its held-out evaluations: the same sections then show
both. What is there of an evaluation that was cut short is taken, and said to be part of it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dk_jax.evaluation import harness
from dk_jax.evaluation.results import RESULTS, Result, ResultsFile, summarise
from dk_jax.rollout.trajectory import Trajectory, load_trajectories
from dk_jax.tasks.task import Task

STAGES = {"eval_untrained": "untrained", "eval_sft": "before RL", "eval_rl": "after RL"}


class ReportError(ValueError):
    """A file that can't be read; the message names it and says what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Samples under one name.

    Attributes:
        name: as legends say it.
        results: of every sample that is there. summary: of them (dk_jax.evaluation.results.summarise).
        notes: what a reader must know of them, such as that they are not all.
    """

    name: str
    results: tuple[Result, ...]
    summary: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def baselines(self) -> list[str]:
        return list(self.summary["settings"]["sandbox"]["baselines"])

    @property
    def turns(self) -> int:
        return self.summary["settings"]["turns"]

    @property
    def seed(self) -> int:
        return self.summary["settings"]["seed"]

    @property
    def levels(self) -> dict[str, int]:
        """Of each task."""
        return {r.trajectory.task: r.level for r in self.results}


def is_evaluation(path: Path) -> bool:
    """Whether a folder is one of an evaluation, and not of a run."""
    return (path / harness.SETTINGS).exists()


def read_evaluation(path: Path, *, resamples: int) -> Evaluated:
    """The evaluation of a folder, finished or not.

    Raises:
        ReportError: a file is damaged.
    """
    notes = []
    try:
        summary = harness.summary_of(path, resamples=resamples)
        results = tuple(ResultsFile(path / RESULTS, read_only=True).results.values())
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _damaged(path, error) from error
    if summary["partial"]:
        there = summary["samples"]
        notes.append(
            f"not finished: {there['there']} of {there['of']} samples are there, {len(summary['tasks_not_finished'])} tasks are incomplete. "
            "The same command of scripts/evaluate.py goes on."
        )
    if (path / RESULTS).exists() and (data := (path / RESULTS).read_bytes()) and not data.endswith(b"\n"):
        notes.append(f"the last line of {RESULTS} was cut short and is left out.")
    machines = {f"{s['machine']['processor']}, GPU {s['machine']['gpu']}" for s in summary["sessions"]}
    if len(machines) > 1:
        notes.append("judged on different machines, whose timings are not comparable: " + "; ".join(sorted(machines)) + ".")
    if refused := summary["tasks_refused"]:
        notes.append(f"{len(refused)} tasks are none to the sandbox; their samples count as wrong.")
    return Evaluated(name=path.resolve().name, results=results, summary=summary, notes=tuple(notes))


def _damaged(path: Path, error: Exception) -> ReportError:
    """Names the file that does not read as JSON, or the folder where it is something else."""
    if str(path) in str(error):
        return ReportError(str(error))
    for name in (harness.SETTINGS, harness.SESSIONS):
        try:
            if (path / name).exists():
                json.loads((path / name).read_text(encoding="utf-8"))
        except ValueError as reason:
            return ReportError(f"{path / name} can't be read ({reason}). Put it back from a copy, or evaluate into another folder.")
    return ReportError(f"{path}: its files hold no evaluation that this version can read ({error!r}). Evaluate into another folder.")


def stages_of(workdir: Path, tasks: Mapping[str, Task], *, seed: int = 0, resamples: int) -> dict[str, Evaluated]:
    """A run's held-out evaluations, by the stem of their file, from the rollouts that it kept of them; in the order in which they are made.

    Raises:
        ReportError: a file is damaged.
    """
    found = {}
    for stem, name in STAGES.items():
        path = workdir / "rollouts" / f"{stem}.jsonl"
        if not path.exists():
            continue
        trajectories = [t for t in read_trajectories(path) if t.agent == "policy"]
        judged = [t for t in trajectories if t.turns and all(turn.verdict is not None for turn in t.turns)]
        left = len(trajectories) - len(judged)
        notes = (f"{left} of {len(trajectories)} rollouts have no verdict and are left out.",) if left else ()
        if judged:
            results = tuple(_result(t, tasks.get(t.task)) for t in judged)
            found[stem] = Evaluated(name=name, results=results, summary=_summary(results, seed, resamples), notes=notes)
    return found


def read_trajectories(path: Path) -> list[Trajectory]:
    """Raises ReportError for a damaged file."""
    try:
        return load_trajectories(path)
    except (ValueError, AttributeError) as error:
        raise ReportError(f"{path} can't be read ({error}). Delete it to have the report without it.") from error


def _result(t: Trajectory, task: Task | None) -> Result:
    sampled = sum(turn >= 0 for turn in t.turn_index)
    about = dict(level=task.level, family=task.family) if task else dict(level=0, family="")
    return Result(trajectory=t, split="held_out", prompt_tokens=len(t.tokens) - sampled, answer_tokens=sampled, **about)


def _summary(results: Sequence[Result], seed: int, resamples: int) -> dict[str, Any]:
    names = dict.fromkeys(r.trajectory.task for r in results)
    baselines = dict.fromkeys(["eager", *(b for r in results for v in r.trajectory.verdicts for b in v.speedups)])
    settings = {
        "tasks": dict.fromkeys(names, ""),
        "samples": max(sum(r.trajectory.task == name for r in results) for name in names),
        "turns": max(len(r.trajectory.turns) for r in results),
        "seed": seed,
        "sandbox": {"baselines": list(baselines)},
    }
    return summarise(results, settings, resamples=resamples)
