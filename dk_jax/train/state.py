"""The state of a run and its checkpoints (Orbax).

Everything that a step depends on is here or follows from it: trainable parameters (with rl.staleness=1 those of the step before as well),
optimiser, step, and a small JSON record (seed, library step, counters, what the filters remember). Random numbers are derived from (seed,
phase, step, row), and the task cursor from the step, so they need no storage of their own. Frozen parameters are not saved: they come from
the base model again.

A checkpoint is written in the background and appears under its number when it is whole, with a manifest of its files (see
dk_jax.train.manifest). One that is damaged later, by a disk or a hand, is set aside on restoring, and the one before is used.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from dk_jax.train import manifest

log = logging.getLogger(__name__)
_WRITTEN_LAST = "_CHECKPOINT_METADATA"  # Orbax adds the time of the commit to it
_BEHIND = "behind"


class CheckpointError(ValueError):
    """None of a folder's checkpoints can be used."""


@dataclasses.dataclass(kw_only=True)
class TrainState:
    """Trainable parameters and optimiser state after `step` updates, with a JSON-able `record` of the rest.

    With rl.staleness=1 `behind` is the trainable parameters of the step before, which the next step's rollouts are made with; None
    before the first step, and where these are made with `trainable`.
    """

    step: int
    trainable: Any
    opt_state: Any
    record: dict[str, Any]
    behind: Any = None


