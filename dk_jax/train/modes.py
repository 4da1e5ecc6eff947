"""Parts of an RL step by themselves, for a look at what it does: rollouts without learning, learning from a file of rollouts, and learning
one task by heart."""

from __future__ import annotations

from collections.abc import Callable
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
        sampler, judge = run.sampler(temperature=run.cfg.rollout.temperature), run.judge("rollout")
        rollouts = phase.collect(phase.behaviour(state), state.step, sampler, judge, run.verifier)
        assign(rollouts, config=setup.credit_config(run.cfg), seed=run.cfg.seed, step=state.step)
    save_trajectories(path, rollouts.trajectories)
    return len(rollouts.trajectories)


def train_from(run: Run, path: Path) -> dict[str, float]:
    """One update from a file of trajectories, checkpointed as the next RL step. Their rewards stand as they were judged.

    From the rollouts of that very step it is the update that the step itself would have made, bit for bit; the skills that they proposed
    do not enter the library.
    """
    trajectories = load_trajectories(path)
    with RLPhase(run) as phase:
        state = phase.newest(run.sft().trainable)
        state, metrics = phase.learn(state, StepRollouts(trajectories=trajectories, proposals=[]), phase.behaviour(state))
        run.library.commit(state.step)
        run.metrics.scalars("rl", state.step, metrics)
        run.metrics.flush()
        phase.checkpoints.save(state)
    return metrics


def overfit_one(run: Run, task_name: str = "", *, say: Callable[[str], None] = print) -> list[dict[str, float]]:
    """RL on one task alone for `rl.steps` steps from the cold start, to see whether its reward rises; says a line a step. On-policy, whatever
    rl.staleness says.

    Nothing of the run changes: no checkpoint, no skill. Rollouts go to rollouts/overfit_one_STEP.jsonl, scalars to the phase
    "overfit_one"; both are those of the last time.

    Args:
        task_name: one of the tasks that RL trains on; the first of its first step by default.
        say: takes the lines.

    Returns:
        The metrics of each step.

    Raises:
        ConfigError: there is no such task.
    """
    tasks = {task.name: task for task in run.tasks.rl}
    name = task_name or setup.step_tasks(run.tasks.rl, 0, count=run.cfg.rollout.tasks, seed=run.cfg.seed)[0].name
    if name not in tasks:
        raise setup.ConfigError(f"--task={name}: RL trains on no task of that name. Some of the {len(tasks)}: {', '.join(sorted(tasks)[:8])}")
    start = run.sft().trainable
    run.metrics.rewind("overfit_one", -1)
    done, steps = [], run.cfg.rl.steps
    with RLPhase(run) as phase:
        state, judge = run.fresh_state(phase.updater, start), run.judge("overfit_one")
        sampler = run.sampler(temperature=run.cfg.rollout.temperature)
        say(f"{steps} steps on task {name}")
        while state.step < steps:
            rollouts = phase.collect(phase.present(state), state.step, sampler, judge, run.verifier, tasks=[tasks[name]])
            state, metrics = phase.learn(state, rollouts, phase.present(state))
            save_trajectories(run.workdir / "rollouts" / f"overfit_one_{state.step:05d}.jsonl", rollouts.trajectories)
            run.metrics.scalars("overfit_one", state.step, metrics)
            done.append(metrics)
            say(
                f"step {state.step:>{len(str(steps))}}/{steps}  reward {metrics['reward']:.3f}  correct {metrics['correct']:4.0%}  "
                f"speedup {metrics['speedup']:.2f}  loss {metrics.get('loss', 0.0):+.4f}  grad norm {metrics.get('grad_norm', 0.0):.3f}  "
                f"entropy {metrics.get('entropy', 0.0):.3f}"
            )
    judge.journal.clear()
    return done
