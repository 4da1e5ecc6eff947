"""Loads tasks from a directory of KernelBench files: DIRECTORY/level1/12_Name.py and so on.

A file is parsed, never executed: running it is the sandbox's business.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from dk_jax.tasks.task import Size, Split, Task

_SHOWN = 10


class TaskFileError(ValueError):
    """A task file that cannot be used; the message names the file, the line and what to do."""


def load_kernelbench(
    directory: str | Path, levels: Sequence[int] = (1, 2, 3), *, split: Split = "train", size: Size = "gpu"
) -> list[Task]:
    """Tasks of a KernelBench directory, by level and then by number.

    Args:
      directory: holds level1, level2, ...
      levels: which of them to read.
      split: split of the tasks; each file is a family of its own.
      size: machine that the sizes are meant for.

    Raises:
      TaskFileError: the directory or a level is missing or empty, or files are bad (all of them are listed).
    """
    root = Path(directory)
    if not root.is_dir():
        raise TaskFileError(
            f"{root}: no such directory; give one that holds {', '.join(f'level{n}/' for n in levels)}"
        )
    tasks, problems = [], []
    for level in levels:
        folder = root / f"level{level}"
        files = sorted(folder.glob("*.py"), key=_order)
        if not files:
            raise TaskFileError(
                f"{folder}: no task files; expected files such as 1_Name.py, or leave {level} out of levels"
            )
        for path in files:
            try:
                tasks.append(load_task_file(path, level=level, split=split, size=size))
            except TaskFileError as error:
                problems.append(str(error))
    if problems:
        more = f"\n... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise TaskFileError("\n".join(problems[:_SHOWN]) + more)
    return tasks


def split_by_family(tasks: Sequence[Task], every: int = 4) -> list[Task]:
    """The tasks with every `every`-th family by name held out, the others for training; in their order."""
    held_out = set(sorted({task.family for task in tasks})[every - 1 :: every])
    return [dataclasses.replace(task, split="held_out" if task.family in held_out else "train") for task in tasks]


def load_task_file(path: str | Path, *, level: int = 1, split: Split = "train", size: Size = "gpu") -> Task:
    """One task from one file.

    Raises:
      TaskFileError: the file cannot be read or parsed, or lacks something that a task needs.
    """
    path = Path(path)
    try:
        source = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TaskFileError(
            f"{path}: cannot be read ({error.strerror}); check the path and its permissions"
        ) from error
    except UnicodeDecodeError as error:
        raise TaskFileError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    check_reference(source, str(path))
    name = re.sub(r"\W+", "_", path.stem)
    family = re.sub(r"^\d+_", "", name).lower()
    return Task(
        name=f"level{level}_{name}",
        level=level,
        family=f"level{level}_{family}",
        split=split,
        reference=source,
        size=size,
    )


def check_reference(source: str, name: str) -> None:
    """Check that a reference source has what a task needs, without running it.

    Args:
      source: Python source.
      name: what to call it in an error.

    Raises:
      TaskFileError: naming `name`, the line and what to do.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise TaskFileError(
            f"{name}:{line}: not valid Python ({getattr(error, 'msg', error)}); fix the syntax"
        ) from error
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    end = len(source.splitlines()) or 1
    if "Model" not in classes:
        raise TaskFileError(
            f"{name}:{end}: no class Model; define `class Model(nn.Module)` with a forward method"
        )
    model = classes["Model"]
    if "forward" not in {node.name for node in model.body if isinstance(node, ast.FunctionDef)}:
        raise TaskFileError(
            f"{name}:{model.lineno}: class Model has no forward; define `def forward(self, ...)`"
        )
    for function, purpose in (
        ("get_inputs", "the list of forward's arguments"),
        ("get_init_inputs", "the list of the constructor's arguments, [] if it has none"),
    ):
        if function not in functions:
            raise TaskFileError(
                f"{name}:{end}: no function {function}; define `def {function}()` that returns {purpose}"
            )


def _order(path: Path) -> tuple[int, str]:
    number = re.match(r"\d+", path.name)
    return (int(number.group()) if number else 1 << 30, path.name)
