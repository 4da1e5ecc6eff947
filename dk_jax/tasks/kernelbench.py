"""Loads tasks from a checkout of KernelBench, or any directory that is laid out like it: DIRECTORY/level1/12_Name.py and so on.

A task is named after level, number and file: level1_12_Name. Levels 1 to 3 have 250; level 4, whole models of others, is read where it is
asked for.

A file is parsed, never executed: running it is the sandbox's business.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from dk_jax.tasks.entry_point import UNPARSABLE, parse
from dk_jax.tasks.task import Size, Split, Task
from sandbox.protocol import MAX_SOURCE_BYTES

_SHOWN = 10


class TaskFileError(ValueError):
    """A task file that cannot be used; the message names the file, the line and what to do."""


def load_kernelbench(
    directory: str | Path, levels: Sequence[int] = (1, 2, 3), *, split: Split = "train", size: Size = "gpu"
) -> list[Task]:
    """Tasks of a KernelBench directory, by level and then by number.

    Args:
      directory: holds level1, level2, ..., or is the checkout, which holds them in KernelBench/.
      levels: which of them to read.
      split: split of the tasks; each file is a family of its own.
      size: machine that the sizes are meant for.

    Raises:
      TaskFileError: the directory or a level is missing or empty, or files are bad (all of them are listed).
    """
    root = existing_directory(directory, f"give one that holds {', '.join(f'level{n}/' for n in levels)}")
    if not any(root.glob("level[0-9]*")) and (root / "KernelBench").is_dir():
        root /= "KernelBench"
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
    raise_all(problems)
    return tasks


def existing_directory(directory: str | Path, wanted: str) -> Path:
    """The directory. Raises TaskFileError, which says what is `wanted`, where there is none."""
    if not Path(directory).is_dir():
        raise TaskFileError(f"{directory}: no such directory; {wanted}")
    return Path(directory)


def raise_all(problems: Sequence[str]) -> None:
    """Raises TaskFileError with the first of the problems and the number of the others, if there are any."""
    if problems:
        more = f"\n... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise TaskFileError("\n".join(problems[:_SHOWN]) + more)


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
    source = read_reference(path)
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


def read_reference(path: Path) -> str:
    """The checked source in a file.

    Raises:
      TaskFileError: the file cannot be read or parsed, or lacks something that a task needs.
    """
    try:
        source = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TaskFileError(
            f"{path}: cannot be read ({error.strerror}); check the path and its permissions"
        ) from error
    except UnicodeDecodeError as error:
        raise TaskFileError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    check_reference(source, str(path))
    return source


def check_reference(source: str, name: str) -> None:
    """Check that a reference source has what a task needs, without running it.

    Args:
      source: Python source.
      name: what to call it in an error.

    Raises:
      TaskFileError: naming `name`, the line and what to do.
    """
    if (size := len(source.encode("utf-8", "surrogatepass"))) > MAX_SOURCE_BYTES:
        raise TaskFileError(f"{name}: {size} bytes of source, the sandbox takes {MAX_SOURCE_BYTES}; draw large constants instead")
    try:
        tree = parse(source)
    except UNPARSABLE as error:
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
    if not _has_forward(model, classes):
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


def _has_forward(model: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> bool:
    """Whether a class has forward, be it from a class before it in the file."""
    if any(isinstance(node, ast.FunctionDef) and node.name == "forward" for node in model.body):
        return True
    bases = (classes[base.id] for base in model.bases if isinstance(base, ast.Name) and base.id in classes)
    return any(_has_forward(base, classes) for base in bases if base.lineno < model.lineno)


def _order(path: Path) -> tuple[int, str]:
    number = re.match(r"\d+", path.name)
    return (int(number.group()) if number else 1 << 30, path.name)
