"""The updates that a recipe asks for: optimizer and loss of the cold start and of RL."""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from dk_jax.train.update import LossConfig, Updater, make_optimizer


def for_cold_start(cfg: ConfigDict, static: Any) -> Updater:
    """Imitation of the cold start's samples (`sft`).

    Args:
      static: of the model, see `setup.Model`.
    """
    c = cfg.sft
    optimizer = make_optimizer(
        lr=c.lr, warmup=c.warmup, steps=c.steps, weight_decay=c.weight_decay, clip_norm=c.clip_norm, decay=True, kind=c.optimizer
    )
    return Updater(static, optimizer, LossConfig(kind="nll"), streams=cfg.learner.streams)


def for_rl(cfg: ConfigDict, static: Any) -> Updater:
    """Clipped policy gradient on all agents' tokens (`rl`); the schedules count its updates, `epochs` a step.

    Args:
      static: of the model, see `setup.Model`.
    """
    c = cfg.rl
    optimizer = make_optimizer(
        lr=c.lr, warmup=c.warmup * c.epochs, steps=c.steps * c.epochs, weight_decay=c.weight_decay, clip_norm=c.clip_norm,
        decay=c.decay, kind=c.optimizer, only=c.only,
    )  # fmt: skip
    loss = LossConfig(
        kind="policy", clip_low=c.clip_low, clip_high=c.clip_high, dual_clip=c.dual_clip, temperature=cfg.rollout.temperature
    )
    return Updater(static, optimizer, loss, streams=cfg.learner.streams)
