"""Cold-start training: next-token loss on the imitated answers, over shuffled epochs, resumable at any checkpoint.

With a validation split every checkpoint is measured on it, and the one with the lowest loss stays beside the newest: it is what the cold
start ends with.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from dk_jax.models.config import AGENTS
from dk_jax.sft.batches import batch_indices, seats, shared_indices
from dk_jax.train.batch import Row, microbatches
from dk_jax.train.state import Checkpoints, TrainState
from dk_jax.train.update import Updater

_BEST = "best_validation"  # in a state's record: step and loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Steps of `batch` sequences in microbatches of `microbatch`, or of about `microbatch_tokens` (see dk_jax.train.batch), their
    lengths rounded up to multiples of `length_step` (each length is compiled once); longer rows than `max_tokens` are left out and
    counted. `shares` divides the rows of a batch over the agents (see dk_jax.sft.batches.seats); empty, or 0 for all, takes rows as
    they come.
    """

    steps: int
    batch: int
    microbatch: int
    microbatch_tokens: int = 0
    length_step: int
    max_tokens: int
    checkpoint_every: int
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)


def fits(row: Row, max_tokens: int) -> bool:
    """Whether a row can be trained on: not too long, and something in it is imitated."""
    return len(row.tokens) <= max_tokens and sum(row.loss) > 0


def train(
    rows: Sequence[Row],
    updater: Updater,
    checkpoints: Checkpoints,
    state: TrainState,
    frozen: Any,
    *,
    config: SFTConfig,
    seed: int,
    report: Callable[[int, dict[str, float]], None],
    validate: Callable[[Any], dict[str, float]] | None = None,
) -> TrainState:
    """Trains from `state` (or the newest checkpoint) to `config.steps` and returns the final state, which is checkpointed.

    `validate`, given the parameters, tells `validation_loss` and what else it measures; it is asked at every checkpoint, what it says is
    reported with that step, and the checkpoint with the lowest `validation_loss` is kept as the best (see `best`).

    The loss of a step is the mean over its imitated tokens. Reported with it: `loss_AGENT`, the mean over the tokens of one
    agent, `tokens_AGENT` and `rows_AGENT`, for each agent that has rows in the step.

    Raises:
        ValueError: no row fits, or `shares` can't be met.
    """
    kept = [row for row in rows if fits(row, config.max_tokens)]
    if not kept:
        raise ValueError(f"none of {len(rows)} samples fits sft.max_tokens={config.max_tokens}: raise it")
    state = checkpoints.restore(state) or state
    _keep_best(checkpoints, state)
    lengths, agents = [len(row.tokens) for row in kept], [AGENTS[row.agent] for row in kept]
    counts = seats(config.shares, config.batch)
    while state.step < config.steps:
        if counts:
            indices = shared_indices(state.step, lengths=lengths, agents=agents, counts=counts, seed=seed)
        else:
            indices = batch_indices(state.step, lengths=lengths, batch=config.batch, seed=seed)
        picked = [kept[i] for i in indices]
        tokens = sum(sum(row.loss) for row in picked)
        weighted = [dataclasses.replace(row, weight=1.0 / tokens) for row in picked]
        batches = microbatches(weighted, size=config.microbatch, step=config.length_step, tokens=config.microbatch_tokens)
        trainable, opt_state, metrics = updater.update(state.trainable, frozen, state.opt_state, batches)
        state = TrainState(step=state.step + 1, trainable=trainable, opt_state=opt_state, record=state.record)
        metrics |= {f"rows_{agent}": float(n) for agent, n in Counter(agents[i] for i in indices).items()}
        metrics |= {"dropped_rows": float(len(rows) - len(kept))}
        final = state.step % config.checkpoint_every == 0 or state.step == config.steps
        if final and validate is not None:
            metrics |= validate(state.trainable)
            if metrics["validation_loss"] < state.record.get(_BEST, {}).get("loss", math.inf):
                state.record = state.record | {_BEST: {"step": state.step, "loss": metrics["validation_loss"]}}
        report(state.step, metrics)
        if final:
            jax.block_until_ready(state.trainable)
            checkpoints.save(state)
            _keep_best(checkpoints, state)
    return state


def best(checkpoints: Checkpoints, state: TrainState) -> TrainState:
    """What the cold start ends with: the state of the lowest validation loss, or the last one where none was measured.

    Args:
        checkpoints: those of the cold start; the best one lies beside them.
        state: the last one.

    Raises:
        CheckpointError: the best checkpoint is damaged or gone.
    """
    step = state.record.get(_BEST, {}).get("step", state.step)
    if step == state.step:
        return state
    _keep_best(checkpoints, state)
    with Checkpoints(checkpoints.best_directory) as kept:
        found = kept.restore(state, step)
    return TrainState(step=state.step, trainable=found.trainable, opt_state=found.opt_state, record=state.record)


def _keep_best(checkpoints: Checkpoints, state: TrainState) -> None:
    """Has the best checkpoint stay, also where the run was killed between its being written and this."""
    if _BEST in state.record:
        checkpoints.wait()
        checkpoints.keep_as_best(state.record[_BEST]["step"])
