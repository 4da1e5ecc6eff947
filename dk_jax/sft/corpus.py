"""The corpus of the cold start: generated kernels for many tasks, each judged by the sandbox before it is used.

Which kernels there are is the language's business (`variants`); this module chooses some for each task, asks for verdicts
and keeps them all, wrong ones too. A model learns to write a right kernel from many different tasks, and needs only some of
them timed to learn what is fast, so the first `timed_tasks` tasks get several kernels each, judged and timed, and every other
task a few that are only judged for correctness, at less than half the cost. Interrupted work continues from the judge's
journal.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from dk_jax.rollout.judge import Judge, Request
from dk_jax.rollout.trajectory import Verdict, derive_seed
from dk_jax.sft.judged import JudgedKernel
from dk_jax.tasks.task import Task

log = logging.getLogger(__name__)


class CorpusError(RuntimeError):
    """There is nothing to learn from; the message says what the sandbox made of the kernels."""


class Variant(Protocol):
    """A generated kernel: its text, what it does well, and whether it is meant to be right."""

    source: str
    techniques: frozenset[str]
    intent: str  # "good", "slow", "wrong" or "broken"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """How many kernels a task.

    Attributes:
        timed_tasks: tasks, from the first one on, whose kernels are timed.
        variants_per_task: right kernels of a timed task.
        untimed_variants: right kernels of every other task.
        wrong_share: kernels that are meant to be wrong or broken, added to these, for each right one (on average).
    """

    timed_tasks: int
    variants_per_task: int
    untimed_variants: int
    wrong_share: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """A kernel that is to be judged."""

    task: Task
    variant: Variant
    timed: bool


def choose(variants: Sequence[Variant], count: int, *, wrong_share: float, rng: np.random.Generator) -> list[Variant]:
    """Draws at most `count` distinct right kernels, spread evenly over technique sets, then about `wrong_share` as many wrong."""
    by_set: dict[frozenset[str], list[Variant]] = {}
    for v in variants:
        if v.intent in ("good", "slow"):
            by_set.setdefault(v.techniques, []).append(v)
    pools = [[pool[i] for i in rng.permutation(len(pool))] for pool in by_set.values()]
    picked: list[Variant] = []
    while len(picked) < count and any(pools):
        for i in rng.permutation(len(pools)):
            if pools[i] and len(picked) < count:
                picked.append(pools[i].pop())
    wrong = [v for v in variants if v.intent not in ("good", "slow")]
    return picked + [wrong[i] for i in rng.permutation(len(wrong))[: int(rng.binomial(count, wrong_share))]]


def choose_all(
    tasks: Sequence[Task], variants: Callable[[Task], Sequence[Variant]], *, config: CorpusConfig, seed: int
) -> list[Chosen]:
    """Kernels of every task, the most important tasks first (see CorpusConfig.timed_tasks)."""
    out = []
    for position, task in enumerate(tasks):
        rng = np.random.default_rng(derive_seed(seed, "corpus", task.name))
        timed = position < config.timed_tasks
        count = config.variants_per_task if timed else config.untimed_variants
        out += [
            Chosen(task=task, variant=v, timed=timed)
            for v in choose(variants(task), count, wrong_share=config.wrong_share, rng=rng)
        ]
    return out


def judge_untimed(
    chosen: Sequence[Chosen], judge: Judge, *, progress: Callable[[int], None] | None = None
) -> list[Verdict]:
    """Verdicts on the kernels that are not to be timed, in their order."""
    requests = [Request(task=c.task, source=c.variant.source) for c in chosen if not c.timed]
    return judge.evaluate(requests, phase="corpus/untimed", progress=progress, timed=False, trusted=True)


def judge_all(
    chosen: Sequence[Chosen], judge: Judge, *, progress: Callable[[int], None] | None = None
) -> tuple[list[JudgedKernel], dict[str, int]]:
    """Judges the chosen kernels.

    Args:
        progress: called with the number of newly judged kernels.

    Returns:
        The judged kernels, and counts: kernels, correct, tasks, `surprises` (a kernel that was meant to be right and is not, or
        the reverse: a generator bug or a timing accident, logged), and each outcome. Kernels of rejected tasks are dropped.

    Raises:
        CorpusError: no kernel was judged correct.
    """
    order = sorted(range(len(chosen)), key=lambda i: not chosen[i].timed)
    chosen = [chosen[i] for i in order]
    requests = [Request(task=c.task, source=c.variant.source) for c in chosen if c.timed]
    verdicts = judge.evaluate(requests, phase="corpus", progress=progress, trusted=True)
    verdicts += judge_untimed(chosen, judge, progress=progress)
    kernels, counts = [], Counter()
    for c, verdict in zip(chosen, verdicts, strict=True):
        task, variant = c.task, c.variant
        counts[verdict.outcome] += 1
        if verdict.outcome in ("task_rejected", "infra_error", "cancelled"):
            continue
        if verdict.correct != (variant.intent in ("good", "slow")):
            counts["surprises"] += 1
            log.warning("%s: a kernel meant to be %s was judged %s: %s", task.name, variant.intent, verdict.outcome, verdict.feedback)
        kernels.append(
            JudgedKernel(
                task=task.name,
                source=variant.source,
                techniques=tuple(sorted(variant.techniques)),
                intent=variant.intent,
                verdict=verdict,
            )
        )
    counts |= {"kernels": len(kernels), "correct": sum(k.verdict.correct for k in kernels), "tasks": len({k.task for k in kernels})}
    if not any(k.verdict.correct for k in kernels):
        raise CorpusError(
            f"none of {len(chosen)} generated kernels was judged correct ({dict(counts)}): see the sandbox's log, and python -m sandbox doctor, "
            "then run the same command again"
        )
    return kernels, dict(counts)
