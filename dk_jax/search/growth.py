"""A library that grows while it is used: what a chunk of an evaluation teaches is on offer to those after it, as in training but without it.

After a chunk, rollouts that improved on themselves are told to the policy's summary agent; the skills that it proposes are proved by the
sandbox, the same policy writing both arms (dk_jax.rollout.verify); those that hold enter the library.

The library lies beside the results. Its step 0 is what was on offer at the beginning, and step n + 1 holds what chunk n taught, accepted or
not. It is written after the chunk's results and from them: a crash between the two leaves a step that the next start makes from the file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dk_jax.rollout.episode import RolloutConfig, summarise, task_view, triggers
from dk_jax.rollout.judge import Judge
from dk_jax.rollout.trajectory import Trajectory, derive_seed
from dk_jax.rollout.verify import Call, Verifier
from dk_jax.skills.library import SkillLibrary
from dk_jax.skills.record import Skill
from dk_jax.tasks.task import Task

LIBRARY = "library.sqlite"


@dataclasses.dataclass(kw_only=True)
class Growth:
    """The growing library of one evaluation.

    Attributes:
        library: see `begin`. verifier: proves proposals, at most `max_verifications` a chunk.
    """

    library: SkillLibrary
    verifier: Verifier

    def begin(self, offered: Sequence[Skill]) -> None:
        """Puts what is on offer at the beginning into the library, if it is not there."""
        if self.library.step < 0:
            self.library.discard()
            for skill in offered:
                self.library.add(dataclasses.replace(skill, status="active"))
            self.library.commit(0)

    def offered(self, chunk: int) -> list[Skill]:
        """What is on offer to a chunk, all before it being known."""
        return self.library.at_step(chunk).active()

    def knows(self, chunk: int) -> bool:
        """Whether the library has what a chunk taught."""
        return self.library.step > chunk

    def learn(
        self, chunk: int, trajectories: Sequence[Trajectory], tasks: Sequence[Task], *, speaker: Any, judge: Judge, config: RolloutConfig, seed: int
    ) -> None:
        """Takes in what a chunk's rollouts teach, as the library's next step: all of it or nothing.

        Args:
            trajectories: of the policy, as results keep them. tasks: of the chunk.
            speaker: writes summaries and both arms of every proof.
            seed: of the evaluation.
        """

        def seed_of(call: Trajectory, turn: int) -> int:
            return derive_seed(seed, "growth", chunk, call.agent, call.task, call.group, call.member, turn)

        active, by_task = self.offered(chunk), {task.name: task for task in tasks}
        by_name = {skill.name: skill for skill in active}
        calls: list[Call] = []
        for trigger in triggers(trajectories, alpha=config.alpha, beta=config.beta, limit=config.max_triggers):
            calls += summarise(speaker, trigger, by_task, by_name, config=config, seed_of=seed_of)
        proposals = self.verifier.verify(
            speaker, judge, calls, by_task, active, config=config, seed=seed, step=chunk + 1,
            views=lambda task: task_view(task, language=config.language, form=config.form),
        )  # fmt: skip
        self.library.discard()
        self.verifier.stage(self.library, proposals, step=chunk + 1)
        self.library.commit(chunk + 1)


def grown(path: Path, *, of: int) -> dict[str, Any]:
    """How a library has grown, as plain data.

    Args:
        of: chunks of the whole evaluation.

    Returns:
        `chunks` that it knows, and `of`; `offered` at the beginning; in all `proposed` (those that came to a proof), `accepted` and `active`;
        and these three after each of the `steps`.
    """
    steps: list[dict[str, int]] = []
    offered = 0
    if path.exists():
        with SkillLibrary(path) as library:
            views = [library.at_step(step) for step in range(library.step + 1)]
        start = {skill.id for skill in views[0].skills()} if views else set()
        offered = len(views[0].active()) if views else 0
        for view in views[1:]:
            new = [skill for skill in view.skills() if skill.id not in start]
            accepted = sum(skill.status != "rejected" for skill in new)
            steps.append({"proposed": len(new), "accepted": accepted, "active": len(view.active())})
    last = steps[-1] if steps else {"proposed": 0, "accepted": 0, "active": offered}
    return {"chunks": len(steps), "of": of, "offered": offered, **last, "steps": steps}
