"""Serial refinement with a memory outside the context, for as many turns as one likes (Dr.Kernel's STTS, arXiv 2602.05885; daVinci-kernel,
arXiv 2606.16497, whose 5 turns and then 9 rounds with the best 4 are turns=14, plain=5, window=4).

All attempts of a sample are kept. Each turn answers a fresh prompt that shows the best few of them, kernels with their authors' summaries and
verdicts, from the worst to the best, so that the best is nearest to what is asked. Prompts stay as long as a few kernels, however many turns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dk_jax.agents import policy
from dk_jax.agents.text import TaskView
from dk_jax.rollout.episode import RolloutConfig, policy_turns, task_view
from dk_jax.rollout.judge import Judge
from dk_jax.rollout.speaker import Speaker
from dk_jax.rollout.trajectory import STAGES, Trajectory
from dk_jax.search.fresh_turn import fresh_turn
from dk_jax.search.strategy import check_switch, check_whole
from dk_jax.skills.record import Skill
from dk_jax.tasks.task import Task


def make(numbers: Mapping[str, Any]) -> Memory:
    """From `evaluation.search`. Raises ValueError: a number that it can't be."""
    plain = check_whole(numbers, "plain", least=0)
    return Memory(recall=make_recall(numbers), plain=plain)


def make_recall(numbers: Mapping[str, Any]) -> Recall:
    """From the `window` and `latest` of `evaluation.search`. Raises ValueError: what they can't be."""
    return Recall(window=check_whole(numbers, "window", least=1), latest=check_switch(numbers, "latest"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall:
    """Which attempts a prompt tells of.

    Attributes:
        window: so many at most. latest: the latest is always among them, however bad.
    """

    window: int
    latest: bool = False

    def chosen(self, trajectory: Trajectory) -> list[int]:
        """Turns of a trajectory, the least valuable first: by reward, then by the speedup that counts, then by how far they got, then by age.
        Of a kernel that was handed in several times only the last is an attempt."""
        turns = trajectory.turns
        last = {turn.source if turn.source is not None else ("none", i): i for i, turn in enumerate(turns)}

        def worth(i: int) -> tuple[float, float, int, int]:
            verdict = turns[i].verdict
            return verdict.reward, verdict.earned_speedup, STAGES.index(verdict.stage), i

        ranked = sorted(last.values(), key=worth, reverse=True)
        kept = ranked[: self.window]
        if self.latest and turns and len(turns) - 1 not in kept:
            kept[-1] = len(turns) - 1
        return sorted(kept, key=worth)

    def prompt(
        self, speaker: Speaker, trajectory: Trajectory, view: TaskView, skills: Sequence[Skill], *, config: RolloutConfig
    ) -> tuple[str, str | None]:
        """The prompt of a trajectory's next turn, and the kernel that an answer may hand in again: that of the attempt shown last.

        Where the attempts do not fit into the context the least valuable are left out, with `latest` that one last of all.
        """
        chosen, newest = self.chosen(trajectory), len(trajectory.turns) - 1
        while True:
            attempts = [
                policy.Attempt(
                    source=trajectory.turns[i].source,
                    summary=policy.own_summary(trajectory.turns[i].text, style=config.style),
                    verdict=trajectory.turns[i].verdict,
                )
                for i in chosen
            ]
            prompt = policy.render_first(view, skills, style=config.style, attempts=attempts, summarise=True)
            if not chosen or speaker.fits(prompt, config.max_policy_tokens):
                return prompt, attempts[-1].source if attempts else None
            chosen.remove(next((i for i in chosen if not (self.latest and i == newest)), chosen[0]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Serial refinement, each turn from the best of all before.

    Attributes:
        recall: what prompts tell of.
        plain: so many turns are one conversation first; one that has no room for them all goes on with fresh prompts earlier.
    """

    recall: Recall
    plain: int = 0

    def __call__(
        self,
        speaker: Speaker,
        judge: Judge,
        trajectories: Sequence[Trajectory],
        tasks: Sequence[Task],
        skills: Sequence[Sequence[Skill]],
        *,
        config: RolloutConfig,
        seed_of: Callable[[Trajectory, int], int],
        phase: str,
        turns: int,
        timed: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """See dk_jax.search.strategy."""
        fields = dict(config=config, seed_of=seed_of, phase=phase, timed=timed, progress=progress)
        if plain := min(self.plain, turns):
            policy_turns(speaker, judge, trajectories, tasks, skills, turns=plain, **fields)
        unanswered = {id(trajectory) for trajectory, _ in getattr(speaker, "unfinished", ())}  # an endpoint's, which is asked again another time
        until = [0 if id(trajectory) in unanswered else turns for trajectory in trajectories]
        refine(speaker, judge, trajectories, tasks, skills, recall=self.recall, until=until, **fields)


def refine(
    speaker: Speaker,
    judge: Judge,
    trajectories: Sequence[Trajectory],
    tasks: Sequence[Task],
    skills: Sequence[Sequence[Skill]],
    *,
    recall: Recall,
    until: Sequence[int],
    config: RolloutConfig,
    seed_of: Callable[[Trajectory, int], int],
    phase: str,
    timed: bool,
    progress: Callable[[int], None] | None,
) -> None:
    """Gives each trajectory turns with fresh prompts until it has `until` of them, all together. One that gets no answer ends."""
    views = [task_view(task, language=config.language, form=config.form) for task in tasks]
    going = [i for i, trajectory in enumerate(trajectories) if len(trajectory.turns) < until[i]]
    number = 0
    while going:
        told = [recall.prompt(speaker, trajectories[i], views[i], skills[i], config=config) for i in going]
        answered = fresh_turn(
            speaker,
            judge,
            [trajectories[i] for i in going],
            [prompt for prompt, _ in told],
            [tasks[i] for i in going],
            [seed_of(trajectories[i], len(trajectories[i].turns)) for i in going],
            previous=[source for _, source in told],
            config=config,
            phase=f"{phase}/refine{number}",
            timed=timed,
            progress=progress,
        )
        going = [i for i, spoke in zip(going, answered, strict=True) if spoke and len(trajectories[i].turns) < until[i]]
        number += 1
