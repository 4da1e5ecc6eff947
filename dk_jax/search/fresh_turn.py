"""One turn of many trajectories together, each answering a prompt of its own: sampled, read and judged.

What dk_jax.rollout.episode.policy_turns does turn by turn, for recipes that write each turn's prompt themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dk_jax.agents.text import Style, is_compact
from dk_jax.rollout.episode import RolloutConfig
from dk_jax.rollout.judge import Judge
from dk_jax.rollout.speaker import Speaker
from dk_jax.rollout.trajectory import Trajectory
from dk_jax.rollout.turns import judge_last_turns
from dk_jax.tasks.task import Task


def refuse_compact(name: str, style: Style) -> None:
    """Raises ValueError where the prompts of a recipe can't be written: in compact style a message is a kernel and nothing else."""
    if is_compact(style):
        raise ValueError(f"evaluation.search.name={name!r} with style='compact': its prompts need a model that reads English: --config.style=chat")


def fresh_turn(
    speaker: Speaker,
    judge: Judge,
    trajectories: Sequence[Trajectory],
    prompts: Sequence[str],
    tasks: Sequence[Task],
    seeds: Sequence[int],
    *,
    previous: Sequence[str | None],
    config: RolloutConfig,
    phase: str,
    timed: bool,
    progress: Callable[[int], None] | None,
) -> list[bool]:
    """Appends a turn with its verdict and reward to each trajectory, in place; `previous`: the kernels that a message may hand in again.

    Returns, for each, whether there was room and an answer; one without is left as it was.
    """
    fit = [speaker.fits(prompt, config.max_policy_tokens) for prompt in prompts]
    rows = [i for i, fits in enumerate(fit) if fits]
    if not rows:
        return fit
    answered = speaker.speak(
        [trajectories[i] for i in rows], [prompts[i] for i in rows], [seeds[i] for i in rows], max_new=config.max_policy_tokens, fresh=True
    )
    rows = [i for i, spoke in zip(rows, answered, strict=True) if spoke]
    judge_last_turns(
        judge, [trajectories[i] for i in rows], [tasks[i] for i in rows], [previous[i] for i in rows], config=config, phase=phase, timed=timed,
        progress=progress,
    )  # fmt: skip
    return [i in rows for i in range(len(trajectories))]
