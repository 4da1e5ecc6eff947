"""All that an ablation has come to so far, computed from its folder as plain data: what ablation.json holds and the write-up is made of."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dk_jax.evaluation.results import RESULTS, Result, ResultsFile, counted
from dk_jax.metrics import read_scalars
from dk_jax.reproduce import digests, ledger, published, scores, skills_told
from dk_jax.reproduce.arms import Arm, Job
from dk_jax.reproduce.pieces import cards_of, read_pieces
from dk_jax.reproduce.scores import Evaluations
from dk_jax.reproduce.work import PIECES, Ablation, parts
from dk_jax.train import setup

PARTS = {"siblings": "held-out siblings", "families": "held-out families"}
CURVES = ("reward", "correct", "speedup", "fast_1", "fast_1.5")
HIGHEST = "Fast_2"
ORDERED = ("no_injection", "no_skills")
"""Arms whose order to the full one is told at the highest threshold."""
END_SHARE = 0.25
"""Of the steps: the end, where the policy's integrity is looked at."""


def collect(ablation: Ablation, arms: Sequence[Arm], wanted: Sequence[Job], *, resamples: int = 2000) -> dict[str, Any]:
    """What there is of these arms.

    Args:
        wanted: the jobs that make it whole.
        resamples: of the bootstrap.
    """
    preset = ablation.preset
    seeds = {arm.name: [job.seed for job in wanted if job.kind == "evaluate" and job.arm == arm] for arm in arms}
    found = {arm.name: _evaluations(ablation, arm, seeds[arm.name], wanted) for arm in arms}
    expert = [result for job in wanted if job.kind == "expert" for result in _results(ablation, job)]
    ceiling, of_part = scores.ceilings(expert), parts(setup.load_tasks(preset.start_recipe(wanted[0].start)))
    trained = {job: ablation.run_folder(job) for job in wanted if job.kind == "train"}
    ended = {job: folder for job, folder in trained.items() if ablation.is_done(job)}
    ledgers = {(job.arm.name, job.seed): ledger.spent(folder) for job, folder in trained.items()}
    tasks = {(job.arm.name, job.seed): [line["tasks"] for line in digests.read(folder)] for job, folder in trained.items()}
    open_ = [job.name for job in wanted if not ablation.is_done(job)]
    within = {part: {name for name, own in of_part.items() if own == part} for part in PARTS}
    begun = _begun(ablation, wanted)
    tables = {part: _table(arms, found, begun, tasks_of, ceiling, resamples) for part, tasks_of in within.items()}
    pieces = read_pieces(ablation.folder / PIECES)
    budget = {"candidates": preset.candidates, "tokens": preset.tokens}
    return {
        "preset": preset.name,
        "written": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "partial": bool(open_),
        "open": open_,
        "budget": budget,
        "arms": {arm.name: {"title": arm.title, "changes": _plain(arm.changes), "seeds": seeds[arm.name]} for arm in arms},
        "shared_start": preset.shared_start,
        "tasks": {part: len(own) for part, own in within.items()},
        "expert": {
            "tasks": len({result.key[0] for result in expert}), "right": len(ceiling),
            "geomean": statistics.geometric_mean(ceiling.values()) if ceiling else None,
        },
        "scores": tables,
        "orders": {part: _orders(found, own, resamples) for part, own in within.items()},
        "published": _published(found, resamples),
        "ledger": {f"{arm} {seed}": _spent(own) for (arm, seed), own in ledgers.items()},
        "unequal": ledger.problems({(j.arm.name, j.seed): ledgers[j.arm.name, j.seed] for j in ended}, tasks, **budget),
        "curves": {name: _curves([folder for job, folder in trained.items() if job.arm.name == name]) for name in _trained(arms)},
        "skills": {name: told for name in _trained(arms) if (told := _skills(trained, name))},
        "integrity": {name: told for name in _trained(arms) if (told := _integrity([f for j, f in trained.items() if j.arm.name == name]))},
        "kernels": _kernels(found["full"], of_part) if "full" in found else [],
        "cards": cards_of(pieces),
        "pieces": len({line["piece"] for line in pieces}),
        "versions": [json.loads(text) for text in dict.fromkeys(json.dumps(line["versions"], sort_keys=True) for line in pieces)],
    }  # fmt: skip


def _trained(arms: Sequence[Arm]) -> list[str]:
    return list(dict.fromkeys(arm.trained for arm in arms))


def _plain(changes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in changes.items()}


def _results(ablation: Ablation, job: Job) -> list[Result]:
    """Of an evaluation that is finished: an unfinished one has only the first of the tasks."""
    if not ablation.is_done(job):
        return []
    return list(ResultsFile(ablation.evaluation(job) / RESULTS, read_only=True).results.values())


def _evaluations(ablation: Ablation, arm: Arm, seeds: Sequence[int], wanted: Sequence[Job]) -> Evaluations:
    own, begun = {}, {}
    for job in wanted:
        if job.kind == "evaluate" and job.arm == arm and job.seed in seeds and (results := _results(ablation, job)):
            own[job.seed] = results
            start = next(other for other in wanted if other.kind == "evaluate_start" and other.start == job.start)
            if found := _results(ablation, start):
                begun[job.seed] = found
    return Evaluations(own=own, starts=begun)


