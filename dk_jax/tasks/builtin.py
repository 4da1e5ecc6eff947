"""The built-in suite: families of tasks over three levels, split into train and held out by family.

Level 1 is a single operator, level 2 a fused chain, level 3 a small block or model. Held-out families are
compositions that no train family has, made of operations that train families do have, so that they measure
composing and not guessing.
"""

from __future__ import annotations

from functools import cache

from dk_jax.tasks.families import Family, Member, map_families, norm_families, reduction_families
from dk_jax.tasks.families_blocks import block_families
from dk_jax.tasks.families_layers import column_families, matmul_families, move_families
from dk_jax.tasks.render import render_reference
from dk_jax.tasks.spec import OpSpec
from dk_jax.tasks.task import Size, Suite, Task


@cache
def builtin_suite(size: Size = "cpu") -> Suite:
    """All built-in tasks.

    Args:
      size: `cpu` sizes take PyTorch eager about 0.1 to 3 ms on two threads; `gpu` sizes are those of real
        models, under 0.5 GB a task.

    Raises:
      ValueError: `size` is neither.
    """
    if size not in ("cpu", "gpu"):
        raise ValueError(f"size is {size!r}: give 'cpu' or 'gpu'")
    return Suite(tuple(_task(family, member, size) for family in _families() for member in family[3]))


def held_out_structures() -> frozenset[tuple]:
    """Structures of the held-out tasks, for generators to avoid."""
    return frozenset(task.spec.structure for task in builtin_suite("cpu").held_out)


def _families() -> list[Family]:
    return [
        *map_families(),
        *reduction_families(),
        *norm_families(),
        *column_families(),
        *matmul_families(),
        *move_families(),
        *block_families(),
    ]


def _task(family: Family, member: Member, size: Size) -> Task:
    name, level, split, _ = family
    rows, cols, *widths = member.cpu if size == "cpu" else member.gpu
    spec = OpSpec(rows=rows, cols=cols, stages=member.build(*widths), draw=member.draw)
    title = f"{name.replace('_', ' ').capitalize()}: {member.label.replace('_', ' ')}."
    return Task(
        name=f"{name}_{member.label}",
        level=level,
        family=name,
        split=split,
        reference=render_reference(spec, title),
        size=size,
        spec=spec,
    )
