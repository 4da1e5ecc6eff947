"""What a step's rollouts come to: numbers for the log, and what they say of the skills that were shown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dk_jax.models.config import AGENTS
from dk_jax.rollout.episode import StepRollouts
from dk_jax.rollout.trajectory import Trajectory


def rollout_metrics(rollouts: StepRollouts) -> dict[str, float]:
    """What one step's policy rollouts were worth, and how they went; those that were not timed apart."""
    policy: list[Trajectory] = [t for t in rollouts.of("policy") if t.rewards and t.timed]
    checked = [v.correct for t in rollouts.of("policy") if not t.timed for v in t.verdicts]
    verdicts = [v for t in policy for v in t.verdicts]
    first = [t.verdicts[0] for t in policy]
    speedups = [v.earned_speedup for v in verdicts]
    proposals = rollouts.proposals
    return {
        "reward": float(np.mean([max(t.rewards) for t in policy])),
        "compiled": float(np.mean([v.compiled for v in verdicts])),
        "correct": float(np.mean([v.correct for v in verdicts])),
        "correct_first_turn": float(np.mean([v.correct for v in first])),
        "speedup": float(np.mean(speedups)),
        "fast_1": float(np.mean([s > 1.0 for s in speedups])),
        "fast_1.5": float(np.mean([s > 1.5 for s in speedups])),
        "noisy": float(np.mean([v.noisy for v in verdicts])),
        "distinct": len({turn.source for t in policy for turn in t.turns if turn.source}) / max(len(verdicts), 1),
        "truncated": float(np.mean([turn.stop != "eos" for t in policy for turn in t.turns])),
        **({"checked_correct": float(np.mean(checked))} if checked else {}),
        "proposals": float(len(proposals)),
        "proposals_accepted": float(sum(p.accepted for p in proposals)),
        **spending(rollouts),
    }


def spending(rollouts: StepRollouts) -> dict[str, float]:
    """What a step's rollouts took:

        spent_candidates            kernels of rollouts that were handed to the judge, equal ones each time
        spent_proofs                candidates of verifications, of both arms
        spent_tokens_AGENT          sampled for its messages
        spent_tokens_verification   sampled by the policy for verifications
    """
    found = {
        "spent_candidates": float(sum(turn.source is not None for t in rollouts.of("policy") for turn in t.turns)),
        "spent_proofs": float(sum(p.candidates for p in rollouts.proposals)),
        "spent_tokens_verification": float(sum(p.tokens for p in rollouts.proposals)),
    }
    for agent in AGENTS:
        found[f"spent_tokens_{agent}"] = float(sum(turn >= 0 for t in rollouts.of(agent) for turn in t.turn_index))
    return found


def skill_usage(rollouts: StepRollouts, *, null: int, floor: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """(skill, arguments of `SkillLibrary.use`) for each time a skill was shown to, or chosen by, the selection agent, or by retrieval alone.

    The effect of a chosen skill is the mean log-speedup of its scheme's rollouts less that of the task's null scheme.

    Args:
        null: index of the null scheme.
        floor: speedup that a rollout without a correct kernel counts as.
    """
    speed: dict[tuple[str, int], list[float]] = {}
    for t in rollouts.of("policy"):
        speed.setdefault((t.task, t.scheme), []).append(t.best.verdict.earned_speedup if t.best is not None else 0.0)

    def log_speed(key: tuple[str, int]) -> float:
        return float(np.mean([np.log(max(s, floor)) for s in speed[key]]))

    for t in rollouts.of("selection"):
        for name in t.shown:
            yield name, dict(shown=1)
        for name in t.skills:
            yield name, dict(selected=1, log_effects=[log_speed((t.task, t.scheme)) - log_speed((t.task, null))])
    chosen = {(t.task, t.scheme) for t in rollouts.of("selection")}
    retrieved = {(t.task, t.scheme): t.skills for t in rollouts.of("policy") if (t.task, t.scheme) not in chosen}
    for key, skills in retrieved.items():
        for name in skills:
            yield name, dict(selected=1, log_effects=[log_speed(key) - log_speed((key[0], null))])
