"""What is compared: arms, each some changes to one base recipe, their seeds, and the budget that all of them have (RECIPES: daVinci-kernel's
ablations, arXiv 2606.16497).

    full                 selection, injection, summaries, paired verification, lifecycle: the base recipe
    no_injection         the full arm's parameters, evaluated without skills; nothing is trained for it
    bm25_only            retrieval alone chooses the skills, in training and evaluation
    policy_only          the other agents work, but only the policy's messages are learnt from
    no_skills            no selection, no skill in a prompt, no summary, no verification
    paper_verification   one greedy turn decides about a skill, instead of paired arms
    no_diversity_filter  from a cold start whose dominant topics were not thinned out

Equal budgets. Every arm samples as many rollouts a step: without schemes they are one group of (selections + 1) * rollouts. What arms differ
in is what they judge besides, to verify skills. So an arm is not given a number of steps but a number of judged candidates, of rollouts and
of verifications alike, and one of sampled tokens, of all agents: it trains to the first step at whose end either is spent. An arm that
verifies less makes more steps for it, from the same sequence of tasks.

Start. Arms begin with the parameters of one cold start for each setting of the filter (`Arm.start`) and each of its seeds: with
`Preset.shared_start` all seeds of an arm begin with the same one, and seeds differ in RL and evaluation alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from ml_collections import ConfigDict

BASE, UNFILTERED = "base", "unfiltered"
"""Cold starts: the base recipe's own, and one without the diversity filter."""
MOST_STEPS = 100_000
"""Of an arm; its budget ends it long before."""


