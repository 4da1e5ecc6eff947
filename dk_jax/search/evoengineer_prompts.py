"""EvoEngineer's traverse techniques: what a trial's prompt carries (EvoEngineer, arXiv 2510.03760). Wording ours; chat style alone.

    free     task and parent
    insight  and what the parent's author said of it, and insights of other right kernels
    full     and the best kernels; a trial combines two parents or changes one
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from dk_jax.agents import policy
from dk_jax.agents.text import TaskView, bounded, speed
from dk_jax.rollout.trajectory import Verdict
from dk_jax.search.evoengineer_population import Individual
from dk_jax.skills.record import Skill

Technique = Literal["free", "insight", "full"]
MAX_FAILURE_CHARS = 600


@dataclasses.dataclass(frozen=True, kw_only=True)
class Carried:
    """What a prompt carries beside the task.

    Attributes:
        skills: of the library.
        parents: none for a trial from scratch; with two of them the trial combines them.
        elites: the best kernels beside the parents, best first.
        insights: individuals of which only the insight is told, most valuable first.
        failure: the verdict on a trial before, for one from scratch.
        feedback: tell of each kernel what the sandbox said beyond its speed.
    """

    skills: tuple[Skill, ...] = ()
    parents: tuple[Individual, ...] = ()
    elites: tuple[Individual, ...] = ()
    insights: tuple[Individual, ...] = ()
    failure: Verdict | None = None
    feedback: bool = True

    def less(self) -> Carried | None:
        """The same without what is worth least of it, None where nothing is left to leave out."""
        if self.elites:
            return dataclasses.replace(self, elites=self.elites[:-1])
        if self.insights:
            return dataclasses.replace(self, insights=self.insights[:-1])
        if len(self.parents) > 1:
            return dataclasses.replace(self, parents=self.parents[:-1])
        if self.failure is not None:
            return dataclasses.replace(self, failure=None)
        if self.skills:
            return dataclasses.replace(self, skills=self.skills[:-1])
        if self.parents and self.feedback:
            return dataclasses.replace(self, feedback=False)
        return dataclasses.replace(self, parents=()) if self.parents else None


def render(task: TaskView, carried: Carried, *, technique: Technique) -> str:
    """A trial's prompt. Kernels are told slowest first, as attempts of the author's own."""
    told = technique != "free"
    shown = sorted([*carried.parents, *carried.elites], key=lambda one: (one.fitness, -one.born))
    attempts = [
        policy.Attempt(
            source=one.source,
            summary=one.insight if told else "",
            verdict=one.verdict if carried.feedback else dataclasses.replace(one.verdict, feedback=""),
        )
        for one in shown
    ]
    parts = [policy.render_first(task, carried.skills, style="chat", attempts=attempts, summarise=told)]
    if carried.insights:
        lines = [f"- {_reached(one)}: {' '.join(one.insight.split())}" for one in carried.insights]
        parts.append("## Insights\nWhat was said of other right kernels for this task. Use what fits, ignore the rest.\n" + "\n".join(lines))
    if carried.failure is not None:
        outcome, feedback = carried.failure.outcome.replace("_", " "), bounded(carried.failure.feedback, MAX_FAILURE_CHARS)
        parts.append(f"## A trial before yours failed\nVerdict: {outcome}.\n\n{feedback}\n\nWrite yours so that it does not fail by this.")
    if technique == "full" and carried.parents:
        parts.append("## This trial\n" + _move([shown.index(parent) + 1 for parent in carried.parents]))
    return "\n\n".join(parts)


def _reached(one: Individual) -> str:
    return f"{speed(one.fitness)} the speed of PyTorch eager" if one.fitness > 0 else "right, speed not counted"


def _move(numbers: Sequence[int]) -> str:
    if len(numbers) > 1:
        return f"Combine attempts {numbers[0]} and {numbers[1]}: one kernel with what makes each of them fast."
    return f"Change attempt {numbers[0]} substantially: try another way to do what costs it most time."


def fitted(task: TaskView, carried: Carried, *, technique: Technique, fits: Callable[[str], bool]) -> str:
    """The prompt with as much of what it is to carry as fits, or the shortest there is."""
    while True:
        prompt = render(task, carried, technique=technique)
        if fits(prompt) or (less := carried.less()) is None:
            return prompt
        carried = less
