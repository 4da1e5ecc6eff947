"""Tasks that were read from files are shown to the sandbox before a run uses them; what it refuses is left out, once and for all.

A file may parse and still not run, or be satisfied by zeros. Its candidates would all count as wrong, or all as right.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from dk_jax.tasks.task import Task
from dk_jax.train.setup import ConfigError, TaskSets

log = logging.getLogger(__name__)


def admitted(tasks: TaskSets, judge: Any, path: Path) -> TaskSets:
    """The tasks without those from files that the sandbox refuses.

    Args:
        judge: has `refusals` (dk_jax.rollout.judge.SandboxJudge).
        path: JSON file of what was found out before, by content of the task; a resumed run so has the same tasks.

    Raises:
        ConfigError: no training or no held-out task is left.
    """
    known: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    from_files = [task for task in (*tasks.train, *tasks.held_out) if task.spec is None]
    new = [task for task in from_files if _digest(task) not in known]
    if new:
        refused = judge.refusals(new)
        known |= {_digest(task): refused.get(task.name, "") for task in new}
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(known, indent=1), encoding="utf-8")
        partial.replace(path)
    out = {task.name: known[_digest(task)] for task in from_files if known[_digest(task)]}
    for name, reason in out.items():
        log.warning("task %s is left out, the sandbox refuses it: %s", name, reason)
    train, held_out = (tuple(task for task in part if task.name not in out) for part in (tasks.train, tasks.held_out))
    if not train or not held_out:
        name, reason = next(iter(out.items()))
        raise ConfigError(
            f"of {len(from_files)} task files the sandbox refuses {len(out)}, which leaves {len(train)} training and {len(held_out)} "
            f"held-out tasks; the first is {name}: {reason}"
        )
    return dataclasses.replace(tasks, train=train, held_out=held_out)


def _digest(task: Task) -> str:
    return hashlib.sha256(f"{task.name}\x1f{task.dtype}\x1f{task.reference}".encode()).hexdigest()
