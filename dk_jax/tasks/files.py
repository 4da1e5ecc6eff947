"""Loads tasks from a directory of the user's own modules: any .py file that defines Model, get_inputs and get_init_inputs.

    DIRECTORY/rms_norm.py              family rms_norm, level 1
    DIRECTORY/norms/layer.py           family norms, level 1
    DIRECTORY/level2/norms/fused.py    family level2/norms, level 2

A family is never in training and held out at once, so variants of one problem belong into one folder. Files and folders whose names begin
with "_" or "." are passed over, everything else has to be a task. A file is parsed, never executed: running it is the sandbox's business.
"""

from __future__ import annotations

import re
from pathlib import Path

from dk_jax.tasks.kernelbench import TaskFileError, existing_directory, raise_all, read_reference
from dk_jax.tasks.task import Size, Split, Task

_LEVEL = re.compile(r"level_?(\d+)")


def load_modules(directory: str | Path, *, split: Split = "train", size: Size = "gpu") -> list[Task]:
    """Tasks of all modules in a directory and its subfolders, by path; a task is named after its path without the ending.

    Args:
      directory: holds the files.
      split: split of the tasks.
      size: machine that the sizes are meant for.

    Raises:
      TaskFileError: there is no such directory or no file in it, or files are bad (all of them are listed).
    """
    root = existing_directory(directory, "give one that holds .py files with Model, get_inputs and get_init_inputs")
    tasks, problems = [], []
    for path in sorted(root.rglob("*.py")):
        inner = path.relative_to(root)
        if any(part.startswith(("_", ".")) for part in inner.parts):
            continue
        try:
            source = read_reference(path)
        except TaskFileError as error:
            problems.append(f"{error} (files that are no tasks: begin their names with _)")
            continue
        tasks.append(
            Task(
                name=inner.with_suffix("").as_posix(), level=_level(inner), family=_family(inner), split=split, reference=source, size=size
            )
        )
    raise_all(problems)
    if not tasks:
        raise TaskFileError(f"{root}: no .py file; expected modules with Model, get_inputs and get_init_inputs, in it or its subfolders")
    return tasks


def _level(inner: Path) -> int:
    """That which the outermost folder named so gives, else 1."""
    found = (_LEVEL.fullmatch(part.lower()) for part in inner.parts[:-1])
    return next((int(match[1]) for match in found if match), 1)


def _family(inner: Path) -> str:
    """The folder, or the file itself where that says no more than the level."""
    folder = inner.parent
    return inner.with_suffix("").as_posix() if folder == Path() or _LEVEL.fullmatch(folder.as_posix().lower()) else folder.as_posix()
