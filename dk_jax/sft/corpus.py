"""The corpus of the cold start: generated kernels for many tasks, each judged by the sandbox before it is used.

Which kernels there are is the language's business (`variants`); this module chooses some for each task, asks for verdicts
and keeps them all, wrong ones too. Interrupted work continues from the judge's journal.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from dk_jax.rollout.judge import Judge, Request
from dk_jax.rollout.trajectory import derive_seed
from dk_jax.sft.samples import JudgedKernel
from dk_jax.tasks.task import Task

log = logging.getLogger(__name__)


class Variant(Protocol):
    """A generated kernel: its text, what it does well, and whether it is meant to be right."""

    source: str
    techniques: frozenset[str]
    intent: str  # "good", "slow", "wrong" or "broken"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """How many kernels a task, and the share of them that is meant to be wrong or broken."""

    variants_per_task: int
    wrong_share: float


def choose(variants: Sequence[Variant], *, config: CorpusConfig, rng: np.random.Generator) -> list[Variant]:
    """Draws `variants_per_task` distinct kernels: right and wrong ones by share, spread evenly over technique sets.

    The first one is always a right one without any technique where there is one, so that each task shows its plain form.
    """
    right = [v for v in variants if v.intent in ("good", "slow")]
    wrong = [v for v in variants if v.intent not in ("good", "slow")]
    n_wrong = min(len(wrong), int(rng.binomial(config.variants_per_task, config.wrong_share)))
    n_right = min(len(right), config.variants_per_task - n_wrong)
    by_set: dict[frozenset[str], list[Variant]] = {}
    for v in right:
        by_set.setdefault(v.techniques, []).append(v)
    pools = [[pool[i] for i in rng.permutation(len(pool))] for pool in by_set.values()]
    order = list(rng.permutation(len(pools)))
    plain = [i for i in order if not pools[i][0].techniques]
    order = plain + [i for i in order if i not in plain]
    picked: list[Variant] = []
    while len(picked) < n_right:
        for i in order:
            if pools[i] and len(picked) < n_right:
                picked.append(pools[i].pop())
    return picked + [wrong[i] for i in rng.permutation(len(wrong))[:n_wrong]]


def build_corpus(
    tasks: Sequence[Task],
    variants: Callable[[Task], Sequence[Variant]],
    judge: Judge,
    *,
    config: CorpusConfig,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> tuple[list[JudgedKernel], dict[str, int]]:
    """Judges chosen kernels of every task.

    Returns:
        The judged kernels, and counts: kernels, correct, tasks, `surprises` (a kernel that was meant to be right and is not, or
        the reverse: a generator bug or a timing accident, logged), and each outcome. Kernels of rejected tasks are dropped.
    """
    chosen: list[tuple[Task, Variant]] = []
    for task in tasks:
        rng = np.random.default_rng(derive_seed(seed, "corpus", task.name))
        chosen += [(task, v) for v in choose(variants(task), config=config, rng=rng)]
    verdicts = judge.evaluate(
        [Request(task=task, source=v.source) for task, v in chosen], phase="corpus", progress=progress
    )
    kernels, counts = [], Counter()
    for (task, variant), verdict in zip(chosen, verdicts, strict=True):
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
        raise RuntimeError(
            f"none of {len(chosen)} generated kernels was judged correct ({dict(counts)}): see the sandbox's log, and python -m sandbox doctor"
        )
    return kernels, dict(counts)
