"""Held-out evaluation: what the trained agents do on tasks they never saw (RECIPES: daVinci-kernel's protocol).

For each task and sample one scheme is selected greedily from the library (none while it is empty), the policy writes T turns,
and the last turn is what counts. All numbers are over (task, sample) pairs, failures included.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dk_jax.rollout.episode import RolloutConfig, choose_schemes, policy_turns
from dk_jax.rollout.judge import Judge
from dk_jax.rollout.speaker import Speaker
from dk_jax.rollout.trajectory import Trajectory, derive_seed
from dk_jax.skills.record import Skill
from dk_jax.tasks.task import Task

FAST_P = (1.0, 1.2, 1.5, 2.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """Shares over (task, sample) pairs, and speedups.

    Attributes:
        samples: number of pairs.
        compiled, correct: shares.
        fast: share that is correct and more than p times as fast as eager by work of its own, by p (KernelBench, arXiv 2502.10517).
        mean_speedup: mean of the speedup, with 0 for what is not correct or owes its speed to others' kernels.
        geomean_correct: geometric mean of the speedup of the correct ones, 0 if there is none.
    """

    samples: int
    compiled: float
    correct: float
    fast: dict[float, float]
    mean_speedup: float
    geomean_correct: float


def score(trajectories: Sequence[Trajectory], *, turn: int = -1) -> Scores:
    """Scores one turn (default: the last) of policy trajectories."""
    verdicts = [t.turns[turn].verdict for t in trajectories]
    if not verdicts:
        raise ValueError("nothing to score: no trajectories")
    n = len(verdicts)
    speedups = [v.earned_speedup for v in verdicts]
    right = [s for s in speedups if s > 0]
    return Scores(
        samples=n,
        compiled=sum(v.compiled for v in verdicts) / n,
        correct=sum(v.correct for v in verdicts) / n,
        fast={p: sum(s > p for s in speedups) / n for p in FAST_P},
        mean_speedup=sum(speedups) / n,
        geomean_correct=math.exp(sum(math.log(s) for s in right) / len(right)) if right else 0.0,
    )


def evaluate(
    speaker: Speaker,
    judge: Judge,
    tasks: Sequence[Task],
    active: Sequence[Skill],
    *,
    config: RolloutConfig,
    samples: int,
    turns: int,
    seed: int,
    phase: str,
    greedy_speaker: Speaker,
    progress: Callable[[int], None] | None = None,
    inject: bool = True,
) -> list[Trajectory]:
    """Runs the protocol and returns the policy trajectories, task by task, `samples` each.

    Args:
        inject: False leaves the library out, nothing is selected (the ablation "no injection at inference").
        speaker: samples the policy. greedy_speaker: temperature 0, chooses the scheme.
        phase: names the work in the judge's journal and the seeds.
    """

    def seed_of(trajectory: Trajectory, turn: int) -> int:
        return derive_seed(seed, phase, trajectory.agent, trajectory.task, trajectory.member, turn)

    by_name = {skill.name: skill for skill in active}
    _, schemes = choose_schemes(greedy_speaker, tasks, active if inject else (), config=config, samples=1, seed_of=seed_of)
    trajectories = [
        Trajectory(agent="policy", task=task.name, group=task.name, scheme=0, member=m, skills=schemes.get((task.name, 0), ()))
        for task in tasks
        for m in range(samples)
    ]
    by_task = {task.name: task for task in tasks}
    policy_turns(
        speaker,
        judge,
        trajectories,
        [by_task[t.task] for t in trajectories],
        [[by_name[name] for name in t.skills] for t in trajectories],
        config=config,
        seed_of=seed_of,
        phase=phase,
        turns=turns,
        progress=progress,
    )
    return trajectories


def all_scores(trajectories: Sequence[Trajectory], *, turns: int) -> dict[str, Any]:
    """Scores of the last turn, of every turn, and by task, as plain data."""
    by_task: dict[str, list[Trajectory]] = {}
    for t in trajectories:
        by_task.setdefault(t.task, []).append(t)

    def plain(scores: Scores) -> dict[str, Any]:
        return {**dataclasses.asdict(scores), "fast": {str(p): v for p, v in scores.fast.items()}}

    return {
        "last_turn": plain(score(trajectories)),
        "turns": [
            plain(score([t for t in trajectories if len(t.turns) > u], turn=u))
            for u in range(turns)
            if any(len(t.turns) > u for t in trajectories)
        ],
        "tasks": {name: plain(score(group)) for name, group in by_task.items()},
    }


def save_scores(path: Path, scores: dict[str, Any]) -> None:
    """Writes scores as JSON, complete or not at all."""
    partial = Path(path).with_suffix(".part")
    partial.write_text(json.dumps(scores, indent=1), encoding="utf-8")
    partial.replace(path)
