"""Selection search at test time: several sets of skills a task, and successive halving of what they are worth (Jamieson and Talwalkar 2016,
arXiv 1502.07943, algorithm 1).

The selection agent is asked several times at the policy's temperature; with the empty set (the null scheme) and, if asked for, what retrieval
finds first, its distinct answers are the task's schemes. Samples are dealt out to them in turn. After `first_turns` of each sample the best
schemes, one in `eta`, go on, and so on until one is left; each of these rounds has an equal share of what is left of samples x turns, so that
the whole costs as many candidates as any other strategy. Turns answer fresh prompts that tell of the sample's best attempts, as those of
dk_jax.search.memory: any number of them fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dk_jax.agents import selection
from dk_jax.rollout.episode import RolloutConfig, select_skills, task_view
from dk_jax.rollout.judge import Judge
from dk_jax.rollout.speaker import Speaker
from dk_jax.rollout.trajectory import Trajectory
from dk_jax.search.memory import Recall, make_recall, refine
from dk_jax.search.strategy import check_switch, check_whole
from dk_jax.skills.record import Skill
from dk_jax.skills.retrieval import SkillIndex
from dk_jax.tasks.task import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """A set of skills for a task.

    Attributes:
        index: as in Trajectory.scheme. skills: their names.
        calls: of the selection agent that came to this.
    """

    index: int = 0
    skills: tuple[str, ...] = ()
    calls: tuple[Trajectory, ...] = ()


def distinct(schemes: Sequence[Scheme]) -> list[Scheme]:
    """Those of different skills, in whatever order; the first of equal ones has the calls of all."""
    found: dict[frozenset[str], Scheme] = {}
    for scheme in schemes:
        key = frozenset(scheme.skills)
        found[key] = dataclasses.replace(found[key], calls=(*found[key].calls, *scheme.calls)) if key in found else scheme
    return list(found.values())


def make(numbers: Mapping[str, Any]) -> Halving:
    """From `evaluation.search`. Raises ValueError: a number that it can't be."""
    return Halving(
        recall=make_recall(numbers),
        selections=check_whole(numbers, "selections", least=1),
        bm25=check_switch(numbers, "bm25"),
        first_turns=check_whole(numbers, "first_turns", least=1),
        eta=check_whole(numbers, "eta", least=2),
    )


def origin(scheme: int, selections: int) -> str:
    """Who chose a scheme, by its index: "chosen" (the selection agent), "null" or "bm25"."""
    return "chosen" if scheme < selections else "null" if scheme == selections else "bm25"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halving:
    """Selection search with successive halving.

    Attributes:
        recall: what prompts tell of.
        selections: calls of the selection agent a task, schemes 0, 1, ...; the null scheme is number `selections`.
        bm25: what retrieval finds first is one more.
        first_turns: of every sample. eta: of the schemes one in so many goes on.
    """

    recall: Recall
    selections: int
    bm25: bool
    first_turns: int
    eta: int

    @property
    def most(self) -> int:
        """Schemes a task at most."""
        return self.selections + 1 + self.bm25

    def propose(
        self,
        speaker: Speaker,
        tasks: Sequence[Task],
        active: Sequence[Skill],
        *,
        config: RolloutConfig,
        seed_of: Callable[[Trajectory, int], int],
    ) -> dict[str, list[Scheme]]:
        """The schemes of each task: the null scheme, the selection agent's in the order of its calls, then retrieval's. A call that can't be
        read chooses nothing.

        Args:
            speaker: draws the selection agent's calls.
            seed_of: gives the calls of a task, which differ in `scheme`, seeds of their own.
        """
        index = SkillIndex(active)
        calls = select_skills(speaker, tasks, index, config=config, samples=self.selections, seed_of=seed_of)
        found = {task.name: [Scheme(index=self.selections)] for task in tasks}
        for call in calls:
            found[call.task].append(Scheme(index=call.scheme, skills=call.skills, calls=(call,)))
        for task in tasks if self.bm25 else ():
            top = index.top(selection.query(task_view(task, language=config.language, form=config.form)), config.max_skills)
            found[task.name].append(Scheme(index=self.selections + 1, skills=tuple(skill.name for skill in top)))
        return found

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
        """See dk_jax.search.strategy; `turns` of each sample on average."""
        of_task: dict[str, list[int]] = {}
        for i, trajectory in enumerate(trajectories):
            of_task.setdefault(trajectory.task, []).append(i)
        rounds = {name: Rounds(self, [trajectories[i] for i in own], turns) for name, own in of_task.items()}
        number = 0
        while any([one.allot() for one in rounds.values()]):
            refine(
                speaker, judge, trajectories, tasks, skills, recall=self.recall, until=[rounds[t.task].until[id(t)] for t in trajectories],
                config=config, seed_of=seed_of, phase=f"{phase}/round{number}", timed=timed, progress=progress,
            )  # fmt: skip
            number += 1


class Rounds:
    """The rounds of one task, from the samples of its schemes.

    Attributes:
        until: turns that each sample is to have after the present round, by its identity.
    """

    def __init__(self, halving: Halving, samples: Sequence[Trajectory], turns: int):
        self.eta, self.samples, self.budget = halving.eta, list(samples), len(samples) * turns
        self.going = sorted({t.scheme for t in samples})
        self.first = turns if len(self.going) == 1 else min(halving.first_turns, turns)
        self.until: dict[int, int] = {}
        self._ended: set[int] = set()

    def allot(self) -> bool:
        """Says how far each sample goes in the next round; False where there is none."""
        if not self.until:
            self.until = {id(t): self.first for t in self.samples}
            return True
        for t in self.samples:
            if len(t.turns) < self.until[id(t)]:  # no room, or no answer: it can have no more
                self._ended.add(id(t))
                self.until[id(t)] = len(t.turns)
        if len(self.going) == 1:
            return False
        rounds, schemes = 0, len(self.going)
        while schemes > 1:
            schemes, rounds = -(-schemes // self.eta), rounds + 1
        self.going = sorted(self.going, key=self._worth, reverse=True)[: -(-len(self.going) // self.eta)]
        able = [t for scheme in self.going for t in self.samples if t.scheme == scheme and id(t) not in self._ended]
        if not able:
            return False
        more, further = divmod((self.budget - sum(self.until.values())) // rounds, len(able))
        for place, t in enumerate(able):
            self.until[id(t)] += more + (place < further)
        return True

    def _worth(self, scheme: int) -> tuple[float, float, int]:
        """Of a scheme so far: the mean over its samples of their best reward, then the best speedup, then the lower number."""
        own = [t for t in self.samples if t.scheme == scheme]
        rewards = [max(t.rewards, default=float("-inf")) for t in own]
        fastest = max((v.earned_speedup for t in own for v in t.verdicts), default=0.0)
        return sum(rewards) / len(rewards), fastest, -scheme
