"""What the write-up needs of each RL step's rollouts, in a line a step: rollouts themselves are too large to travel."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dk_jax.rollout.trajectory import Trajectory, load_trajectories

FILE = "digests.jsonl"


def step_digest(trajectories: Sequence[Trajectory], *, step: int, null: int, floor: float) -> dict[str, Any]:
    """Of one step.

    Args:
        null: index of the null scheme.
        floor: speedup that a rollout without a correct kernel counts as.

    Returns:
        `tasks` in order; `turns` of the policy, by outcome in `outcomes`; `violations`: those on which an integrity rule fired, by rule in
        `rules`; `effects`: for each scheme with skills its task, skills, and the mean log-speedup of its rollouts' best turns less that of the
        task's null scheme.
    """
    policy = [t for t in trajectories if t.agent == "policy" and t.timed]
    verdicts = [v for t in policy for v in t.verdicts]
    fired = [set(v.findings) or {"integrity"} for v in verdicts if v.findings or v.outcome == "integrity"]
    schemes: dict[tuple[str, int], list[Trajectory]] = {}
    for t in policy:
        schemes.setdefault((t.task, t.scheme), []).append(t)

    def log_speed(group: Sequence[Trajectory]) -> float:
        best = [t.best.verdict.earned_speedup if t.best is not None else 0.0 for t in group]
        return sum(math.log(max(speedup, floor)) for speedup in best) / len(best)

    effects = [
        [task, list(group[0].skills), log_speed(group) - log_speed(schemes[task, null])]
        for (task, scheme), group in schemes.items()
        if group[0].skills and scheme != null and (task, null) in schemes
    ]
    return {
        "step": step,
        "tasks": list(dict.fromkeys(t.task for t in policy)),
        "turns": len(verdicts),
        "outcomes": dict(Counter(v.outcome for v in verdicts)),
        "violations": len(fired),
        "rules": dict(Counter(rule for rules in fired for rule in rules)),
        "effects": effects,
    }


def update(workdir: Path, *, step: int, null: int, floor: float) -> None:
    """Adds the steps up to `step` that are not in the workdir's digests yet, from its rollouts; complete or not at all."""
    known = {line["step"]: line for line in read(workdir)}
    new = [at for at in range(1, step + 1) if at not in known]
    if not new and all(at <= step for at in known):
        return
    for at in new:
        trajectories = load_trajectories(workdir / "rollouts" / f"step_{at:05d}.jsonl")
        known[at] = step_digest(trajectories, step=at, null=null, floor=floor)
    partial = workdir / f"{FILE}.part"
    partial.write_text("".join(json.dumps(known[at]) + "\n" for at in sorted(known) if at <= step), encoding="utf-8")
    partial.replace(workdir / FILE)


def read(workdir: Path) -> list[dict[str, Any]]:
    """The digests of a workdir, by step."""
    path = workdir / FILE
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
