"""A folder of kernels in the place of the policy: what somebody else's system wrote, judged as ours is.

For a task named NAME the folder holds one of

    NAME.py                      one kernel (or .cu, .cpp): every sample is this one
    NAME/0.py, NAME/1.py ...     sample by sample
    NAME/0_0.py, NAME/0_1.py ... sample by sample and turn by turn

or the files that KernelBench's scripts write for tasks of its own: level_1_problem_12_sample_0_kernel.py. What is not there is no kernel and
is counted as such, with the file's absence as the reason: a hole in the folder never makes a score better.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from dk_jax.agents import policy
from dk_jax.agents.text import Style, TaskView
from dk_jax.rollout.trajectory import Trajectory, Turn

MISSING = "missing"
"""The `stop` of a turn for which there is no file."""
ENDINGS = (".py", ".cu", ".cpp", ".cc", ".cxx")
_SAMPLE = re.compile(r"(\d+)(?:_(\d+))?")
_THEIRS = re.compile(r"level_(\d+)_problem_(\d+)_sample_(\d+)_kernel")
_THEIR_TASK = re.compile(r"(?:level)?(\d+)[/_](\d+)_")


class FolderError(ValueError):
    """A folder from which no kernel can be read; the message says what is there instead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """The kernels of one task: by sample and then turn, or one for all samples."""

    samples: Mapping[int, Mapping[int, Path]] = dataclasses.field(default_factory=dict)
    every: Path | None = None

    def turns(self, sample: int) -> list[Path]:
        """Files of a sample's turns, from the first to the last before a gap."""
        if sample not in self.samples:
            return [self.every] if self.every is not None else []
        own, found = self.samples[sample], []
        while len(found) in own:
            found.append(own[len(found)])
        return found


class KernelFolder:
    """Speaks by handing in files; see the module's text. It has what episodes need of `dk_jax.rollout.speaker.Speaker`.

    Args:
        folder: holds the kernels.
        views: what the prompts say of each task, by name.
        style: of the messages.

    Raises:
        FolderError: the folder is not there, or holds a kernel for none of the tasks.
    """

    def __init__(self, folder: Path, views: Mapping[str, TaskView], *, style: Style):
        self.folder, self._views, self._style = Path(folder), views, style
        if not self.folder.is_dir():
            raise FolderError(f"{folder}: there is no such folder of kernels")
        theirs = _kernelbench_files(self.folder)
        self.written = {name: _written(self.folder, name, theirs) for name in views}
        if not any(w.samples or w.every for w in self.written.values()):
            there = ", ".join(sorted(p.name for p in self.folder.iterdir())[:5]) or "nothing"
            raise FolderError(
                f"{folder}: no kernel for any of {len(views)} tasks: name files such as {next(iter(views), 'TASK')}.py (there is {there})"
            )

    def samples(self, task: str) -> int:
        """How many samples of a task there are files for; 1 where one file is all samples'."""
        own = self.written[task]
        return max(own.samples, default=-1) + 1 or (1 if own.every is not None else 0)

    def fits(self, prompt: str, max_new: int) -> bool:
        """Nothing is read of a prompt."""
        return True

    def speak(
        self, trajectories: Sequence[Trajectory], prompts: Sequence[str], seeds: Sequence[int], *, max_new: int, keep: bool = False,
        fresh: bool = False,
    ) -> list[bool]:  # fmt: skip
        """Appends to each trajectory the file of its sample (`member`) and turn as a message. See Speaker.speak.

        Returns:
            For each whether there was one; of a sample without any file the first turn is an empty one whose `stop` is MISSING.

        Raises:
            FolderError: a file that is no text.
        """
        found = []
        for trajectory in trajectories:
            turn = len(trajectory.turns)
            files = self.written[trajectory.task].turns(trajectory.member)
            if turn < len(files):
                source = _text(files[turn])
                trajectory.turns.append(Turn(text=policy.format(source, self._views[trajectory.task], style=self._style), stop="eos"))
            elif turn == 0:
                error = f"{self.folder} holds no kernel for sample {trajectory.member} of this task"
                trajectory.turns.append(Turn(text="", stop=MISSING, error=error))
            found.append(turn < max(len(files), 1))
        return found


def _written(folder: Path, name: str, theirs: Mapping[tuple[int, int], Mapping[int, Path]]) -> Written:
    samples: dict[int, dict[int, Path]] = {}
    if (folder / name).is_dir():
        for path in sorted((folder / name).iterdir()):
            if path.suffix in ENDINGS and (match := _SAMPLE.fullmatch(path.stem)):
                samples.setdefault(int(match[1]), {})[int(match[2] or 0)] = path
    if (match := _THEIR_TASK.match(name)) is not None:
        for sample, path in theirs.get((int(match[1]), int(match[2])), {}).items():
            samples.setdefault(sample, {}).setdefault(0, path)
    every = next((path for ending in ENDINGS if (path := folder / f"{name}{ending}").is_file()), None)
    return Written(samples=samples, every=every)


def _kernelbench_files(folder: Path) -> dict[tuple[int, int], dict[int, Path]]:
    found: dict[tuple[int, int], dict[int, Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in ENDINGS and (match := _THEIRS.fullmatch(path.stem)):
            found.setdefault((int(match[1]), int(match[2])), {})[int(match[3])] = path
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FolderError(f"{path}: can't be read as UTF-8 text: {error}") from error