class Checkpoints:
    """Numbered checkpoints of one phase in a folder; each is complete or absent. Use as a context manager, or `close` it.

    Args:
        directory: the folder; made if it is not there. Beside it stand `NAME_damaged` and `NAME_best`, where there is such.
        keep: of the newest checkpoints, how many stay.
    """

    def __init__(self, directory: Path, *, keep: int = 2):
        self.directory = Path(directory).absolute()
        self._writing: int | None = None
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                create=True,
                cleanup_tmp_directories=True,  # of a run that was killed while it wrote one
                enable_async_checkpointing=True,
                async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
            ),
        )

    @property
    def latest_step(self) -> int | None:
        """The newest checkpoint's step, whole or not."""
        return max(self.steps, default=None)

    @property
    def steps(self) -> list[int]:
        """Steps of all checkpoints that are there, ascending; one that is still being written is not yet."""
        return sorted(step for step in self._manager.all_steps() if (self.directory / str(step)).is_dir())

    def save(self, state: TrainState) -> None:
        """Starts writing the checkpoint of `state.step`, `behind` included where it has one; a step that is there already is left as it is.

        Returns when the arrays have been copied, so that they may be donated. It is committed after `wait`; the save after it, and
        `close`, wait too. What went wrong in the background is raised by whichever of them comes first.
        """
        self.wait()
        if state.step in self.steps:
            return
        parts = {"arrays": {"trainable": state.trainable, "opt_state": state.opt_state}}
        if state.behind is not None:
            parts[_BEHIND] = {"trainable": state.behind}
        if jax.default_backend() == "cpu":
            parts = jax.tree.map(lambda leaf: leaf.copy(), parts)  # the writer reads a CPU's arrays where they lie
        self._writing = state.step
        saved = {name: ocp.args.StandardSave(arrays) for name, arrays in parts.items()}
        self._manager.save(state.step, args=ocp.args.Composite(**saved, record=ocp.args.JsonSave(state.record)))

    def _seal(self) -> None:
        """Writes the manifest; called in the background when all files of a checkpoint are there, before it gets its name."""
        if jax.process_index() > 0:
            return
        final = self.directory / str(self._writing)
        partial = sorted(self.directory.glob(f"{self._writing}.orbax-checkpoint-tmp*"))
        manifest.write(final if final.is_dir() or not partial else partial[-1], changing=(_WRITTEN_LAST,))

    def wait(self) -> None:
        """Until the checkpoint in work, if there is one, is committed."""
        self._manager.wait_until_finished()
        self._writing = None

    def restore(self, like: TrainState, step: int | None = None, *, behind: bool = False) -> TrainState | None:
        """The newest whole state (or that of `step`) with the shapes and shardings of `like`; None if there is none.

        Newer ones that are damaged are moved to `NAME_damaged`, with a warning that names both.

        Args:
            behind: also what was saved as such, if there is any. Otherwise it stays where it is.

        Raises:
            CheckpointError: all that are there are damaged, or that of `step` is.
            ValueError: the folder holds a state of other shapes (another model config).
        """
        self.wait()
        step = self._newest_whole() if step is None else self._only(step)
        if step is None:
            return None
        wanted = {"arrays": {"trainable": like.trainable, "opt_state": like.opt_state}}
        if behind and (self.directory / str(step) / _BEHIND).is_dir():
            wanted[_BEHIND] = {"trainable": like.trainable}
        wanted = {name: ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, arrays)) for name, arrays in wanted.items()}
        try:
            found = self._manager.restore(step, args=ocp.args.Composite(**wanted, record=ocp.args.JsonRestore()))
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"{self.directory}/{step} does not fit this model: {error}. Use the config it was trained with, or another --workdir."
            ) from error
        return TrainState(
            step=step,
            trainable=found.arrays["trainable"],
            opt_state=found.arrays["opt_state"],
            record=dict(found.record),
            behind=found[_BEHIND]["trainable"] if _BEHIND in wanted else None,
        )

    def _only(self, step: int) -> int:
        if problem := manifest.problem(self.directory / str(step)):
            raise CheckpointError(f"checkpoint {self.directory / str(step)} is damaged: {problem}")
        return step

    def _newest_whole(self) -> int | None:
        """The newest step without damage; newer ones are set aside by one process, for all."""
        if jax.process_index() == 0:
            self._set_damaged_aside()
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"checked {self.directory}")
        self._manager.reload()
        return self.latest_step

    def _set_damaged_aside(self) -> None:
        sealed = any((self.directory / str(step) / manifest.NAME).exists() for step in self.steps)
        damaged: dict[int, str] = {}
        for step in reversed(self.steps):
            # Where none has a manifest, all were written before there were any.
            problem = manifest.problem(self.directory / str(step)) if sealed else ""
            if not problem:
                break
            damaged[step] = problem
        whole = [step for step in self.steps if step not in damaged]
        if damaged and not whole:
            best = sorted(self.best_directory.glob("[0-9]*"))
            advice = f", or copy {best[-1]} there to go on from the best one" if best else ""
            raise CheckpointError(
                f"all checkpoints in {self.directory} are damaged ({'; '.join(f'{s}: {why}' for s, why in damaged.items())}). "
                f"Restore them from a backup, or delete that folder to begin this phase again{advice}."
            )
        for step, problem in damaged.items():
            aside = self.directory.with_name(f"{self.directory.name}_damaged") / str(step)
            shutil.rmtree(aside, ignore_errors=True)
            aside.parent.mkdir(exist_ok=True)
            (self.directory / str(step)).rename(aside)
            log.warning(
                "checkpoint %s is damaged (%s): it was moved to %s, and %s is used instead",
                self.directory / str(step), problem, aside, self.directory / str(whole[-1]),
            )  # fmt: skip

    @property
    def best_directory(self) -> Path:
        return self.directory.with_name(f"{self.directory.name}_best")

    def keep_as_best(self, step: int) -> None:
        """Has the committed checkpoint of `step` stay in `NAME_best`, in the place of the one before; it can be restored from there
        as from this folder. Costs no space while both are there, where the file system has hard links."""
        source, final = self.directory / str(step), self.best_directory / str(step)
        if jax.process_index() > 0 or final.exists() or not source.exists():
            return
        self.best_directory.mkdir(exist_ok=True)
        partial = self.best_directory / f"part.{step}"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial, copy_function=manifest.link)
        partial.rename(final)
        for other in self.best_directory.iterdir():
            if other != final:
                shutil.rmtree(other)

    def close(self) -> None:
        """Waits for the checkpoint in work."""
        self.wait()
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
