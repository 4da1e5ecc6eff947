"""Parts of an RL step by themselves, for a look at what it does: rollouts without learning, learning from a file of rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dk_jax.rollout.episode import StepRollouts
from dk_jax.rollout.trajectory import load_trajectories, save_trajectories
from dk_jax.train import setup
from dk_jax.train.credit import assign
from dk_jax.train.rl_phase import RLPhase

if TYPE_CHECKING:
    from dk_jax.train.run import Run


def rollout_only(run: Run, path: Path) -> int:
    """Writes the trajectories of the next RL step, with advantages, without learning from them; returns their number."""
    with RLPhase(run) as phase:
        state = phase.newest(run.sft().trainable)
        rollouts = phase.collect(state, run.sampler(temperature=run.cfg.rollout.temperature), run.judge("rollout"), run.verifier)
        assign(rollouts, config=setup.credit_config(run.cfg), seed=run.cfg.seed, step=state.step)
    save_trajectories(path, rollouts.trajectories)
    return len(rollouts.trajectories)


def train_from(run: Run, path: Path) -> dict[str, float]:
    """One update from a file of trajectories, checkpointed as the next RL step. Their rewards stand as they were judged."""
    trajectories = load_trajectories(path)
    with RLPhase(run) as phase:
        state = phase.newest(run.sft().trainable)
        state, metrics = phase.learn(state, StepRollouts(trajectories=trajectories, proposals=[]))
        run.library.commit(state.step)
        run.metrics.scalars("rl", state.step, metrics)
        phase.checkpoints.save(state)
    return metrics
