"""The learnable set: tasks on which an optimisation, once found, carries over (`tasks.source="learnable"`).

Every family of `learnable_families` stands for one optimisation. Three groups of tasks tell what was learnt:

    group            Task.split    Task.family
    train            "train"       of a trained family
    sibling          "held_out"    of a trained family: the same optimisation, another composition
    held_out_family  "held_out"    of a family without training members: a composition that training has nowhere

So a family, other than those of the built-in suite, is in both splits. Generated tasks that would give a held-out one away are left out
(`reserved`). What eager and a fused kernel cost at least: `learnable_costs`; whether the experts are as good as that on a card is measured
by scripts/bench/learnable_tasks.py.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from dk_jax.tasks.families import Member
from dk_jax.tasks.learnable_families import LearnableFamily, held_out_families, trained_families
from dk_jax.tasks.render import render_reference
from dk_jax.tasks.spec import Branch, Linear, Matmul, OpSpec, is_map
from dk_jax.tasks.task import Size, Split, Task

Group = Literal["train", "sibling", "held_out_family"]
GROUPS: tuple[Group, ...] = ("train", "sibling", "held_out_family")


@cache
def learnable_tasks(size: Size = "gpu") -> tuple[Task, ...]:
    """All tasks of the set: trained families with their siblings, then held-out families.

    Args:
      size: `gpu`, or `small` for the same tasks at sizes that Triton's interpreter checks in seconds.

    Raises:
      ValueError: `size` is neither.
    """
    if size not in ("small", "gpu"):
        raise ValueError(f"the learnable set has no size {size!r}: give 'gpu', or 'small' to check it on a CPU")
    made = []
    for family in families():
        made += [_task(family, member, "train", size) for member in family.train]
        made += [_task(family, member, "held_out", size) for member in family.held_out]
    return tuple(made)


def families() -> tuple[LearnableFamily, ...]:
    """Trained families, then held-out ones."""
    return (*trained_families(), *held_out_families())


def group(task: Task) -> Group:
    """Which of the three groups a task of the set belongs to.

    Raises:
      ValueError: its family is none of the set's.
    """
    if task.family not in {family.name for family in families()}:
        raise ValueError(f"task {task.name!r} is of family {task.family!r}, which the learnable set does not have")
    if task.split == "train":
        return "train"
    return "sibling" if task.family in {family.name for family in trained_families()} else "held_out_family"


def reserved(spec: OpSpec) -> bool:
    """Whether a composition would give away a held-out task: one of a sibling's structure, or one that holds, in a row, the operations other
    than elementwise ones that make a held-out family."""
    structures, made_of = _held_out()
    own = _skeleton(spec)
    return spec.structure in structures or any(
        own[start : start + len(part)] == part for part in made_of for start in range(len(own) - len(part) + 1)
    )


@cache
def _held_out() -> tuple[frozenset[tuple], frozenset[tuple[str, ...]]]:
    tasks = [task for task in learnable_tasks("gpu") if task.split == "held_out"]
    whole = [task for task in tasks if group(task) == "held_out_family"]
    return frozenset(task.spec.structure for task in tasks), frozenset(_skeleton(task.spec) for task in whole)


def _skeleton(spec: OpSpec) -> tuple[str, ...]:
    """Names of the stages that are not elementwise; a linear layer is a product like any other."""
    names: list[str] = []
    for stage in spec.stages:
        if isinstance(stage, Branch):
            names += ["Branch", *(type(inner).__name__ for inner in stage.stages if not is_map(inner))]
        elif not is_map(stage):
            names.append("Matmul" if isinstance(stage, Linear | Matmul) else type(stage).__name__)
    return tuple(names)


def _task(family: LearnableFamily, member: Member, split: Split, size: Size) -> Task:
    rows, cols, *widths = member.cpu if size == "small" else member.gpu
    spec = OpSpec(rows=rows, cols=cols, stages=member.build(*widths), draw=member.draw)
    title = f"{family.name.replace('_', ' ').capitalize()}: {member.label.replace('_', ' ')}."
    return Task(
        name=f"{family.name}_{member.label}",
        level=3 if spec.kind == "block" else 2,
        family=family.name,
        split=split,
        reference=render_reference(spec, title),
        size=size,
        spec=spec,
    )
