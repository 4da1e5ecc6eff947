"""Scalars and text of a run: TensorBoard (tensorboardX) and one JSON line a step.

Each step is there once: a phase that goes on from a checkpoint first forgets what later steps have written (`Metrics.rewind`). Where
that was not done, readers keep the last line of a step (`read_scalars` does).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dk_jax.metrics_events import EventFile, drop_events


def is_clocked(name: str) -> bool:
    """Whether a scalar of this name tells of the clock: such are never the same twice, all others are for equal verdicts."""
    return name == "time" or name.endswith("_s") or name.startswith("share_")


class Metrics:
    """Writes scalars of a phase ("corpus", "sft", "rl", "eval") by step."""

    def __init__(self, workdir: Path):
        self.directory = Path(workdir) / "tensorboard"
        self._path = Path(workdir) / "metrics.jsonl"
        self._open()

    def _open(self) -> None:
        self._events = EventFile(self.directory)
        self._file = open(self._path, "a", encoding="utf-8")
        if self._path.stat().st_size and not self._path.read_bytes().endswith(b"\n"):
            self._file.write("\n")  # a crash cut the last line: the next one must not be glued to it

    def scalars(self, phase: str, step: int, values: dict[str, float]) -> None:
        """Records finite numbers; one that is not finite is an error with its name."""
        for name, value in values.items():
            if not math.isfinite(value):
                raise FloatingPointError(f"metric {phase}/{name} is {value} at step {step}")
            self._events.scalar(f"{phase}/{name}", value, step)
        self._file.write(json.dumps({"phase": phase, "step": step, "time": round(time.time(), 3), **values}) + "\n")
        self.flush()

    def text(self, tag: str, step: int, text: str) -> None:
        self._events.text(tag, text, step)

    def flush(self) -> None:
        """Has all of it on disk: before the checkpoint after which these steps are not done again."""
        self._events.flush()
        self._file.flush()

    def rewind(self, phase: str, step: int) -> None:
        """Forgets what later steps of the phase have written: they are done again, from the checkpoint of `step`."""
        self._forget(phase, lambda at: at > step)

    def forget(self, phase: str, step: int) -> None:
        """Forgets what that one step of the phase has written."""
        self._forget(phase, lambda at: at == step)

    def _forget(self, phase: str, gone: Callable[[int], bool]) -> None:
        self.close()
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if not _is_of(line, phase, gone)]
        if len(kept) < len(lines):
            partial = self._path.with_suffix(".part")
            partial.write_text("".join(kept), encoding="utf-8")
            partial.replace(self._path)
        drop_events(self.directory, f"{phase}/", gone)
        self._open()

    def close(self) -> None:
        self._events.close()
        self._file.close()


def _is_of(line: str, phase: str, gone: Callable[[int], bool]) -> bool:
    try:
        entry = json.loads(line)
    except ValueError:
        return not line.endswith("\n")  # cut short by a crash
    return entry.get("phase") == phase and gone(entry["step"])


def read_scalars(path: Path, phase: str) -> list[dict[str, Any]]:
    """Lines of a phase in step order, the last one of each step; a line cut short by a crash is skipped."""
    found: dict[int, dict[str, Any]] = {}
    if not Path(path).exists():
        return []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry.get("phase") == phase:
            found[entry["step"]] = entry
    return [found[step] for step in sorted(found)]
