"""Generated kernels with the sandbox's verdicts on them: the cold start's corpus as a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from dk_jax.rollout.trajectory import Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgedKernel:
    """A generated kernel with the sandbox's verdict on it."""

    task: str
    source: str
    techniques: tuple[str, ...]
    intent: str
    verdict: Verdict


def save_kernels(path: Path, kernels: Sequence[JudgedKernel]) -> None:
    """One JSON line a kernel; complete or not at all."""
    partial = path.with_suffix(".part")
    with open(partial, "w", encoding="utf-8") as file:
        for kernel in kernels:
            file.write(json.dumps(dataclasses.asdict(kernel)) + "\n")
    partial.replace(path)


def load_kernels(path: Path) -> list[JudgedKernel]:
    """Reads what `save_kernels` wrote; a bad line is named."""
    out = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                data = json.loads(line)
                data["verdict"] = Verdict(**data["verdict"])
                data["techniques"] = tuple(data["techniques"])
                out.append(JudgedKernel(**data))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: not a judged kernel ({error}). Delete the file; it is made again.") from error
    return out
