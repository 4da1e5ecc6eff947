"""A library under arriving good, useless, harmful and duplicate skills: with skills' lifecycle, and add-only.

    python scripts/bench/lifecycle.py --out scripts/bench/results/lifecycle.json [--steps 500] [--seeds 5]

Simulated are proposals, verification and use; the library and the rules are the real ones (dk_jax.skills). Of what is proposed, a stated
share of each kind passes verification, by the paired test or, as in the paper, by a single noisy run. A skill belongs to a family of tasks
and changes the log-speedup there by its true effect, nowhere else by anything; good ones fade as the policy learns what they say.
Retrieval shows the active skills of the task's family first, the selection agent takes some of what it sees at random, and the effect
that the library is told is that of all the skills of a scheme together, with the noise of a few rollouts. What is reported holds true
effects, not measured ones. Nothing here is a result about training.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tempfile
import time
from pathlib import Path

import numpy as np
from serving import provenance

from dk_jax.evaluation.charts import Axis, line_chart
from dk_jax.evaluation.report_style import STYLE
from dk_jax.skills.library import SkillLibrary
from dk_jax.skills.lifecycle import Lifecycle, LifecycleRules
from dk_jax.skills.record import Evidence, SkillDraft

KINDS = {"good": 0.15, "useless": 0.5, "harmful": 0.15, "duplicate": 0.2}
"""Shares of what is proposed."""
PASSES = {
    "paired": {"good": 0.7, "useless": 0.05, "harmful": 0.01, "duplicate": 0.7},
    "paper": {"good": 0.75, "useless": 0.35, "harmful": 0.2, "duplicate": 0.75},
}
"""Share of each kind that verification lets in."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """Attributes:
    proposals: a step, on average. families: of tasks. tasks: a step. schemes: with skills, of each task. shown: skills, to each selection.
    taken: skills of a scheme, at most. noise: standard deviation of a scheme's measured effect. fades: steps after which a good skill's
    effect has halved.
    """

    proposals: float = 0.6
    families: int = 12
    tasks: int = 8
    schemes: int = 2
    shown: int = 8
    taken: int = 2
    noise: float = 0.3
    fades: float = 300.0


@dataclasses.dataclass
class Truth:
    """What a skill really is. `idea`: the number of what it says, which duplicates share."""

    kind: str
    family: int
    effect: float
    since: int
    idea: int


def text(rng: np.random.Generator, idea: int, names: int) -> SkillDraft:
    """A skill about an idea, in words and names of its own."""
    steps = np.random.default_rng(idea).integers(0, [8, 6, 6], (14, 3))
    code = "\n".join(f"v{names}_{a} {'+-*/%&|^'[a]}= ({'<>=!,.'[b]}{'[]{}:?'[c]} {rng.integers(100)}" for a, b, c in steps)
    words = " ".join(f"word{rng.integers(500)}" for _ in range(12))
    return SkillDraft(
        name=f"skill_{names}", description=f"idea {idea}", scope="general", tags=("one", "two", "three"),
        content=f"Motivation: {words}\nKey Idea: {words}\nExample:\n{code}",
    )  # fmt: skip


def simulated(seed: int, steps: int, world: World, passes: dict[str, float], rules: LifecycleRules | None, path: Path) -> dict[str, list[float]]:
    """One library's life: per step the number of active skills, the mean true effect of those and of what is used, duplicates, milliseconds."""
    rng, uses_rng = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
    truths: dict[str, Truth] = {}
    lifecycle = Lifecycle(rules) if rules else None
    found: dict[str, list[float]] = {name: [] for name in ("active", "effect", "used_effect", "duplicates", "review_ms")}
    with SkillLibrary(path) as library:
        library.commit(0)
        for step in range(1, steps + 1):

            def effect(skill_id: str, step=step) -> float:
                of = truths[skill_id]
                return of.effect * (0.5 ** ((step - of.since) / world.fades) if of.effect > 0 else 1.0)

            active = {skill.id: skill for skill in library.active()}
            used = []
            for _ in range(world.tasks):
                family = uses_rng.integers(world.families)
                ids = list(active)
                near = sorted(ids, key=lambda one: (truths[one].family != family, uses_rng.random()))[: world.shown]  # noqa: B023
                for _ in range(world.schemes):
                    taken = list(uses_rng.permutation(near)[: uses_rng.integers(1, world.taken + 1)])
                    true = sum(effect(one) for one in taken if truths[one].family == family)
                    measured = true + world.noise * float(uses_rng.standard_normal())
                    used.append(true)
                    for one in near:
                        library.use(one, shown=1, selected=one in taken, log_effects=[measured] if one in taken else [])
            for _ in range(rng.poisson(world.proposals)):
                kind = str(rng.choice(list(KINDS), p=list(KINDS.values())))
                known = list(truths.values())
                of = known[rng.integers(len(known))] if kind == "duplicate" and known else None
                strength = {"good": abs(rng.normal(0.3, 0.08)), "harmful": -0.2}.get(kind, 0.0)
                truth = Truth(kind, int(rng.integers(world.families)), strength, step, len(truths) + int(rng.integers(1 << 30)))
                if of is not None:
                    truth = dataclasses.replace(of, kind=kind)
                draft, lets_in, measured = text(rng, truth.idea, len(truths)), rng.random() < passes[kind], rng.normal(0.25, 0.1)
                if not lets_in:
                    truths[f"rejected{len(truths)}"] = dataclasses.replace(truth, kind="rejected")
                    continue
                skill_id = library.propose(draft, language="cpp")
                ratio = math.exp(abs(measured))  # what passed looks good, whatever it is
                library.record_evidence(
                    skill_id, Evidence(step=step, tasks=("t",), device="cpu", rule="sequential", decision="accept", effect=ratio, n=8)
                )
                library.activate(skill_id)
                truths[skill_id] = truth
            start = time.perf_counter()
            if lifecycle:
                lifecycle.review(library, step)
            found["review_ms"].append(1e3 * (time.perf_counter() - start))
            library.commit(step)
            now = [skill.id for skill in library.active()]
            ideas = [truths[one].idea for one in now]
            found["active"].append(float(len(now)))
            found["effect"].append(float(np.mean([effect(one) for one in now])) if now else 0.0)
            found["used_effect"].append(float(np.mean(used)))
            found["duplicates"].append(float(len(ideas) - len(set(ideas))))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--most_active", type=int, default=48, help="see LifecycleRules; by default four a family")
    arguments = parser.parse_args()
    world, rules = World(), LifecycleRules(most_active=arguments.most_active)
    report = {
        **provenance(("numpy", "scipy")), "world": dataclasses.asdict(world), "rules": dataclasses.asdict(rules), "proposed": KINDS,
        "passes": PASSES, "steps": arguments.steps, "seeds": arguments.seeds, "runs": {},
    }  # fmt: skip
    curves: dict[str, dict[str, np.ndarray]] = {}
    for verification, passes in PASSES.items():
        for kept, own in (("lifecycle", rules), ("add-only", None)):
            with tempfile.TemporaryDirectory() as directory:
                runs = [
                    simulated(seed, arguments.steps, world, passes, own, Path(directory) / f"{seed}.sqlite") for seed in range(arguments.seeds)
                ]
            curves[f"{verification}, {kept}"] = mean = {name: np.mean([run[name] for run in runs], axis=0) for name in runs[0]}
            fifth = max(1, arguments.steps // 5)
            row = {
                name: {"first_fifth": float(mean[name][:fifth].mean()), "last_fifth": float(mean[name][-fifth:].mean()),
                       "last_fifth_by_seed": [float(np.mean(run[name][-fifth:])) for run in runs]}
                for name in mean
            }  # fmt: skip
            report["runs"][f"{verification}, {kept}"] = row
            print(f"{verification:7} {kept:10}", {name: round(each["last_fifth"], 3) for name, each in row.items()}, flush=True)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    x_axis, every = Axis(label="step", whole=True), slice(None, None, max(1, arguments.steps // 100))
    charts = []
    for verification in PASSES:
        for name, title, axis in (
            ("active", "Active skills", Axis(label="skills", low=0.0)),
            ("effect", "Active: true effect", Axis(label="mean log-speedup on their family")),
            ("used_effect", "Used: true effect", Axis(label="mean log-speedup")),
        ):
            lines = {kept: list(curves[f"{verification}, {kept}"][name][every]) for kept in ("lifecycle", "add-only")}
            steps = list(range(1, arguments.steps + 1))[every]
            charts.append(line_chart(f"{title} ({verification})", steps, lines, x_axis=x_axis, y_axis=axis, smooth=5))
    title = "Skills' lifecycle, simulated"
    page = f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{STYLE}</style><main><h1>{title}</h1>{''.join(charts)}</main>\n"
    arguments.out.with_suffix(".html").write_text(page)


if __name__ == "__main__":
    main()
