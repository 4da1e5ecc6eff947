"""Mismatch rejection: what the trainer holds of the sampled tokens, under the parameters that sampled them, before the update.

Sampler and trainer compute the same log-probs by different programs; where they differ, by rounding or by a fault, a trajectory was
drawn from another policy than the one whose gradient is taken. One pass without a gradient scores the trajectories that an update is
about to learn from; dk_jax.rl.filters.mismatch_rejection decides. Switched off (rl.mismatch_low, _high and _veto all 0) it costs
nothing, and the update's `ratio` and `kl` tell the mean gap (with rl.staleness=1 together with what an update has changed since).

Metrics, of each AGENT with trajectories:

    mismatch_gap_AGENT, mismatch_gap_max_AGENT     |log p_train - log p_sampler| of a token in nats, mean and largest
    mismatch_ratio_p01_AGENT, _p50_, _p99_         quantiles over trajectories of the geometric mean of p_train / p_sampler
    mismatch_rejected_AGENT, mismatch_vetoed_AGENT shares of the trajectories: rejected in all, and by one token
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from dk_jax.models.config import AGENTS
from dk_jax.models.log_probs import token_log_probs
from dk_jax.models.lora import combine
from dk_jax.models.sharding import shard_batch
from dk_jax.rl.filters import mismatch_rejection
from dk_jax.rollout.trajectory import Trajectory
from dk_jax.train.batch import Row, bucket, microbatches
from dk_jax.train.credit import Screen, Screened
from dk_jax.train.device_turns import Runner, at_once
from dk_jax.train.model import Model

_rejection = jax.jit(mismatch_rejection, static_argnames=("low", "high", "token_veto"))


def make_screen(cfg: ConfigDict, model: Model, trainable: Any, run: Runner = at_once) -> Screen | None:
    """The second look that `credit.assign` takes, by the recipe's rl.mismatch_*; None where they are all 0.

    Args:
        cfg: the recipe.
        model: static part, frozen parameters and mesh.
        trainable: the parameters that sampled; with rl.staleness=1 not those that learn.
        run: how each program is run; `DeviceTurns.learn` where another thread uses the devices too.
    """
    c = cfg.rl
    if not (c.mismatch_low or c.mismatch_high or c.mismatch_veto):
        return None

    def screen(trajectories: Sequence[Trajectory]) -> Screened:
        train = score(
            model, trainable, trajectories, temperature=cfg.rollout.temperature, microbatch=c.microbatch, length_step=c.length_step,
            microbatch_tokens=c.microbatch_tokens, run=run,
        )  # fmt: skip
        return judge(trajectories, train, low=c.mismatch_low, high=c.mismatch_high or math.inf, veto=c.mismatch_veto)

    return screen


def score(
    model: Model, trainable: Any, trajectories: Sequence[Trajectory], *, temperature: float, microbatch: int, length_step: int,
    microbatch_tokens: int = 0, run: Runner = at_once,
) -> list[np.ndarray]:  # fmt: skip
    """For each trajectory the log-probs f32[T] of its tokens under the trainer, 0 where they were not sampled.

    The microbatches have the update's shapes, so the pass compiles as often as the update does.

    Raises:
        FloatingPointError: a log-prob that is not finite.
    """
    sequences = [(i, where) for i, t in enumerate(trajectories) for where in t.sequences]
    rows = []
    for number, (i, where) in enumerate(sequences, 1):
        t, n = trajectories[i], where.stop - where.start
        # The weight is the sequence's number: batches may come in any order, and rows that only fill them up have weight 0.
        rows.append(
            Row(
                tokens=t.tokens[where], loss=[float(turn >= 0) for turn in t.turn_index[where]], advantage=[0.0] * n,
                old_logp=[0.0] * n, agent=AGENTS.index(t.agent), weight=float(number),
            )
        )  # fmt: skip
    out = [np.zeros(len(t.tokens), np.float32) for t in trajectories]
    whole = NamedSharding(model.mesh, PartitionSpec())
    with jax.set_mesh(model.mesh) if model.mesh.size > 1 else nullcontext():
        for batch in microbatches(rows, size=microbatch, step=length_step, tokens=microbatch_tokens):
            placed = shard_batch(model.mesh, {name: batch[name] for name in ("tokens", "lengths", "agents")})
            scored = np.asarray(run(_score, model.static, temperature, whole, trainable, model.frozen, placed))
            for b, number in enumerate(batch["weight"]):
                if number:
                    i, where = sequences[int(number) - 1]
                    n = where.stop - where.start
                    out[i][where.start + 1 : where.stop] = np.where(batch["mask"][b, : n - 1] > 0, scored[b, : n - 1], 0.0)
    for t, log_probs in zip(trajectories, out, strict=True):
        if not np.isfinite(log_probs).all():
            raise FloatingPointError(
                f"the trainer's log-probs of a {t.agent} trajectory of task {t.task!r} are not finite: the parameters are broken. "
                "Start again from an earlier checkpoint with a lower learning rate"
            )
    return out


def judge(trajectories: Sequence[Trajectory], train: Sequence[np.ndarray], *, low: float, high: float, veto: float) -> Screened:
    """Which trajectories stay, and how far trainer and sampler are apart.

    Args:
        train: of `score`.
        low, high, veto: as of `mismatch_rejection`.
    """
    size = (bucket(len(trajectories), 8), bucket(max(len(t.tokens) for t in trajectories)))
    sampled, ours, theirs = np.zeros(size, bool), np.zeros(size, np.float32), np.zeros(size, np.float32)
    for i, (t, log_probs) in enumerate(zip(trajectories, train, strict=True)):
        n = len(t.tokens)
        sampled[i, :n], ours[i, :n], theirs[i, :n] = np.array(t.turn_index) >= 0, log_probs, t.logp_sample
    found = _rejection(ours, theirs, sampled, low=low, high=high, token_veto=veto)
    keep, vetoed, ratio = (np.asarray(a)[: len(trajectories)] for a in (found.keep, found.vetoed, found.mean_ratio))
    gaps = np.abs(ours - theirs)
    metrics = {}
    for agent in AGENTS:
        own = np.flatnonzero([t.agent == agent for t in trajectories])
        if not len(own) or not sampled[own].any():
            continue
        gap = gaps[own][sampled[own]]
        metrics |= {f"mismatch_gap_{agent}": float(gap.mean()), f"mismatch_gap_max_{agent}": float(gap.max())}
        for name, q in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
            metrics[f"mismatch_ratio_{name}_{agent}"] = float(np.quantile(ratio[own], q))
        metrics |= {f"mismatch_rejected_{agent}": float((~keep[own]).mean()), f"mismatch_vetoed_{agent}": float(vetoed[own].mean())}
    return Screened(keep=keep.tolist(), vetoed=vetoed.tolist(), metrics=metrics)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _score(static, temperature: float, whole: NamedSharding, trainable, frozen, batch) -> jax.Array:
    params = combine(trainable, frozen)
    scored = token_log_probs(static, params, batch["tokens"], batch["lengths"], batch["agents"], temperature=temperature)
    return jax.lax.with_sharding_constraint(scored.log_probs, whole)  # every process reads all of them
