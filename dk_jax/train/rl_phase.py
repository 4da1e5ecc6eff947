"""Joint RL of the three agents: the loop over steps, each of which is collected, learned from, and made final (DESIGN 3.3).

A step is final with its committed checkpoint. On resuming, what later steps left behind is undone: the library is rolled back, and
verdicts already received are taken from the journal.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from dk_jax.models.config import AGENTS
from dk_jax.rollout.digest import rollout_metrics, skill_usage
from dk_jax.rollout.episode import StepRollouts, collect
from dk_jax.rollout.trajectory import save_trajectories
from dk_jax.train import setup, updaters
from dk_jax.train.batch import microbatches
from dk_jax.train.credit import assign, nothing_to_learn
from dk_jax.train.mismatch import make_screen
from dk_jax.train.state import Checkpoints, TrainState

if TYPE_CHECKING:
    from dk_jax.train.run import Run

log = logging.getLogger(__name__)


class RLPhase:
    """The RL phase of one run: its updater and its checkpoints. Use as a context manager, or `close` it.

    Args:
        run: the run; its model, library, metrics and judge are used.
    """

    def __init__(self, run: Run):
        self.run, self.cfg = run, run.cfg
        self.updater = updaters.for_rl(run.cfg, run.model)
        self.checkpoints = Checkpoints(run.workdir / "checkpoints" / "rl")

    def close(self) -> None:
        self.checkpoints.close()

    def __enter__(self) -> RLPhase:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def newest(self, start: Any) -> TrainState:
        """The state of the newest checkpoint, or the one before the first step; the library is rolled back to it."""
        fresh = self.run.fresh_state(self.updater, start)
        fresh.record = {"seed": self.cfg.seed, "judged": 0}
        state = self.checkpoints.restore(fresh) or fresh
        self.run.library.rollback_to(state.step)
        return state

    def train(self, start: Any) -> TrainState:
        """From the cold start's parameters (or the newest checkpoint) to `rl.steps`."""
        c, run = self.cfg.rl, self.run
        state = self.newest(start)
        if state.step == 0:
            self.checkpoints.save(state)
        if state.step >= c.steps:
            return state
        judge, verifier = run.judge("rl"), run.verifier
        sampler = run.sampler(temperature=self.cfg.rollout.temperature)
        r = self.cfg.rollout
        turns = (r.tasks * r.turns + r.checked_tasks) * (r.selections + 1) * r.rollouts
        with tqdm(total=c.steps, desc="joint RL", unit="step", initial=state.step) as bar:
            while state.step < c.steps:
                started = time.monotonic()
                with tqdm(total=turns, desc=f"  step {state.step + 1}", unit="turn", leave=False) as inner:
                    rollouts = self.collect(state, sampler, judge, verifier, progress=inner.update)
                collected = time.monotonic()
                state, metrics = self.learn(state, rollouts)
                verifier.stage(run.library, rollouts.proposals, step=state.step)
                self._stage_usage(rollouts)
                run.library.commit(state.step)
                # Before the checkpoint: a step that it holds is not done again, so nothing of it may be missing.
                if c.keep_rollouts:
                    save_trajectories(run.workdir / "rollouts" / f"step_{state.step:05d}.jsonl", rollouts.trajectories)
                metrics |= {"collect_s": collected - started, "update_s": time.monotonic() - collected}
                counts = run.library.counts()
                metrics |= {f"skills_{k}": float(counts[k]) for k in ("proposed", "verified", "active")}
                run.metrics.scalars("rl", state.step, metrics)
                self._log_examples(state.step, rollouts)
                if state.step % c.checkpoint_every == 0 or state.step == c.steps:
                    self.checkpoints.save(state)
                    judge.journal.clear()
                bar.update(1)
                bar.set_postfix(
                    reward=f"{metrics['reward']:.2f}",
                    correct=f"{metrics['correct']:.0%}",
                    speedup=f"{metrics['speedup']:.2f}",
                    skills=int(counts["active"]),
                )
        return state

    def collect(self, state: TrainState, sampler, judge, verifier, progress=None) -> StepRollouts:
        """The rollouts of the step after `state`."""
        r, seed, run = self.cfg.rollout, self.cfg.seed, self.run
        tasks = setup.step_tasks(run.tasks.rl, state.step, count=r.tasks, seed=seed)
        checked = []
        if r.checked_tasks:
            checked = setup.step_tasks(run.tasks.checked, state.step, count=r.checked_tasks, seed=seed, key="rollout.checked_tasks")
        return collect(
            run.speaker(sampler, state.trainable),
            judge,
            verifier,
            tasks,
            run.library.active(),
            config=run.rollout_config,
            seed=seed,
            step=state.step,
            checked=checked,
            progress=progress,
        )

    def learn(self, state: TrainState, rollouts: StepRollouts) -> tuple[TrainState, dict[str, float]]:
        """The joint update on all three agents' tokens; with `rl.epochs` > 1 several from the same rollouts.

        Old log-probabilities stay those of the sampler, so that clipping bounds how far the epochs may go together; what the
        loss tells (ratio, clip_fraction, ...) is of the last one.
        """
        screen = make_screen(self.cfg, self.run.model, state.trainable)
        rows, metrics = assign(rollouts, config=setup.credit_config(self.cfg), seed=self.cfg.seed, step=state.step, screen=screen)
        metrics |= rollout_metrics(rollouts)
        trainable, opt_state = state.trainable, state.opt_state
        if rows:
            batches = list(microbatches(rows, size=self.cfg.rl.microbatch, step=self.cfg.rl.length_step))
            for _ in range(self.cfg.rl.epochs):
                trainable, opt_state, found = self.updater.update(trainable, self.run.model.frozen, opt_state, batches)
                metrics |= found
            for agent in AGENTS:
                metrics[f"sequences_{agent}"] = float(sum(row.agent == AGENTS.index(agent) for row in rows))
        else:
            log.warning("step %d: %s", state.step + 1, nothing_to_learn(metrics))
        record = dict(state.record)
        record["judged"] = int(record.get("judged", 0)) + sum(len(t.verdicts) for t in rollouts.of("policy"))
        return TrainState(step=state.step + 1, trainable=trainable, opt_state=opt_state, record=record), metrics

    def _stage_usage(self, rollouts: StepRollouts) -> None:
        library = self.run.library
        for name, use in skill_usage(rollouts, null=self.cfg.rollout.selections, floor=self.cfg.skills.fail_speedup):
            library.use(library.get(name).id, **use)

    def _log_examples(self, step: int, rollouts: StepRollouts) -> None:
        best = max(rollouts.of("policy"), key=lambda t: t.best.verdict.speedup if t.best else 0.0)
        if best.best is not None:
            text = f"{best.task}: {best.best.verdict.speedup:.2f}x\n\n```\n{best.best.source}\n```"
            self.run.metrics.text("rl/best_kernel", step, text)
