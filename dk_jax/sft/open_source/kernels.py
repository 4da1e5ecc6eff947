"""The cold start's second source: Triton kernels that people wrote, read from installed open packages.

The catalogue (`dk_jax.sft.open_source.catalogue`) says which launchers solve which problem; `dk_jax.sft.open_source.extract` makes each a
module of its own; the sandbox judges every one, and what it says is kept with where the kernel comes from and under which licence. A file of
such records is what the cold start reads (`load_open_kernels`).
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from dk_jax.rollout.judge import Judge, Request
from dk_jax.rollout.trajectory import Verdict
from dk_jax.sft.judged import JudgedKernel
from dk_jax.sft.open_source.catalogue import Launch, Problem, body_of
from dk_jax.sft.open_source.extract import Extracted, Extractor
from dk_jax.sft.open_source.modules import ExtractError
from dk_jax.sft.open_source.packages import PACKAGES, SourcePackage, permissive
from dk_jax.sft.open_source.techniques import techniques_of
from dk_jax.tasks.task import Size, Task

ABSENT = "its package is not installed"
NO_LAUNCH = "no kernel was launched"
"""What the sandbox says of a module whose forward, compiled ahead of time, launches nothing: it may be right, but not by a kernel."""


class OpenKernelError(ValueError):
    """A file of open kernels that cannot be used; the message names the file, the line and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a kernel comes from.

    Attributes:
        package, version: its distribution.
        licence: SPDX identifier, always a permissive one.
        copyright: whose it is, by the distribution's licence files; `notices`: by the comments at the top of its source files.
        launcher: "module:function" of the package.
        files, functions: of the package, that parts of the source come from; `own`: functions in it that this project wrote.
        configs: (kernel, values) of tuned kernels: the one configuration that was kept.
    """

    package: str
    version: str
    licence: str
    copyright: tuple[str, ...]
    notices: tuple[str, ...]
    launcher: str
    files: tuple[str, ...]
    functions: tuple[str, ...]
    own: tuple[str, ...]
    configs: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """An extracted kernel that is to be judged."""

    problem: Problem
    launch: Launch
    source: str
    techniques: tuple[str, ...]
    provenance: Provenance


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """A launcher of the catalogue that does not extract, and why."""

    problem: Problem
    launch: Launch
    reason: str

    @property
    def distribution(self) -> str:
        """Of the launcher's package."""
        return next(name for name, module in PACKAGES.items() if module == self.launch.module)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenKernel:
    """A record: a judged kernel, its task and its provenance."""

    task: Task
    kernel: JudgedKernel
    provenance: Provenance

    @property
    def outcome(self) -> str:
        """The sandbox's outcome, or "no launch" for what is right without a kernel."""
        return "no launch" if self.kernel.verdict.correct and NO_LAUNCH in self.kernel.verdict.feedback else self.kernel.verdict.outcome


def extract_all(
    problems: Iterable[Problem], packages: Sequence[SourcePackage], *, progress: Callable[[int], None] | None = None
) -> tuple[list[Candidate], list[Refusal]]:
    """Extracts what problems name of the packages that are there.

    Args:
        progress: called with 1 for each launcher.

    Returns:
        Candidates and refusals in the order of the catalogue; a source that comes out twice for a problem is kept once.
    """
    extractors = {package.module: Extractor(package) for package in packages}
    candidates, refusals, seen = [], [], set()
    for problem in problems:
        for launch in problem.launches:
            extractor = extractors.get(launch.module)
            if extractor is None:
                refusals.append(Refusal(problem=problem, launch=launch, reason=ABSENT))
            else:
                try:
                    candidate = extract(problem, launch, extractor)
                except ExtractError as error:
                    refusals.append(Refusal(problem=problem, launch=launch, reason=str(error)))
                else:
                    if (problem.name, candidate.source) not in seen:
                        candidates.append(candidate)
                    seen.add((problem.name, candidate.source))
            if progress is not None:
                progress(1)
    return candidates, refusals


def extract(problem: Problem, launch: Launch, extractor: Extractor) -> Candidate:
    """One launcher as a candidate for its problem.

    Raises:
        ExtractError: it needs something that cannot be had as plain text.
    """
    got: Extracted = extractor.extract([launch.path], body_of(launch.call), arguments=problem.arguments, init=problem.constructor)
    package = extractor.package
    provenance = Provenance(
        package=package.distribution,
        version=package.version,
        licence=package.licence,
        copyright=package.copyright,
        notices=got.notices,
        launcher=launch.path,
        files=got.files,
        functions=got.functions,
        own=got.own,
        configs=got.configs,
    )
    return Candidate(problem=problem, launch=launch, source=got.source, techniques=techniques_of(got.source), provenance=provenance)


def judge_candidates(
    candidates: Sequence[Candidate], judge: Judge, *, size: Size, timed: bool, progress: Callable[[int], None] | None = None
) -> list[OpenKernel]:
    """Verdicts on candidates at a size, on all input distributions of the sandbox; those in the judge's journal are taken from there."""
    tasks = [candidate.problem.task(size) for candidate in candidates]
    requests = [Request(task=task, source=candidate.source) for task, candidate in zip(tasks, candidates, strict=True)]
    verdicts = judge.evaluate(requests, phase=f"open/{size}", progress=progress, timed=timed)
    return [
        OpenKernel(
            task=task,
            kernel=JudgedKernel(task=task.name, source=c.source, techniques=c.techniques, intent="good", verdict=verdict),
            provenance=c.provenance,
        )
        for task, c, verdict in zip(tasks, candidates, verdicts, strict=True)
    ]


