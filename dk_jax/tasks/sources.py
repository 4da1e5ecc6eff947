"""Where tasks that are not ours come from, by the name of the source: a KernelBench checkout, modules, or rows of a data set."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

from dk_jax.tasks.files import load_modules
from dk_jax.tasks.kernelbench import TaskFileError, load_kernelbench
from dk_jax.tasks.records import Fields, Records, load_records
from dk_jax.tasks.task import Size

SOURCES = ("kernelbench", "modules", "records")


def load_source(
    source: str, path: str | Path, *, levels: Collection[int], size: Size = "gpu", fields: Fields | None = None, rows: int = 0
) -> Records:
    """Tasks of a source, all of the training split.

    Args:
      source: one of SOURCES.
      path: of the directory or file.
      levels: which levels are wanted; of modules and records none for all.
      size: machine that the sizes are meant for.
      fields, rows: see `load_records`.

    Raises:
      TaskFileError: nothing can be read there, or there is no task of these levels. ValueError: another source.
    """
    if source == "kernelbench":
        return Records(tasks=tuple(load_kernelbench(path, tuple(sorted(levels)), size=size)))
    if source == "modules":
        found = Records(tasks=tuple(load_modules(path, size=size)))
    elif source == "records":
        found = load_records(path, fields, rows=rows, size=size)
    else:
        raise ValueError(f"source {source!r}: there are {', '.join(SOURCES)}")
    there = sorted({task.level for task in found.tasks})
    tasks = tuple(task for task in found.tasks if not levels or task.level in levels)
    if not tasks:
        raise TaskFileError(f"{path}: no task of level {', '.join(map(str, sorted(levels)))}: there are levels {', '.join(map(str, there))}")
    return dataclasses.replace(found, tasks=tasks)
