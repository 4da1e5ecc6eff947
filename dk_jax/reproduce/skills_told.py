"""What an ablation tells of its skills: growth, acceptance, use, what they do when they are chosen, and how early and late ones differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dk_jax.reproduce import digests
from dk_jax.reproduce.scores import half_interval
from dk_jax.skills.library import SkillLibrary
from dk_jax.skills.record import Skill

EXAMPLES = 2
CHARS = 700


def tell(workdirs: Mapping[int, Path]) -> dict[str, Any]:
    """Of one arm's runs, by seed, as plain data; {} where no library holds a skill.

    Returns:
        `by_seed`: proposed, verified, active, used (verified ones that were selected at least once), `acceptance`. `effect`: speed with chosen
        skills over that of the same task's null scheme in the same step, as a ratio with its interval; `schemes` that it is measured on.
        `early`, `late`: the first and the last third of the verified skills, and `examples` of each.
    """
    skills = {seed: _skills(path) for seed, path in workdirs.items()}
    if not any(skills.values()):
        return {}
    counts = {}
    for seed, own in skills.items():
        verified = [skill for skill in own if _accepted(skill)]
        counts[str(seed)] = {
            "proposed": len(own), "verified": len(verified), "active": sum(skill.status == "active" for skill in own),
            "used": sum(skill.usage.selected > 0 for skill in verified), "acceptance": len(verified) / len(own) if own else None,
        }  # fmt: skip
    verified = sorted((skill for own in skills.values() for skill in own if _accepted(skill)), key=lambda skill: skill.provenance.step)
    third = len(verified) // 3
    halves = {"early": verified[:third], "late": verified[len(verified) - third :]} if third else {}
    return {
        "by_seed": counts,
        "effect": effect([line for path in workdirs.values() for line in digests.read(path)]),
        **{name: _alike(own) for name, own in halves.items()},
        "examples": {name: [_example(skill) for skill in own[:EXAMPLES]] for name, own in (halves or {"all": verified}).items()},
    }


def effect(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The effect of chosen skills over all steps: schemes of one task and step are averaged, as they share a null scheme. None without any."""
    found: list[float] = []
    schemes = 0
    for line in lines:
        by_task: dict[str, list[float]] = {}
        for task, _, log_effect in line["effects"]:
            by_task.setdefault(task, []).append(log_effect)
        found += [statistics.mean(own) for own in by_task.values()]
        schemes += len(line["effects"])
    if not found:
        return None
    mean, half = statistics.mean(found), half_interval(found)
    low, high = (math.exp(mean - half), math.exp(mean + half)) if half is not None else (None, None)
    return {"ratio": math.exp(mean), "low": low, "high": high, "schemes": schemes, "comparisons": len(found)}


def _skills(workdir: Path) -> list[Skill]:
    path = workdir / "library.sqlite"
    if not path.exists():
        return []
    with SkillLibrary(path) as library:
        return library.skills()


def _accepted(skill: Skill) -> bool:
    return any(evidence.decision == "accept" for evidence in skill.evidence)


def _alike(skills: Sequence[Skill]) -> dict[str, float]:
    """Means over skills."""
    proofs = [evidence.effect for skill in skills for evidence in skill.evidence if evidence.decision == "accept"]
    return {
        "skills": len(skills),
        "step": statistics.mean(skill.provenance.step for skill in skills),
        "general": statistics.mean(skill.scope == "general" for skill in skills),
        "characters": statistics.mean(len(skill.content) for skill in skills),
        "verified effect": math.exp(statistics.mean(math.log(max(effect, 1e-3)) for effect in proofs)),
        "distinct tags": len({tag for skill in skills for tag in skill.tags}),
    }


def _example(skill: Skill) -> dict[str, Any]:
    proof = next(evidence for evidence in skill.evidence if evidence.decision == "accept")
    return {
        "name": skill.name, "step": skill.provenance.step, "task": skill.provenance.task, "description": skill.description,
        "verified effect": proof.effect, "selected": skill.usage.selected, "content": skill.content[:CHARS],
    }  # fmt: skip
