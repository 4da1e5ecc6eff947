"""EvoEngineer's population management: which kernels are kept, and which of them become parents.

An individual is a kernel that the sandbox found right, with what its author said of it. Its fitness is the speedup that counts. Failures
never enter. One population of one is the "single best", one of several the "elites"; several are "islands", whose best migrate in a ring.
"""

from __future__ import annotations

import dataclasses
import random

from dk_jax.rollout.trajectory import Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Individual:
    """A right kernel.

    Attributes:
        insight: what its author said of it in short, "" for nothing.
        born: number of the trial that wrote it; of two equally fast ones the older is the better.
    """

    source: str
    verdict: Verdict
    insight: str
    born: int

    def __post_init__(self):
        if not self.verdict.correct:
            raise ValueError(f"the kernel of trial {self.born} failed ({self.verdict.outcome}): it can't be in a population")

    @property
    def fitness(self) -> float:
        return self.verdict.earned_speedup


class Population:
    """The best right kernels so far, no text twice.

    Attributes:
        individuals: at most `size`, best first.
        seen: all that were ever added, in that order; their insights outlive them.
    """

    def __init__(self, size: int):
        self.size = size
        self.individuals: list[Individual] = []
        self.seen: list[Individual] = []

    def add(self, individual: Individual) -> None:
        if any(individual.source == other.source for other in self.seen):
            return
        self.seen.append(individual)
        self.individuals = sorted([*self.individuals, individual], key=lambda one: (-one.fitness, one.born))[: self.size]

    def draw(self, count: int, rng: random.Random) -> list[Individual]:
        """At most `count` distinct ones, drawn one after another by linear ranking: among n the best is n times as likely as the last."""
        left, drawn = list(self.individuals), []
        while left and len(drawn) < count:
            (one,) = rng.choices(left, weights=range(len(left), 0, -1))
            left.remove(one)
            drawn.append(one)
        return drawn


def migrate(islands: list[Population]) -> None:
    """The best of each island, as it was before, joins the next one's; the last one's joins the first."""
    best = [island.individuals[0] if island.individuals else None for island in islands]
    for island, newcomer in zip(islands, [best[-1], *best[:-1]], strict=True):
        if newcomer is not None:
            island.add(newcomer)
