"""Tasks are shown to the sandbox before a run uses them. What it refuses is left out of training; evaluations keep it, marked.

A file may parse and still not run, or be satisfied by zeros: its candidates would all count as wrong, or all as right. What the sandbox finds
out (`sandbox.protocol.Admission`: trivial answers, time against a launch, memory, cost of a judging) is kept in a file, a line a task, by
content: it is asked once, and who is interrupted goes on. scripts/admission.py writes the same file for all of a recipe's tasks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dk_jax.distributed import by_first
from dk_jax.tasks.task import Task
from dk_jax.train.setup import ConfigError, TaskSets, need_both_splits
from sandbox.protocol import Admission

log = logging.getLogger(__name__)
FILE = "admission.jsonl"
ADMITTED, MARKED, REFUSED = "admitted", "admitted with marks", "refused"


def category(found: Admission) -> str:
    """One of ADMITTED, MARKED, REFUSED."""
    return REFUSED if found.refusal else MARKED if found.marks else ADMITTED


class AdmissionFile:
    """What is known of tasks. A line that a crash cut short is dropped; a damaged one elsewhere is an error.

    Args:
        path: of the file, which need not be there.
        device: that is judged on. Facts of another kind of device are not taken for this one's; "" takes all.
        limits: that tasks have to keep to (SandboxJudge.limits). What could not be used under others is not known under these.

    Attributes:
        entries: the newest of each task, by name.

    Raises:
        ValueError: a line is damaged; names it.
    """

    def __init__(self, path: Path, *, device: str = "", limits: Mapping[str, float] | None = None):
        self.path, self._device, self._limits = Path(path), device.partition(":")[0], None if limits is None else dict(limits)
        self.entries: dict[str, dict[str, Any]] = {}
        self._known: dict[str, Admission] = {}
        if not self.path.exists():
            return
        lines = self.path.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1], 1):
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{self.path}:{number}: damaged line ({error}). Delete it; the task is examined again.") from error
        if lines[-1]:
            log.warning("%s: the last line was cut short and is dropped", self.path)
            os.truncate(self.path, sum(len(line) + 1 for line in lines[:-1]))

    def _take(self, entry: dict[str, Any]) -> None:
        if self._device and entry["device"] not in ("", self._device):
            return
        if entry["problem"] and self._limits is not None and entry["limits"] != self._limits:
            return
        self._known[entry["digest"]] = Admission(problem=entry["problem"], facts=entry["facts"])
        self.entries[entry["task"]] = entry

    def get(self, task: Task) -> Admission | None:
        """What is known of a task's content, whatever its name was."""
        found = self._known.get(digest(task))
        if found is not None and self.entries.get(task.name, {}).get("digest") != digest(task):
            self.put(task, found)
        return found

    def put(self, task: Task, found: Admission) -> None:
        """Keeps what was found out."""
        entry = {
            "task": task.name, "level": task.level, "family": task.family, "split": task.split, "digest": digest(task), "device": self._device,
            "limits": self._limits or {}, "category": category(found), "refusal": found.refusal, "marks": list(found.marks),
            **found.model_dump(mode="json"),
        }  # fmt: skip
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        self._take(entry)


def digest(task: Task) -> str:
    """Of all that facts depend on."""
    return hashlib.sha256(f"{task.dtype}\x1f{task.reference}".encode()).hexdigest()[:24]


def examined(
    judge: Any, tasks: Sequence[Task], path: Path, *, device: str = "", progress: Callable[[int], None] | None = None
) -> dict[str, Admission]:
    """What is known of tasks, by name; the sandbox is asked about those of which nothing is, and each answer is kept as it comes.

    Args:
        judge: has `examinations` and `limits` (dk_jax.rollout.judge.SandboxJudge).
        path: of the AdmissionFile, and `device` as its.
        progress: called with the number of tasks that were asked about.

    Raises:
        SandboxUnavailable: the same call goes on with what is missing.
    """
    file = AdmissionFile(path, device=device, limits=judge.limits)
    new = {digest(task): task for task in tasks if file.get(task) is None}

    def found(task: Task, admission: Admission) -> None:
        file.put(task, admission)
        if progress is not None:
            progress(1)

    if new:
        judge.examinations(list(new.values()), found)
    return {task.name: known for task in tasks if (known := file.get(task)) is not None}


def marks(path: Path) -> dict[str, list[str]]:
    """What is to be told beside the scores of tasks, by name: why one is not admitted to training, and its marks. Empty without a file.

    Raises:
        ValueError: a line of the file is damaged.
    """
    found = {}
    for entry in AdmissionFile(path).entries.values():
        said = [f"not admitted to training: {entry['refusal']}"] if entry["refusal"] else []
        if said or entry["marks"]:
            found[entry["task"]] = said + entry["marks"]
    return found


def admitted(tasks: TaskSets, judge: Any, path: Path) -> TaskSets:
    """The tasks without those from files that the sandbox refuses. Of several processes the first asks.

    Args:
        judge: see `examined`. path: of what was found out before; a resumed run so has the same tasks.

    Raises:
        ConfigError: no training or no held-out task is left.
    """
    need_both_splits(tasks)
    from_files = [task for task in (*tasks.train, *tasks.held_out) if task.spec is None]

    def ask() -> dict[str, Any]:
        return {name: one.model_dump(mode="json") for name, one in examined(judge, from_files, path).items()}

    found = {name: Admission.model_validate(one) for name, one in by_first(ask).items()}
    out = {name: one.refusal for name, one in found.items() if one.refusal}
    for name, reason in out.items():
        log.warning("task %s is left out, the sandbox refuses it: %s", name, reason)
    for name, one in found.items():
        if name not in out and one.marks:
            log.info("task %s: %s", name, "; ".join(one.marks))
    train, held_out = (tuple(task for task in part if task.name not in out) for part in (tasks.train, tasks.held_out))
    if not train or not held_out:
        name, reason = next(iter(out.items()))
        raise ConfigError(
            f"of {len(from_files)} task files the sandbox refuses {len(out)}, which leaves {len(train)} training and {len(held_out)} "
            f"held-out tasks; the first is {name}: {reason}"
        )
    return dataclasses.replace(tasks, train=train, held_out=held_out)
