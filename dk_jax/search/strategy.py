"""How an evaluation spends the turns of its samples: strategies by name, and the recipe's numbers for them.

    turns        one conversation a sample (dk_jax.rollout.episode.policy_turns)
    memory       each turn answers a fresh prompt that tells of the best attempts so far (dk_jax.search.memory)
    schemes      several skill sets a task, of which the best get what is left of the turns (dk_jax.search.schemes)
    cudaforge    a Coder and a Judge (dk_jax.search.cudaforge)
    evoengineer  offspring of a population (dk_jax.search.evoengineer)

A strategy has the signature of `policy_turns` and works, in place, on all trajectories of a chunk together. Each turn that it appends is a
candidate, with verdict and reward. Messages that are no candidates, such as a judge's, are trajectories of their own with the task and member
of the sample that they are for; it returns them, in the order in which they were asked for, so that what they took is counted. Equal seeds,
answers and verdicts give equal turns, for work that is interrupted is done again from journals.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from dk_jax.rollout.episode import RolloutConfig, policy_turns
from dk_jax.rollout.judge import Judge
from dk_jax.rollout.speaker import Speaker
from dk_jax.rollout.trajectory import Trajectory
from dk_jax.skills.record import Skill
from dk_jax.tasks.task import Task

NUMBERS: dict[str, tuple[str, ...] | None] = {
    "turns": (),
    "memory": ("window", "latest", "plain"),
    "schemes": ("window", "latest", "selections", "bm25", "eta", "first_turns"),
    "cudaforge": None,
    "evoengineer": None,
}
"""Which keys of `evaluation.search` a strategy reads beside `name` and `grow`; None for all others that the recipe has."""


class Strategy(Protocol):
    """Spends the turns of the given trajectories, and returns its further calls; None for none."""

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
    ) -> Sequence[Trajectory] | None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """A recipe's `evaluation.search`.

    Attributes:
        name: of the strategy. numbers: its own, as plain data. spend: the strategy.
        grow: rollouts of a chunk of tasks teach skills to later ones (dk_jax.search.growth).
    """

    name: str = "turns"
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    spend: Strategy = policy_turns
    grow: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """All that results depend on."""
        return {"name": self.name, "grow": self.grow, **self.numbers}


def make(block: Mapping[str, Any]) -> Search:
    """The search of a recipe, from its `evaluation.search`.

    Raises:
        ValueError: names the key, and what it may be.
    """
    name, grow = block.get("name"), block.get("grow", False)
    if name not in NUMBERS:
        raise ValueError(f"evaluation.search.name is {name!r}: use one of {', '.join(map(repr, NUMBERS))}")
    if not isinstance(grow, bool):
        raise ValueError(f"evaluation.search.grow is {grow!r}: use True or False")
    wanted = NUMBERS[name]
    if missing := [key for key in wanted or () if key not in block]:
        raise ValueError(f"evaluation.search has no key {', '.join(map(repr, missing))}, which name={name!r} reads: see configs/demo.py")
    keys = [key for key in block if key not in ("name", "grow")] if wanted is None else wanted
    numbers = {key: block[key] for key in keys}
    if name == "turns":
        return Search(grow=grow)
    return Search(name=name, numbers=numbers, spend=import_module(f"dk_jax.search.{name}").make(numbers), grow=grow)


def check_whole(block: Mapping[str, Any], key: str, *, least: int) -> int:
    """The whole number of `evaluation.search` under a key. Raises ValueError where it is none, or less than `least`."""
    value = block[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"evaluation.search.{key} is {value!r}: give a whole number of at least {least}")
    return value


def check_switch(block: Mapping[str, Any], key: str) -> bool:
    """The switch of `evaluation.search` under a key. Raises ValueError where it is none."""
    if not isinstance(block[key], bool):
        raise ValueError(f"evaluation.search.{key} is {block[key]!r}: use True or False")
    return block[key]
