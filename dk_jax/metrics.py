"""Scalars and text of a run: TensorBoard (tensorboardX) and one JSON line a step, both append-only.

After a restart, lines and events of steps later than the checkpoint are written again under the same step; readers keep the
last line of a step (`read_scalars` does).
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any


class Metrics:
    """Writes scalars of a phase ("corpus", "sft", "rl", "eval") by step."""

    def __init__(self, workdir: Path):
        # Imported here: it takes seconds, and reading scalars does not need it.
        from tensorboardX import SummaryWriter

        self.directory = Path(workdir) / "tensorboard"
        self._writer = SummaryWriter(logdir=str(self.directory), flush_secs=10)
        path = Path(workdir) / "metrics.jsonl"
        self._file = open(path, "a", encoding="utf-8")
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            self._file.write("\n")  # a crash cut the last line: the next one must not be glued to it

    def scalars(self, phase: str, step: int, values: dict[str, float]) -> None:
        """Records finite numbers; one that is not finite is an error with its name."""
        for name, value in values.items():
            if not math.isfinite(value):
                raise FloatingPointError(f"metric {phase}/{name} is {value} at step {step}")
            self._writer.add_scalar(f"{phase}/{name}", value, step)
        self._file.write(json.dumps({"phase": phase, "step": step, "time": round(time.time(), 3), **values}) + "\n")
        self._file.flush()

    def text(self, tag: str, step: int, text: str) -> None:
        self._writer.add_text(tag, text, step)

    def close(self) -> None:
        self._writer.close()
        self._file.close()


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
