"""Cold-start training: next-token loss on the imitated answers, over shuffled epochs, resumable at any checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dk_jax.rollout.trajectory import derive_seed
from dk_jax.train.batch import Row, microbatches
from dk_jax.train.state import Checkpoints, TrainState
from dk_jax.train.update import Updater


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Steps of `batch` sequences in microbatches of `microbatch`, their lengths rounded up to multiples of `length_step` (each
    length is compiled once); longer rows than `max_tokens` are left out and counted.
    """

    steps: int
    batch: int
    microbatch: int
    length_step: int
    max_tokens: int
    checkpoint_every: int


def batch_indices(step: int, *, lengths: Sequence[int], batch: int, seed: int) -> list[int]:
    """Rows of a step: batches of rows of like length, so that little is padded, in an endless sequence of shuffled epochs.

    An epoch is shuffled, cut into pools of 16 batches, each pool sorted by length and cut into batches, and the batches
    shuffled. What does not fill a batch is left to other epochs.
    """
    per_epoch = max(len(lengths) // batch, 1)
    epoch, offset = divmod(step, per_epoch)
    rng = np.random.default_rng(derive_seed(seed, "sft-epoch", epoch))
    order = rng.permutation(len(lengths))
    batches = []
    for start in range(0, len(order), 16 * batch):
        pool = sorted(order[start : start + 16 * batch], key=lambda i: (lengths[i], i))
        batches += [pool[at : at + batch] for at in range(0, len(pool), batch) if len(pool) - at >= min(batch, len(order))]
    return [int(i) for i in batches[int(rng.permutation(len(batches))[offset])]]


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
) -> TrainState:
    """Trains from `state` (or the newest checkpoint) to `config.steps` and returns the final state, which is checkpointed.

    The loss of a step is the mean over its imitated tokens.
    """
    kept = [row for row in rows if len(row.tokens) <= config.max_tokens and sum(row.loss) > 0]
    if not kept:
        raise ValueError(f"none of {len(rows)} samples fits sft.max_tokens={config.max_tokens}: raise it")
    state = checkpoints.restore(state) or state
    lengths = [len(row.tokens) for row in kept]
    while state.step < config.steps:
        picked = [kept[i] for i in batch_indices(state.step, lengths=lengths, batch=config.batch, seed=seed)]
        tokens = sum(sum(row.loss) for row in picked)
        weighted = [dataclasses.replace(row, weight=1.0 / tokens) for row in picked]
        trainable, opt_state, metrics = updater.update(
            state.trainable, frozen, state.opt_state, microbatches(weighted, size=config.microbatch, step=config.length_step)
        )
        state = TrainState(step=state.step + 1, trainable=trainable, opt_state=opt_state, record=state.record)
        report(state.step, metrics | {"dropped_rows": float(len(rows) - len(kept))})
        if state.step % config.checkpoint_every == 0 or state.step == config.steps:
            jax.block_until_ready(state.trainable)
            checkpoints.save(state)
    return state
