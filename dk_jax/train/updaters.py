"""The updates that a recipe asks for: optimizer and loss of the cold start and of RL."""

from __future__ import annotations

import functools

import optax
from ml_collections import ConfigDict

from dk_jax.train.device_turns import Runner, at_once
from dk_jax.train.model import Model
from dk_jax.train.update import LossConfig, Updater, make_optimizer


def optimizer(c: ConfigDict, epochs: int = 1) -> optax.GradientTransformation:
    """The optimizer of `sft` or `rl`, whose schedules count `epochs` updates a step. Raises ValueError for an unknown kind."""
    return _made(
        lr=c.lr, warmup=c.warmup * epochs, steps=c.steps * epochs, weight_decay=c.weight_decay, clip_norm=c.clip_norm,
        decay=c.get("decay", True), kind=c.optimizer, only=tuple(c.get("only", ())),
    )  # fmt: skip


_made = functools.lru_cache(maxsize=16)(make_optimizer)  # the same numbers give the same functions, whose programs are then compiled once


def for_cold_start(cfg: ConfigDict, model: Model) -> Updater:
    """Imitation of the cold start's samples (`sft`)."""
    return Updater(model.static, optimizer(cfg.sft), LossConfig(kind="nll"), streams=cfg.learner.streams, mesh=model.mesh)


def for_rl(cfg: ConfigDict, model: Model, run: Runner = at_once) -> Updater:
    """Clipped policy gradient on all agents' tokens (`rl`); the schedules count its updates, `epochs` a step. `run`: see `Updater`."""
    c = cfg.rl
    loss = LossConfig(
        kind="policy", clip_low=c.clip_low, clip_high=c.clip_high, dual_clip=c.dual_clip, temperature=cfg.rollout.temperature
    )
    return Updater(model.static, optimizer(c, epochs=c.epochs), loss, streams=cfg.learner.streams, mesh=model.mesh, run=run)