class AblationError(ValueError):
    """An ablation that can't be run; the message says why and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """One line of the comparison.

    Attributes:
        name, title: of folders and tables.
        changes: to the base recipe's values, by dotted keys.
        start: the cold start that it begins with.
        of: the arm whose parameters are evaluated; "" for its own.
        inject: whether it is evaluated with the skills of its library.
    """

    name: str
    title: str
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    start: str = BASE
    of: str = ""
    inject: bool = True

    @property
    def trained(self) -> str:
        """The arm whose training it is evaluated after."""
        return self.of or self.name


ARMS = (
    Arm(name="full", title="full"),
    Arm(name="no_injection", title="no injection at inference", of="full", inject=False),
    Arm(name="no_skills", title="no skills", changes={"skills.use": False, "rollout.selections": 0}, inject=False),
    Arm(name="bm25_only", title="BM25-only selection", changes={"rollout.selector": "bm25"}),
    Arm(name="policy_only", title="policy-only training", changes={"rl.agents": ("policy",)}),
    Arm(name="paper_verification", title="the paper's verification", changes={"skills.verification": "paper"}),
    Arm(name="no_diversity_filter", title="no diversity filter", start=UNFILTERED),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """An ablation.

    Attributes:
        name: of the preset and its scale.
        base: the recipe that all arms change.
        seeds: of each arm, by name; the arms that are not in it have `other_seeds`.
        candidates, tokens: each arm's and seed's budget; see the module's text.
        shared_start: whether all seeds begin with the cold start of seed `start_seed`, else each with its own.
        expert_samples: expert kernels judged for each held-out task; the fastest right one is the ceiling.
        chunk: tasks evaluated together, between which a piece may end.
    """

    name: str
    base: ConfigDict
    candidates: int
    tokens: int
    seeds: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    other_seeds: tuple[int, ...] = (0,)
    shared_start: bool = True
    start_seed: int = 0
    expert_samples: int = 3
    chunk: int = 8

    def __post_init__(self):
        if unknown := sorted(set(self.seeds) - {arm.name for arm in ARMS}):
            raise AblationError(f"seeds for arms that are not there: {unknown}; there are {', '.join(arm.name for arm in ARMS)}")
        if self.candidates < 1 or self.tokens < 1:
            raise AblationError(f"a budget of {self.candidates} candidates and {self.tokens} tokens: both must be at least 1")
        t, c = self.base.tasks, self.base
        if self.shared_start and (t.rl_generated or t.rl_fresh or t.rl_checked):
            raise AblationError(
                "a shared start with tasks.rl_generated, rl_fresh or rl_checked: the tasks that are generated depend on the seed, and RL's "
                "would not be those that the cold start has not seen. Set them to 0, or shared_start=False"
            )
        if c.rl.staleness or c.rl.decay or c.rl.checkpoint_every != 1 or not c.rl.keep_rollouts:
            raise AblationError(
                "the base recipe needs rl.staleness=0, rl.decay=False (an arm's number of steps is not known before), rl.checkpoint_every=1 "
                "(a piece may end after any step) and rl.keep_rollouts=True"
            )

    def seeds_of(self, arm: Arm) -> tuple[int, ...]:
        """Of an arm; one that evaluates another has that one's."""
        return self.seeds.get(arm.trained, self.other_seeds)

    def start_of(self, arm: Arm, seed: int) -> Start:
        return Start(kind=arm.start, seed=self.start_seed if self.shared_start else seed)

    def recipe(self, arm: Arm, seed: int) -> ConfigDict:
        """The recipe of an arm's training."""
        c = ConfigDict(self.base.to_dict())
        if not arm.changes.get("skills.use", True):  # one group of as many rollouts
            c.rollout.rollouts *= c.rollout.selections + 1
        c.update_from_flattened_dict(dict(arm.changes))
        c.seed, c.rl.steps = seed, MOST_STEPS
        c.corpus.diversity.on = c.corpus.diversity.on and arm.start != UNFILTERED
        return c

    def start_recipe(self, start: Start) -> ConfigDict:
        """The recipe of a cold start."""
        c = ConfigDict(self.base.to_dict())
        c.seed = start.seed
        c.corpus.diversity.on = c.corpus.diversity.on and start.kind != UNFILTERED
        return c

    @property
    def settings(self) -> dict[str, Any]:
        """What the results depend on, as plain data; seeds and the choice of arms do not change what is there already."""
        plain = {name: getattr(self, name) for name in ("name", "candidates", "tokens", "shared_start", "start_seed", "expert_samples", "chunk")}
        return plain | {"base": self.base.to_dict()}


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Start:
    """A cold start: with or without the diversity filter, and its seed."""

    kind: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind}_seed{self.seed}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A part of the work, in a folder of its own: "start" (a cold start), "expert", "train" (an arm and a seed), "evaluate_start" or
    "evaluate" (an arm and a seed)."""

    kind: str
    start: Start
    arm: Arm | None = None
    seed: int = 0

    @property
    def name(self) -> str:
        of = f"{self.arm.name}_seed{self.seed}" if self.arm is not None else "" if self.kind == "expert" else self.start.name
        return f"{self.kind} {of}".strip()


def jobs(preset: Preset, arms: Sequence[Arm], seeds: Sequence[int] | None = None) -> list[Job]:
    """All of the work in the order in which it is done: what the first comparisons need comes first. `seeds`: instead of the preset's.

    Raises:
        AblationError: an arm without the diversity filter, of a base recipe that has none.
    """
    if any(arm.start == UNFILTERED for arm in arms) and not preset.base.corpus.diversity.on:
        raise AblationError("no_diversity_filter: the base recipe has corpus.diversity.on=False, so there is nothing to leave out")
    wanted = {arm.name: tuple(seeds) if seeds is not None else preset.seeds_of(arm) for arm in arms}
    found: dict[Job, None] = {}
    for seed in sorted({seed for own in wanted.values() for seed in own}):
        for arm in arms:
            if seed not in wanted[arm.name]:
                continue
            start = preset.start_of(arm, seed)
            trained = arm if not arm.of else next(other for other in ARMS if other.name == arm.of)
            found |= {Job(kind=kind, start=start): None for kind in ("start", "evaluate_start")}
            if not any(job.kind == "expert" for job in found):
                found[Job(kind="expert", start=start)] = None
            found[Job(kind="train", start=start, arm=trained, seed=seed)] = None
            found[Job(kind="evaluate", start=start, arm=arm, seed=seed)] = None
    return list(found)


def chosen(names: Sequence[str]) -> tuple[Arm, ...]:
    """Arms by name, in the table's order; all for none. Raises AblationError."""
    if unknown := sorted(set(names) - {arm.name for arm in ARMS}):
        raise AblationError(f"--arms={','.join(unknown)}: no such arm; there are {', '.join(arm.name for arm in ARMS)}")
    return tuple(arm for arm in ARMS if not names or arm.name in names)


def load_preset(name: str, scale: str) -> Preset:
    """That of configs/NAME.py, which has get_preset(scale). Raises AblationError."""
    try:
        module = import_module(f"configs.{name}")
        return module.get_preset(scale)
    except ModuleNotFoundError as error:
        if error.name != f"configs.{name}":
            raise
        raise AblationError(f"--preset={name}: there is no configs/{name}.py") from None
    except (AttributeError, KeyError) as error:
        raise AblationError(f"--preset={name} --scale={scale}: configs/{name}.py has no such preset ({error})") from error