def _begun(ablation: Ablation, wanted: Sequence[Job]) -> dict[str, Evaluations]:
    """The cold starts' own evaluations, by kind and their seeds."""
    found: dict[str, dict[int, list[Result]]] = {}
    for job in wanted:
        if job.kind == "evaluate_start" and (results := _results(ablation, job)):
            found.setdefault(f"start_{job.start.kind}", {})[job.start.seed] = results
    return {name: Evaluations(own=own) for name, own in found.items()}


def _table(
    arms: Sequence[Arm], found: Mapping[str, Evaluations], begun: Mapping[str, Evaluations], tasks: set[str], ceiling: Mapping[str, float],
    resamples: int,
) -> dict[str, Any]:  # fmt: skip
    """Rows by arm, the cold starts first; {} where there are no tasks of this part, or nothing is evaluated."""
    sides = {**begun, **{arm.name: found[arm.name] for arm in arms}}
    own = {name: evaluations.within(tasks) for name, evaluations in sides.items()}
    return {name: scores.row(evaluations, ceiling, resamples=resamples) for name, evaluations in own.items() if evaluations.own}


def _orders(found: Mapping[str, Evaluations], tasks: set[str], resamples: int) -> dict[str, Any]:
    """Full less other arms at the highest threshold, on one part of the tasks."""
    full = scores.by_seed(found["full"].within(tasks)) if "full" in found else {}
    out = {}
    for name in ORDERED:
        other = scores.by_seed(found[name].within(tasks)) if name in found else {}
        if (difference := scores.contrast(other, full, HIGHEST, resamples=resamples)) is not None:
            out[name] = difference | {"sign": scores.sign(difference)}
    return out


def _published(found: Mapping[str, Evaluations], resamples: int) -> dict[str, Any]:
    """Beside each difference to the full arm that the paper gives: ours by the same threshold, over all held-out tasks."""
    out: dict[str, Any] = {}
    full = scores.by_seed(found["full"]) if "full" in found else {}
    for arm in published.FIGURES:
        for figure, theirs in published.differences(arm).items():
            other = scores.by_seed(found[arm]) if arm in found else {}
            metric = figure.partition(" ")[2]
            if (ours := scores.contrast(other, full, metric, resamples=resamples)) is not None:
                said = published.agreement(theirs, scores.sign(ours))
                out.setdefault(arm, {})[figure] = {"paper": theirs, "ours": ours, "said": said}
    return out


def _kernels(full: Evaluations, of_part: Mapping[str, str]) -> list[dict[str, Any]]:
    """The full arm's fastest kernel of a last turn on each part of the tasks."""
    best: dict[str, dict[str, Any]] = {}
    for results in full.own.values():
        for result in results:
            turn = result.trajectory.turns[-1]
            speedup, part = counted(turn.verdict, scores.BASELINE) or 0.0, of_part[result.key[0]]
            if speedup > best.get(part, {"speedup": 0.0})["speedup"]:
                own = {"part": part, "task": result.key[0], "speedup": speedup, "skills": list(result.trajectory.skills), "source": turn.source}
                best[part] = own
    return [best[part] for part in PARTS if part in best]


def _spent(own: ledger.Spent) -> dict[str, Any]:
    return {
        "steps": own.steps, "rollouts": own.rollouts, "proofs": own.proofs, "candidates": own.candidates, "tokens": dict(own.tokens),
        "all_tokens": own.all_tokens, "verification_share": own.verification_share,
    }  # fmt: skip


def _curves(folders: Sequence[Any]) -> dict[str, list[float]]:
    """Means over the seeds of each step's metrics, for the steps that all of them have."""
    runs = [lines for folder in folders if (lines := read_scalars(folder / "metrics.jsonl", "rl"))]
    if not runs:
        return {}
    steps = min(len(lines) for lines in runs)
    names = (*CURVES, "skills_proposed", "skills_verified", "skills_active")
    curves = {name: [statistics.mean(lines[i][name] for lines in runs) for i in range(steps)] for name in names}
    return {"step": [float(line["step"]) for line in runs[0][:steps]]} | curves


def _skills(trained: Mapping[Job, Any], name: str) -> dict[str, Any]:
    return skills_told.tell({job.seed: folder for job, folder in trained.items() if job.arm.name == name})


def _integrity(folders: Sequence[Any]) -> dict[str, Any]:
    """Turns on which an integrity rule fired: by step over all seeds, in all, and in the last quarter of each run's steps."""
    runs = [lines for folder in folders if (lines := digests.read(folder))]
    if not runs:
        return {}
    ends = [line for lines in runs for line in lines[-max(1, round(END_SHARE * len(lines))) :]]
    every = [line for lines in runs for line in lines]
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for line in every:
        by_step.setdefault(line["step"], []).append(line)
    rules: dict[str, int] = {}
    for line in every:
        for rule, count in line["rules"].items():
            rules[rule] = rules.get(rule, 0) + count
    return {
        "by_step": {str(step): _share(lines) for step, lines in sorted(by_step.items())}, "all": _share(every), "end": _share(ends),
        "rules": rules,
    }  # fmt: skip


def _share(lines: Sequence[Mapping[str, Any]]) -> float:
    return sum(line["violations"] for line in lines) / max(sum(line["turns"] for line in lines), 1)
