"""EvoEngineer (arXiv 2510.03760): trials on a task are an evolution of its kernels, without any training.

    initial trials    kernels from scratch
    then generations  each trial's prompt carries what the technique says (dk_jax.search.evoengineer_prompts), with parents from
                      the population (dk_jax.search.evoengineer_population), which right kernels join when the generation ends
    the fastest right kernel of all trials is what counts

The two parts are orthogonal. The paper's variants: free and insight with the single best, full with elites. Trials of a generation see the
same population, as the paper's samplers do, which work at once. Each sample is an evolution of its own, and a trial a turn of it.

Ours, as the paper does not say: parents are drawn by linear ranking; insights are of all right kernels so far, survivors or not; techniques
that tell insights tell the newest failure as long as nothing is right; islands take trials in turn. Where a prompt does not fit, elites, then
insights, the second parent, skills and feedback are left out, and last the parent.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from dk_jax.agents import policy
from dk_jax.agents.text import TaskView
from dk_jax.rollout.episode import RolloutConfig, task_view
from dk_jax.rollout.judge import Judge
from dk_jax.rollout.speaker import Speaker
from dk_jax.rollout.trajectory import Trajectory, Turn, Verdict, derive_seed
from dk_jax.search.evoengineer_population import Individual, Population, migrate
from dk_jax.search.evoengineer_prompts import Carried, Technique, fitted
from dk_jax.search.fresh_turn import fresh_turn, refuse_compact
from dk_jax.search.strategy import check_whole
from dk_jax.skills.record import Skill
from dk_jax.tasks.task import Task

NAME = "evoengineer"
Management = Literal["single", "elites", "islands"]


class Evolution:
    """The populations of one sample.

    Attributes:
        islands: one, or several.
        failures: of each, the newest verdict on a kernel that failed.
    """

    def __init__(self, islands: int, size: int):
        self.islands = [Population(size) for _ in range(islands)]
        self.failures: list[Verdict | None] = [None] * islands
        self._newborn: list[tuple[int, Turn, int]] = []

    def hand_in(self, turn: Turn, *, trial: int, island: int) -> None:
        """A trial's kernel and verdict, for when its generation ends."""
        self._newborn.append((island, turn, trial))

    def end_generation(self) -> None:
        """Right kernels join their island's population."""
        for island, turn, trial in self._newborn:
            if turn.verdict.correct:
                insight = policy.own_summary(turn.text, style="chat")
                self.islands[island].add(Individual(source=turn.source, verdict=turn.verdict, insight=insight, born=trial))
            else:
                self.failures[island] = turn.verdict
        self._newborn = []


@dataclasses.dataclass(kw_only=True)
class _Work:
    trajectory: Trajectory
    task: Task
    view: TaskView
    skills: tuple[Skill, ...]
    evolution: Evolution


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvoEngineer:
    """The strategy: called as dk_jax.rollout.episode.policy_turns.

    Attributes:
        technique: what a prompt carries: "free", "insight" or "full".
        population: "single" (the best), "elites" (the best `size`) or "islands" (`islands` times the best `size`).
        initial: trials from scratch. generation: trials of a generation after them.
        migrate_every: generations from one migration to the next (islands).
        insights: told in a prompt. elites_shown: best kernels in a full prompt beside the parents.
    """

    technique: Technique
    population: Management
    size: int
    islands: int
    initial: int
    generation: int
    migrate_every: int
    insights: int
    elites_shown: int

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
        """Runs all trials of the given trajectories together, in place. Raises ValueError: style "compact"."""
        refuse_compact(NAME, config.style)
        islands, size = {"single": (1, 1), "elites": (1, self.size), "islands": (self.islands, self.size)}[self.population]
        alive = [
            _Work(
                trajectory=t, task=task, view=task_view(task, language=config.language, form=config.form), skills=tuple(own),
                evolution=Evolution(islands, size),
            )
            for t, task, own in zip(trajectories, tasks, skills, strict=True)
        ]  # fmt: skip
        for trial in range(turns):
            generation, begun = divmod(trial - self.initial, self.generation)
            if trial >= self.initial and not begun:
                for work in alive:
                    work.evolution.end_generation()
                    if generation and generation % self.migrate_every == 0:
                        migrate(work.evolution.islands)
            seeds = [seed_of(work.trajectory, trial) for work in alive]
            prompts = [
                fitted(
                    work.view, self.carried(work.evolution, work.skills, trial, seed), technique=self.technique,
                    fits=lambda prompt: speaker.fits(prompt, config.max_policy_tokens),
                )
                for work, seed in zip(alive, seeds, strict=True)
            ]  # fmt: skip
            spoke = fresh_turn(
                speaker, judge, [w.trajectory for w in alive], prompts, [w.task for w in alive], seeds, previous=[None] * len(alive),
                config=config, phase=f"{phase}/turn{trial}", timed=timed, progress=progress,
            )  # fmt: skip
            alive = [work for work, found in zip(alive, spoke, strict=True) if found]
            for work in alive:
                work.evolution.hand_in(work.trajectory.turns[-1], trial=trial, island=trial % islands)

    def carried(self, evolution: Evolution, skills: tuple[Skill, ...], trial: int, seed: int) -> Carried:
        """What a trial's prompt is to carry; equal seeds and populations give the same."""
        where = trial % len(evolution.islands)
        island, failure = evolution.islands[where], evolution.failures[where] if self.technique != "free" else None
        if trial < self.initial or not island.individuals:
            return Carried(skills=skills, failure=failure)
        rng = random.Random(derive_seed(seed, "parents"))
        # A round of the islands combines, the next one changes: each island gets both.
        combines = self.technique == "full" and (trial - self.initial) // len(evolution.islands) % 2 == 0
        parents = island.draw(2 if combines else 1, rng)
        elites = [one for one in island.individuals if one not in parents][: self.elites_shown] if self.technique == "full" else []
        told = [one for one in island.seen if one.insight and one not in (*parents, *elites)] if self.technique != "free" else []
        insights = rng.sample(told, min(self.insights, len(told)))
        return Carried(skills=skills, parents=tuple(parents), elites=tuple(elites), insights=tuple(sorted(insights, key=lambda one: -one.fitness)))


def make(options: Mapping[str, Any]) -> EvoEngineer:
    """The strategy with the numbers of a recipe's `evaluation.search`. Raises ValueError: names the key that is missing or wrong."""
    keys = [field.name for field in dataclasses.fields(EvoEngineer)]
    if missing := [key for key in keys if key not in options]:
        raise ValueError(f"evaluation.search.{missing[0]} is missing, which name={NAME!r} reads: see configs/evoengineer.py")
    for key, allowed in (("technique", get_args(Technique)), ("population", get_args(Management))):
        if options[key] not in allowed:
            raise ValueError(f"evaluation.search.{key} is {options[key]!r}: use one of {', '.join(map(repr, allowed))}")
    least = {"insights": 0, "elites_shown": 0, **dict.fromkeys(("size", "islands", "initial", "generation", "migrate_every"), 1)}
    numbers = {key: check_whole(options, key, least=one) for key, one in least.items()}
    return EvoEngineer(technique=options["technique"], population=options["population"], **numbers)
