"""The state of a run and its checkpoints (Orbax).

Everything that a step depends on is here or follows from it: trainable parameters, optimiser, step, and a small JSON record
(seed, library step, counters). Random numbers are derived from (seed, phase, step, row), and the task cursor from the step,
so they need no storage of their own. Frozen parameters are not saved: they come from the base model again.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


@dataclasses.dataclass(kw_only=True)
class TrainState:
    """Trainable parameters and optimiser state after `step` updates, with a JSON-able `record` of the rest."""

    step: int
    trainable: Any
    opt_state: Any
    record: dict[str, Any]


class Checkpoints:
    """Numbered checkpoints of one phase in a folder; each is complete or absent."""

    def __init__(self, directory: Path, *, keep: int = 2):
        self.directory = Path(directory).absolute()
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=False),
        )

    @property
    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, state: TrainState) -> None:
        """Writes the checkpoint of `state.step`; a step that is there already is left as it is."""
        if state.step in self._manager.all_steps():
            return
        self._manager.save(
            state.step,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardSave({"trainable": state.trainable, "opt_state": state.opt_state}),
                record=ocp.args.JsonSave(state.record),
            ),
        )
        self._manager.wait_until_finished()

    def restore(self, like: TrainState, step: int | None = None) -> TrainState | None:
        """The newest state (or that of `step`) with the shapes and shardings of `like`; None if there is none.

        Raises ValueError where the folder holds a state of other shapes (another model config).
        """
        step = self.latest_step if step is None else step
        if step is None:
            return None
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"trainable": like.trainable, "opt_state": like.opt_state})
        try:
            found = self._manager.restore(
                step,
                args=ocp.args.Composite(arrays=ocp.args.StandardRestore(target), record=ocp.args.JsonRestore()),
            )
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"{self.directory}/{step} does not fit this model: {error}. Use the config it was trained with, or another --workdir."
            ) from error
        return TrainState(
            step=step,
            trainable=found.arrays["trainable"],
            opt_state=found.arrays["opt_state"],
            record=dict(found.record),
        )

    def close(self) -> None:
        self._manager.close()
