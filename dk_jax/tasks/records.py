"""Loads tasks from rows of (prompt, reference, entry point): JSONL or parquet files, as data sets for RL are published.

The defaults of `Fields` fit hkust-nlp/drkernel-rl-data and -validation-data (arXiv 2602.05885: `reward_model.ground_truth` holds the
reference, `extra_info` its entry_point, uuid and level) and KernelBench's own tables (code, name, level). A row's prompt is not used: prompts
are ours. Sources are parsed, never executed: running them is the sandbox's business.

A row that can't be used is told with its number and the reason, and rows with the same reference are one task.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dk_jax.tasks.entry_point import NAME, EntryPointError, as_model
from dk_jax.tasks.kernelbench import TaskFileError, check_reference
from dk_jax.tasks.task import Size, Split, Task

ENDINGS = (".jsonl", ".parquet")
_BATCH = 512
"""Rows of a parquet file in memory at a time."""
_LONGEST_NAME = 120
_FENCE = re.compile(r"\A\s*```[a-z]*\n(.*?)\n```\s*\Z", re.DOTALL)
_ODD = re.compile(r"[^\w.+-]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fields:
    """Where in a row things are: dotted paths, of which the first counts that leads to something. Text on the way that is JSON is read.

    Attributes:
      reference: the source that defines the task.
      entry_point: name of its class; Model where there is none.
      name: of the task; where there is none it is named after its file and row.
      level: a number, 1 where there is none.
      family: tasks of a family are never in training and held out at once; each is its own where there is none.
    """

    reference: tuple[str, ...] = (
        "reward_model.ground_truth", "reward_model.reference_code", "reference_code", "reference", "ground_truth",
        "extra_info.reference_code", "extra_info.reference", "code",
    )  # fmt: skip
    entry_point: tuple[str, ...] = ("extra_info.entry_point", "entry_point")
    name: tuple[str, ...] = ("extra_info.uuid", "uuid", "name")
    level: tuple[str, ...] = ("extra_info.level", "level")
    family: tuple[str, ...] = ("extra_info.family", "family")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row that is no task. `row` counts from 1; it is the line of a JSONL file."""

    file: str
    row: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: row {self.row}: {self.reason}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Records:
    """What rows have held.

    Attributes:
      tasks: in the order of the rows.
      bad: rows that are no tasks.
      merged: names of tasks that stand for several rows with the same reference, and how many these were.
    """

    tasks: tuple[Task, ...]
    bad: tuple[BadRow, ...] = ()
    merged: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def summary(self) -> str:
        """What became of the rows, in a sentence."""
        repeated = sum(self.merged.values()) - len(self.merged)
        return f"{len(self.tasks)} tasks; {repeated} rows repeat another's reference, {len(self.bad)} can't be used"


def load_records(
    path: str | Path, fields: Fields | None = None, *, rows: int = 0, split: Split = "train", size: Size = "gpu"
) -> Records:
    """Tasks of a file, or of all such files in a directory, by name.

    Args:
      path: .jsonl or .parquet.
      fields: where things are.
      rows: only so many rows are read; 0 for all.
      split: split of the tasks.
      size: machine that the sizes are meant for.

    Raises:
      TaskFileError: there is no such file, parquet can't be read here, or no row at all can be used.
    """
    fields, files = fields or Fields(), _files(Path(path))
    tasks: dict[str, Task] = {}
    bad: list[BadRow] = []
    names: set[str] = set()
    counts: dict[str, int] = {}
    read = 0
    for file in files:
        for number, row in enumerate(_rows(file), 1):
            if rows and read == rows:
                break
            read += 1
            try:
                task = _task(row, fields, f"{file.stem}_{number}", split=split, size=size)
            except (TaskFileError, EntryPointError) as error:
                bad.append(BadRow(file=str(file), row=number, reason=" ".join(str(error).split())))
                continue
            if (known := tasks.get(task.reference)) is not None:
                counts[known.name] = counts.get(known.name, 1) + 1
                continue
            if task.name in names:
                task = dataclasses.replace(task, name=f"{task.name}_{file.stem}_{number}")
            names.add(task.name)
            tasks[task.reference] = task
    if not tasks:
        raise TaskFileError(f"{path}: none of {read} rows can be used: {bad[0] if bad else 'it is empty'}")
    return Records(tasks=tuple(tasks.values()), bad=tuple(bad), merged=counts)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in ENDINGS)
        if not files:
            raise TaskFileError(f"{path}: no {' or '.join(ENDINGS)} file in it")
        return files
    if not path.is_file():
        raise TaskFileError(f"{path}: no such file; give one of {', '.join(ENDINGS)}, or a directory of them")
    if path.suffix not in ENDINGS:
        raise TaskFileError(f"{path}: rows are read from {' and '.join(ENDINGS)} files")
    return [path]


def _rows(file: Path) -> Iterator[Any]:
    return _parquet_rows(file) if file.suffix == ".parquet" else _json_rows(file)


def _json_rows(file: Path) -> Iterator[Any]:
    """A row a line; what is no JSON comes as the error that says so."""
    with open(file, encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                yield TaskFileError(f"not JSON ({error})")


def _parquet_rows(file: Path) -> Iterator[Any]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise TaskFileError(f"{file}: parquet files are read with pyarrow, which is not installed: pip install pyarrow, or give JSONL") from error
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(_BATCH):
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
        raise TaskFileError(f"{file}: can't be read as parquet ({error}); is it whole?") from error


def _task(row: Any, fields: Fields, default_name: str, *, split: Split, size: Size) -> Task:
    if isinstance(row, TaskFileError):
        raise row
    if not isinstance(row, Mapping):
        raise TaskFileError(f"a {type(row).__name__} instead of an object with fields")
    reference = _text(row, fields.reference)
    if reference is None:
        raise TaskFileError(f"no reference in {' or '.join(fields.reference)}; it has {', '.join(list(row)[:8]) or 'nothing'}")
    try:
        reference.encode()
    except UnicodeEncodeError:
        raise TaskFileError("its reference is no UTF-8 text") from None
    fenced = _FENCE.match(reference)
    source = as_model(fenced[1] + "\n" if fenced else reference, _text(row, fields.entry_point) or NAME)
    check_reference(source, "reference")
    name = _ODD.sub("_", _text(row, fields.name) or "").strip("_")[:_LONGEST_NAME] or default_name
    family = _text(row, fields.family) or name
    return Task(name=name, level=_level(row, fields), family=family, split=split, reference=source, size=size)


def _level(row: Mapping[str, Any], fields: Fields) -> int:
    text = _text(row, fields.level)
    found = re.fullmatch(r"(?:level)?[\s_]*(\d+)", text.strip().lower()) if text else None
    if text and not found:
        raise TaskFileError(f"its level is {text!r}, a number is needed")
    return int(found[1]) if found else 1


def _text(row: Mapping[str, Any], paths: Sequence[str]) -> str | None:
    """What the first path leads to that leads to a text or a number; None if none does."""
    for path in paths:
        value: Any = row
        for part in path.split("."):
            value = _opened(value)
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, str) and value.strip():
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return f"{value:g}" if isinstance(value, float) else str(value)
    return None


def _opened(value: Any) -> Any:
    """An object, also one that was written as text."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except ValueError:
            return None
    return value
