"""What judged kernels teach: the topics that a kernel is an example of, and what a summary can say of two of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from dk_jax.sft.judged import JudgedKernel
from dk_jax.sft.skill_topics import SkillTopic
from dk_jax.skills.record import SkillDraft

SECOND_SKILL = 0.3  # share of prompts with skills that hold two, where two may be


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lesson:
    """One summary: the rollout's first and best kernel, the skills that were in view, and the skill that is proposed."""

    first: JudgedKernel
    best: JudgedKernel
    injected: tuple[SkillDraft, ...]
    draft: SkillDraft


def taught_by(kernel: JudgedKernel, topics: Sequence[SkillTopic], beyond: JudgedKernel | None = None) -> list[SkillTopic]:
    """Topics that a kernel is an example of; with `beyond`, those that the other kernel is not."""
    own = set(kernel.techniques)
    other = set(beyond.techniques) if beyond is not None else None
    return [t for t in topics if t.techniques <= own and (other is None or not t.techniques <= other)]


def improvements(kernels: Sequence[JudgedKernel], min_gain: float) -> list[tuple[JudgedKernel, JudgedKernel]]:
    """Pairs (first turn, best turn) of a task's kernels that would earn a summary in a rollout.

    The best is correct and at least `min_gain` times as fast as eager and as the first; a first turn that is not correct
    counts as speedup 0 (dk_jax.rollout.episode.triggers, with alpha = beta = min_gain).
    """
    return [
        (first, best)
        for first in kernels
        for best in kernels
        if best is not first and best.verdict.correct and best.verdict.speedup >= max(min_gain * speedup(first), min_gain)
    ]


def speedup(kernel: JudgedKernel) -> float:
    """Speedup over eager as a rollout counts it: 0 where the kernel is not correct."""
    return kernel.verdict.speedup if kernel.verdict.correct else 0.0


def lessons(
    kernels: Sequence[JudgedKernel],
    topics: Sequence[SkillTopic],
    *,
    count: int,
    min_gain: float,
    max_skills: int,
    rng: np.random.Generator,
) -> list[Lesson]:
    """At most `count` lessons of one task's kernels, no two alike, spread evenly over topics, then over pairs and phrasings.

    A correct first kernel is told from the best one by the topics that it is no example of. One that is not correct says nothing
    of what is fast, so there every topic of the best kernel will do. Skills in view are about other topics than the proposal; a
    pair, topic and phrasing comes without skills in its first or second use and with others in every further one.

    Args:
        kernels: all judged kernels of the task, wrong ones too.
        count: lessons wanted; fewer where there are not as many different ones.
        min_gain: see `improvements`.
        max_skills: most skills in view, 0 for none.
        rng: decides the order.
    """
    answers: dict[str, list[tuple[Lesson, Iterator[tuple[SkillDraft, ...]]]]] = {}
    for first, best in improvements(kernels, min_gain):
        for topic in taught_by(best, topics, beyond=first if first.verdict.correct else None):
            for draft in topic.phrasings:
                lesson = Lesson(first=first, best=best, injected=(), draft=draft)
                views = iter(_in_view(topic, topics, max_skills=max_skills, rng=rng))
                answers.setdefault(topic.topic, []).append((lesson, views))
    queue = _alternating(list(answers.values()), rng)
    out: list[Lesson] = []
    while queue and len(out) < count:
        again = []
        for lesson, views in queue[: count - len(out)]:
            injected = next(views, None)
            if injected is not None:
                out.append(dataclasses.replace(lesson, injected=injected))
                again.append((lesson, views))
        queue = again
    return out


def _in_view(
    topic: SkillTopic, topics: Sequence[SkillTopic], *, max_skills: int, rng: np.random.Generator
) -> list[tuple[SkillDraft, ...]]:
    """Distinct sets of skills about other topics, in random order; the empty one is first or second."""
    others = [(t.topic, draft) for t in topics if t.topic != topic.topic for draft in t.phrasings] if max_skills > 0 else []
    sets: list[tuple[SkillDraft, ...]] = []
    for i in rng.permutation(len(others)):
        name, draft = others[i]
        second = [d for n, d in others if n != name]
        if max_skills > 1 and second and rng.random() < SECOND_SKILL:
            sets.append((draft, second[int(rng.integers(len(second)))]))
        else:
            sets.append((draft,))
    sets.insert(int(rng.integers(2)), ())
    return sets


def _alternating(groups: Sequence[list], rng: np.random.Generator) -> list:
    """The members of all groups, each group shuffled and the groups taking turns."""
    shuffled = [[groups[g][i] for i in rng.permutation(len(groups[g]))] for g in rng.permutation(len(groups))]
    longest = max((len(group) for group in shuffled), default=0)
    return [group[i] for i in range(longest) for group in shuffled if i < len(group)]
