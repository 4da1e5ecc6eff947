"""Training tasks that are held-out ones in other words or sizes, operation by operation, and the kernels and samples that go with them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from dk_jax.agents.text import fenced_blocks
from dk_jax.sft.judged import JudgedKernel
from dk_jax.sft.operations import operations
from dk_jax.sft.samples import Sample
from dk_jax.tasks.task import Task

CONTAMINATED = 0.9
"""Similarity of operations from which a training task counts as a held-out one by default: all are the same up to nine, nine of ten beyond.
Of 1,400 generated tasks one is so similar to a held-out task of the built-in suite (a bias where that has a residual), eleven have 0.75 to 0.8
(one of four or five operations is another), all others less; held against all files of KernelBench, 29 and 2 have. Nothing lies between."""


def operation_similarity(one: Sequence[str], other: Sequence[str]) -> float:
    """1 - (least number of operations to insert, delete or replace) / (operations of the longer one); 0 where one of them is empty."""
    if not one or not other:
        return 0.0
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        last, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (a != b))
    return 1 - row[-1] / max(len(one), len(other))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nearest:
    """A training task and the held-out task that it is most similar to.

    Attributes:
        task, held_out: names.
        similarity: see `operation_similarity`.
        operations: of the training task.
        held_out_operations: of the other.
    """

    task: str
    held_out: str
    similarity: float
    operations: tuple[str, ...]
    held_out_operations: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contamination:
    """What training tasks have in common with held-out ones.

    Attributes:
        nearest: for each training task, in their order, its nearest held-out task.
        threshold: similarity from which a task is contaminated.
        least_operations: tasks of fewer operations are left in.
    """

    nearest: tuple[Nearest, ...]
    threshold: float
    least_operations: int

    @property
    def removed(self) -> tuple[Nearest, ...]:
        """Those of contaminated tasks."""
        return tuple(n for n in self.nearest if n.similarity >= self.threshold and len(n.operations) >= self.least_operations)

    @property
    def tasks(self) -> frozenset[str]:
        """Names of contaminated tasks."""
        return frozenset(n.task for n in self.removed)

    def counts(self, edges: Sequence[float] = (0.0, 0.25, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 1.0)) -> dict[str, int]:
        """How many tasks lie between each edge and the next, the last edge for itself."""
        found = [sum(n.similarity >= edge for n in self.nearest) for edge in edges]
        names = [f"{a:.2f} to {b:.2f}" for a, b in zip(edges, edges[1:], strict=False)] + [f"{edges[-1]:.2f}"]
        return {name: a - b for name, a, b in zip(names, found, [*found[1:], 0], strict=True)}


class HeldOut:
    """The operations of held-out tasks, to look others up in.

    Raises:
        ValueError: there is none, or one can't be read; names it.
    """

    def __init__(self, tasks: Sequence[Task]):
        if not tasks:
            raise ValueError("there are no held-out tasks to hold training data against")
        names: dict[tuple[str, ...], str] = {}
        for task in tasks:
            names.setdefault(_operations_of(task), task.name)
        self._held = [(Counter(ops), ops, name) for ops, name in names.items()]
        self._found: dict[tuple[str, ...], tuple[float, int]] = {}

    def nearest(self, task: str, ops: tuple[str, ...]) -> Nearest:
        """The held-out task that these operations, of the task `task`, are most similar to, the first of equals."""
        if ops not in self._found:
            self._found[ops] = self._look(ops)
        degree, at = self._found[ops]
        _, other, name = self._held[at]
        return Nearest(task=task, held_out=name, similarity=degree, operations=ops, held_out_operations=other)

    def _look(self, ops: tuple[str, ...]) -> tuple[float, int]:
        own, best = Counter(ops), (0.0, 0)
        # What two have in common bounds how similar they can be.
        bounds = [sum((own & bag).values()) / max(len(ops), len(other), 1) for bag, other, _ in self._held]
        for i in sorted(range(len(bounds)), key=lambda i: (-bounds[i], i)):
            if bounds[i] <= best[0]:
                break
            degree = operation_similarity(ops, self._held[i][1])
            if degree > best[0]:
                best = (degree, i)
        return best


def decontaminate(tasks: Sequence[Task], held_out: HeldOut, *, threshold: float = CONTAMINATED, least_operations: int = 1) -> Contamination:
    """Holds the references of training tasks against those of held-out ones, operation by operation (see `operations`).

    Args:
        tasks: to train on.
        held_out: to evaluate on.
        threshold: similarity from which a task is contaminated, above 0 and at most 1.
        least_operations: 2 leaves tasks of a single operation in, of which there are only so many; they may be evaluated on, too.

    Raises:
        ValueError: a reference that can't be read, by name; a threshold out of range.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"the threshold of contamination is {threshold}: give a similarity above 0 and at most 1")
    nearest = tuple(held_out.nearest(task.name, _operations_of(task)) for task in tasks)
    return Contamination(nearest=nearest, threshold=threshold, least_operations=least_operations)


def _operations_of(task: Task) -> tuple[str, ...]:
    try:
        return operations(task.reference)
    except ValueError as error:
        raise ValueError(f"the reference of task {task.name!r}: {error}. Correct it, or leave the task out") from None


def contaminated_kernels(kernels: Sequence[JudgedKernel], contamination: Contamination, held_out: HeldOut) -> dict[int, Nearest]:
    """Places of kernels that are answers to contaminated tasks, or whose `ModelNew` does in PyTorch what a held-out task does (of two
    operations or more), with what each is too similar to."""
    by_task = {nearest.task: nearest for nearest in contamination.removed}
    found = {}
    for i, kernel in enumerate(kernels):
        nearest = by_task.get(kernel.task) or _as_module(kernel.task, kernel.source, "ModelNew", contamination, held_out)
        if nearest is not None:
            found[i] = nearest
    return found


def contaminated_samples(samples: Sequence[Sample], contamination: Contamination, held_out: HeldOut) -> dict[int, Nearest]:
    """Places of samples about contaminated tasks, by name or by a reference in their first prompt, with what each is too similar to."""
    by_task = {nearest.task: nearest for nearest in contamination.removed}
    clean = {nearest.task for nearest in contamination.nearest} - by_task.keys()
    found = {}
    for i, sample in enumerate(samples):
        nearest = by_task.get(sample.task)
        if nearest is None and sample.task not in clean:
            blocks, _ = fenced_blocks(sample.turns[0][0])
            told = (_as_module(sample.task, block, "Model", contamination, held_out) for block in blocks)
            nearest = next((one for one in told if one is not None), None)
        if nearest is not None:
            found[i] = nearest
    return found


def _as_module(task: str, source: str, entry: str, contamination: Contamination, held_out: HeldOut) -> Nearest | None:
    """What a source's class does too much like; None where it has no such class, or another job."""
    try:
        ops = operations(source, entry)
    except ValueError:
        return None
    nearest = held_out.nearest(task, ops)
    least = max(contamination.least_operations, 2 if entry == "ModelNew" else 1)
    return nearest if nearest.similarity >= contamination.threshold and len(ops) >= least else None
