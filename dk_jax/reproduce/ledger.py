"""What each arm has spent of its budget, and whether the comparison is one of equal budgets and equal tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from dk_jax.metrics import read_scalars
from dk_jax.models.config import AGENTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spent:
    """Of one arm and seed.

    Attributes:
        steps: RL steps made.
        rollouts, proofs: judged candidates, of rollouts and of verifications.
        tokens: sampled, by agent, and "verification".
        last: candidates and tokens of the last step.
    """

    steps: int = 0
    rollouts: int = 0
    proofs: int = 0
    tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)
    last: tuple[int, int] = (0, 0)

    @property
    def candidates(self) -> int:
        return self.rollouts + self.proofs

    @property
    def all_tokens(self) -> int:
        return sum(self.tokens.values())

    @property
    def verification_share(self) -> float:
        """Of the judged candidates."""
        return self.proofs / self.candidates if self.candidates else 0.0

    def is_over(self, *, candidates: int, tokens: int) -> bool:
        """Whether a budget is spent."""
        return self.candidates >= candidates or self.all_tokens >= tokens


def spent(workdir: Path) -> Spent:
    """By the metrics of a run's RL steps."""
    lines = read_scalars(workdir / "metrics.jsonl", "rl")
    if not lines:
        return Spent()
    names = (*AGENTS, "verification")

    def total(name: str) -> int:
        return round(sum(line[name] for line in lines))

    end = lines[-1]
    return Spent(
        steps=end["step"],
        rollouts=total("spent_candidates"),
        proofs=total("spent_proofs"),
        tokens={name: total(f"spent_tokens_{name}") for name in names},
        last=(round(end["spent_candidates"] + end["spent_proofs"]), round(sum(end[f"spent_tokens_{name}"] for name in names))),
    )


def problems(
    ledgers: Mapping[tuple[str, int], Spent], tasks: Mapping[tuple[str, int], Sequence[Sequence[str]]], *, candidates: int, tokens: int
) -> list[str]:
    """What keeps arms from being a comparison of equal budgets and tasks, in words; [] if nothing does.

    Args:
        ledgers: by arm and seed, of those whose training has ended.
        tasks: names of each step's tasks, likewise.
    """
    found = []
    for (arm, seed), own in ledgers.items():
        before = (own.candidates - own.last[0], own.all_tokens - own.last[1])
        if not own.is_over(candidates=candidates, tokens=tokens):
            found.append(f"{arm}, seed {seed} ended before its budget was spent")
        elif before[0] >= candidates or before[1] >= tokens:
            found.append(f"{arm}, seed {seed} went on for a step after its budget was spent")
        elif own.candidates < candidates:
            found.append(f"{arm}, seed {seed} ended by its tokens, with {own.candidates} of {candidates} candidates judged")
    for seed in sorted({seed for _, seed in ledgers}):
        own = {arm: tasks.get((arm, at), ()) for arm, at in ledgers if at == seed}
        if len(own) > 1:
            length = min(len(steps) for steps in own.values())
            if len({tuple(tuple(names) for names in steps[:length]) for steps in own.values()}) > 1:
                found.append(f"seed {seed}: the arms' steps have different tasks")
    return found