def save_open_kernels(path: Path, records: Sequence[OpenKernel]) -> None:
    """One JSON line a record, compressed where the name ends in .gz; complete or not at all."""
    partial = path.with_suffix(path.suffix + ".part")
    with gzip.open(partial, "wt", encoding="utf-8") if path.suffix == ".gz" else open(partial, "w", encoding="utf-8") as file:
        for record in records:
            task = record.task
            described = {"name": task.name, "level": task.level, "family": task.family, "dtype": task.dtype, "size": task.size}
            row = {
                **dataclasses.asdict(record.kernel),
                "reference": task.reference,
                "described": described,
                "provenance": dataclasses.asdict(record.provenance),
            }
            file.write(json.dumps(row) + "\n")
    partial.replace(path)


def load_records(path: Path) -> list[OpenKernel]:
    """Reads what `save_open_kernels` wrote, whatever the verdicts.

    Raises:
        OpenKernelError: a line is no such record, or one of a licence that is not known to be permissive.
    """
    out: list[OpenKernel] = []
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
        while True:
            try:
                if not (line := file.readline()):
                    return out
                out.append(_record(json.loads(line)))
            except (ValueError, KeyError, TypeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise OpenKernelError(
                    f"{path}:{len(out) + 1}: not a record of an open kernel ({error}). Delete the file and make it again with "
                    "scripts/open_kernels.py; verdicts are taken from the journal beside it."
                ) from error


def load_open_kernels(path: Path) -> tuple[list[Task], list[JudgedKernel]]:
    """What the cold start can use of a file: the kernels that were launched and judged correct, and their tasks.

    Tasks have no spec, are for training, and each is a family of its own; their names begin with `catalogue.PREFIX`, as no other
    task's do. Where the kernels come from: `load_records`.

    Raises:
        OpenKernelError: as `load_records`, or two records have one task's name and different references.
    """
    tasks: dict[str, Task] = {}
    kernels = []
    for record in load_records(path):
        if record.outcome != "ok":
            continue
        if tasks.setdefault(record.task.name, record.task) != record.task:
            raise OpenKernelError(f"{path}: two references are called {record.task.name}; keep records of one size in one file")
        kernels.append(record.kernel)
    return list(tasks.values()), kernels


def _record(row: dict[str, Any]) -> OpenKernel:
    given = row["provenance"]
    provenance = Provenance(**{key: _tuples(value) for key, value in given.items()})
    if permissive(provenance.licence) != provenance.licence:
        raise ValueError(f"{provenance.licence!r} is not a licence known to be permissive")
    kernel = JudgedKernel(
        task=row["task"],
        source=row["source"],
        techniques=tuple(row["techniques"]),
        intent=row["intent"],
        verdict=Verdict(**row["verdict"]),
    )
    task = Task(split="train", reference=row["reference"], **row["described"])
    if task.name != kernel.task:
        raise ValueError(f"its kernel is of task {kernel.task!r} and its reference of {task.name!r}")
    return OpenKernel(task=task, kernel=kernel, provenance=provenance)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def counts_of(records: Sequence[OpenKernel], refusals: Sequence[Refusal]) -> dict[str, dict[str, int]]:
    """Kernels of the catalogue by package and outcome: of the sandbox, "no launch", "not extracted" or "absent", whose package is not there."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in PACKAGES}
    for record in records:
        counts[record.provenance.package][record.outcome] += 1
    for refusal in refusals:
        counts[refusal.distribution]["absent" if refusal.reason == ABSENT else "not extracted"] += 1
    return {name: dict(count) for name, count in counts.items()}


def counts_table(records: Sequence[OpenKernel], refusals: Sequence[Refusal]) -> str:
    """The counts by package and outcome, as text."""
    counts = counts_of(records, refusals)
    total: Counter[str] = sum((Counter(c) for c in counts.values()), Counter())
    outcomes = sorted(total, key=lambda outcome: (outcome != "ok", outcome))
    rows = [["package", *outcomes, "kernels"]]
    rows += [[name, *(str(c.get(o, 0)) for o in outcomes), str(sum(c.values()))] for name, c in [*counts.items(), ("all", total)]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]) for row in rows)


def summary(records: Sequence[OpenKernel], refusals: Sequence[Refusal], packages: Sequence[SourcePackage]) -> dict[str, Any]:
    """What came of the catalogue, without any text of the packages."""
    kernels = [
        {
            "task": record.task.name,
            "launcher": record.provenance.launcher,
            "outcome": record.outcome,
            "speedup": round(record.kernel.verdict.speedup, 3),
            "techniques": record.kernel.techniques,
            "characters": len(record.kernel.source),
        }
        for record in records
    ]
    return {
        "packages": {package.distribution: f"{package.version}, {package.licence}" for package in packages},
        "counts": counts_of(records, refusals),
        "correct_tasks": len({record.task.name for record in records if record.outcome == "ok"}),
        "refused": [{"problem": r.problem.name, "launcher": r.launch.path, "reason": r.reason} for r in refusals],
        "failed": {r.provenance.launcher: " ".join(r.kernel.verdict.feedback.split())[:300] for r in records if r.outcome != "ok"},
        "kernels": kernels,
    }
