"""What a run left in its workdir, read for the report.

What is not there yet is None or empty; a file that is there and can't be read is a ReportError that names it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from dk_jax.evaluation.evaluated import STAGES, Evaluated, ReportError, read_trajectories, stages_of
from dk_jax.metrics import read_scalars
from dk_jax.rollout.trajectory import Trajectory
from dk_jax.skills.library import LibraryError, SkillLibrary
from dk_jax.skills.lifecycle import Lifecycle, Posterior
from dk_jax.skills.record import Skill
from dk_jax.skills.rules import rules_of
from dk_jax.skills.view import LibraryView
from dk_jax.tasks.task import Task

SHARES = ("compiled", "correct")
SPEEDUPS = ("mean_speedup", "geomean_correct")
FAST = ("1.0", "1.2", "1.5", "2.0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
    """What a workdir holds; None or empty where the run has not come that far.

    Attributes:
        posteriors: what is known of the effects of skills that are active or rest, by name.
        growth: the library's counts (LibraryView.counts) after each step that was committed, by step.
        stages: the held-out evaluations with their rollouts, by the stem of their file.
    """

    name: str
    config: dict[str, Any] | None
    untrained: dict[str, Any] | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    corpus: dict[str, Any] | None
    sft: list[dict[str, Any]]
    rl: list[dict[str, Any]]
    skills: list[Skill]
    posteriors: dict[str, Posterior]
    growth: list[tuple[int, dict[str, int]]]
    stages: dict[str, Evaluated]
    kernels: list[Trajectory]
    kernels_from: str
    tasks: dict[str, Task]


def load(workdir: Path, *, resamples: int) -> Contents:
    """Reads a workdir; raises ReportError for a damaged file. `resamples`: of the intervals of its held-out evaluations."""
    config = _json(workdir / "config.json")
    metrics = workdir / "metrics.jsonl"
    phases = {phase: _scalars(metrics, phase) for phase in ("corpus", "sft", "rl")}
    kernels, kernels_from = _kernels(workdir / "rollouts")
    skills, posteriors, growth = _skills(workdir / "library.sqlite")
    tasks = _tasks(config)
    return Contents(
        name=workdir.resolve().name,
        config=config,
        untrained=_scores(workdir / "eval_untrained.json"),
        before=_scores(workdir / "eval_sft.json"),
        after=_scores(workdir / "eval_rl.json"),
        corpus=phases["corpus"][-1] if phases["corpus"] else None,
        sft=phases["sft"],
        rl=phases["rl"],
        skills=skills,
        posteriors=posteriors,
        growth=growth,
        stages=stages_of(workdir, tasks, seed=(config or {}).get("seed", 0), resamples=resamples),
        kernels=kernels,
        kernels_from=kernels_from,
        tasks=tasks,
    )


def _json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(path, error) from error
    if not isinstance(data, dict):
        raise _damaged(path, "it holds no JSON object")
    return data


def _damaged(path: Path, why: object) -> ReportError:
    return ReportError(
        f"{path} can't be read ({why}). Put it back from a copy, or delete it and start the run again."
    )


def _scalars(path: Path, phase: str) -> list[dict[str, Any]]:
    try:
        entries = read_scalars(path, phase)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"a line is not an object with phase and step: {error!r}") from error
    for entry in entries:
        for name, value in entry.items():
            if name != "phase" and not isinstance(value, (int, float)):
                where = f"phase {phase}, step {entry['step']}"
                raise _damaged(path, f"{where}: {name} is {value!r:.60}, not a number")
    return entries


def _scores(path: Path) -> dict[str, Any] | None:
    data = _json(path)
    if data is None:
        return None
    try:
        for scores in (data["last_turn"], *data["turns"], *data["tasks"].values()):
            [float(scores[key]) for key in (*SHARES, *SPEEDUPS, "samples")]
            [float(scores["fast"][key]) for key in FAST]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(path, f"it holds no held-out scores: {error!r}") from error
    return data


def _kernels(directory: Path) -> tuple[list[Trajectory], str]:
    """Policy trajectories of the latest phase that kept its rollouts, and what to call it."""
    steps = sorted(directory.glob("step_*.jsonl"))
    sources = [(directory / f"{stem}.jsonl", f"held-out tasks {name}") for stem, name in reversed(STAGES.items())]
    sources[1:1] = [(steps[-1], f"RL step {int(steps[-1].stem[5:])}")] if steps else []
    for path, name in sources:
        if path.exists():
            return [t for t in read_trajectories(path) if t.agent == "policy"], name
    return [], ""


def _skills(path: Path) -> tuple[list[Skill], dict[str, Posterior], list[tuple[int, dict[str, int]]]]:
    """All skills, by name what is known of the effects of those that are active or rest, and the counts after each step."""
    if not path.exists():
        return [], {}, []
    try:
        rules, _ = rules_of(path.with_name("config.json"), {})
        with SkillLibrary(path) as library:
            return library.skills(), Lifecycle(rules).posteriors(library, library.step), _growth(library)
    except (LibraryError, ValueError, TypeError) as error:
        raise ReportError(f"{path} can't be read: {error} Put it back from a copy.") from error


def _growth(library: SkillLibrary) -> list[tuple[int, dict[str, int]]]:
    view, found = LibraryView(), []
    for logged in library.history():
        if logged.undone or logged.event.kind == "rollback":
            continue
        if logged.event.kind == "commit":
            found.append((logged.step, view.counts()))
        else:
            view.apply(logged.event)
    return found


def _tasks(config: dict[str, Any] | None) -> dict[str, Task]:
    """Tasks of the config by name; empty without a config, or where the files that they are read from have gone or
    are no tasks any more."""
    options = (config or {}).get("tasks", {})
    source = options.get("source")
    if source == "builtin":
        from dk_jax.tasks.builtin import builtin_suite

        return {task.name: task for task in builtin_suite(options["size"])}
    if source == "learnable":
        from dk_jax.tasks.learnable import learnable_tasks

        return {task.name: task for task in learnable_tasks(options["size"])}
    if source and Path(options["directory"]).exists():
        from dk_jax.tasks.kernelbench import TaskFileError
        from dk_jax.tasks.records import Fields
        from dk_jax.tasks.sources import load_source

        named = {name: tuple(paths) for name, paths in options.get("fields", {}).items() if paths}
        levels, rows = tuple(options["levels"]), options.get("rows", 0)
        try:
            found = load_source(source, options["directory"], levels=levels, size=options["size"], fields=Fields(**named), rows=rows)
        except TaskFileError:
            return {}  # they were there when the run read them; its results are whole without
        return {task.name: task for task in found.tasks}
    return {}
