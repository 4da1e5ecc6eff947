"""The last turns of many trajectories, read and judged together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dk_jax.agents import policy
from dk_jax.rollout.judge import Judge, Request
from dk_jax.rollout.trajectory import Trajectory, Verdict
from dk_jax.tasks.task import Task

if TYPE_CHECKING:
    from dk_jax.rollout.episode import RolloutConfig


def judge_last_turns(
    judge: Judge,
    trajectories: Sequence[Trajectory],
    tasks: Sequence[Task],
    previous: Sequence[str | None],
    *,
    config: RolloutConfig,
    phase: str,
    timed: bool,
    progress: Callable[[int], None] | None,
) -> None:
    """Reads the kernel of each trajectory's last turn, has all of them judged, and gives the turns verdicts and rewards, in place.

    Args:
        previous: for each the kernel that its message may hand in again, or None.
        phase: names the work in the judge's journal. progress: called with the number of newly judged turns.
    """
    asked = []
    for trajectory, task, kept in zip(trajectories, tasks, previous, strict=True):
        last = trajectory.turns[-1]
        parsed = policy.parse(last.text, style=config.style, previous=kept)
        if last.stop != "eos":
            last.error = last.error or f"the message was cut at {config.max_policy_tokens} tokens"
        elif parsed.source is None:
            last.error = parsed.error
        else:
            last.source = parsed.source
        if last.source is None:
            last.verdict = Verdict.without_kernel(last.error, penalty=-config.failure_reward)
            if progress is not None:
                progress(1)
        else:
            asked.append((last, Request(task=task, source=last.source)))
    verdicts = judge.evaluate([request for _, request in asked], phase=phase, progress=progress, timed=timed)
    for (turn, _), verdict in zip(asked, verdicts, strict=True):
        turn.verdict = verdict
    for trajectory in trajectories:
        last = trajectory.turns[-1]
        last.reward = last.verdict.reward
        trajectory.rewards.append(last.reward)
