"""Joint RL of the three agents: the loop over steps, each of which is collected, learned from, and made final (DESIGN 3.3).

With rl.staleness=1 the next step is collected while one is learned from (dk_jax.train.overlap).

A step is final with its committed checkpoint, which is written while the next step's rollouts are made. On resuming, what later steps
left behind is undone: the library is rolled back, their metrics are forgotten, and verdicts already received are taken from the journal.
That keeps those since the second newest checkpoint, so that it takes the newest one's place where that is damaged.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from dk_jax.rollout.digest import rollout_metrics, skill_usage
from dk_jax.rollout.episode import StepRollouts, collect
from dk_jax.rollout.trajectory import save_trajectories
from dk_jax.skills.lifecycle import Lifecycle
from dk_jax.skills.retrieval import SkillIndex
from dk_jax.tasks.task import Task
from dk_jax.train import setup, updaters
from dk_jax.train.agent_metrics import agent_metrics
from dk_jax.train.bad_batch import check_finite, largest_norm, remembered, save_bad_batch
from dk_jax.train.batch import microbatches
from dk_jax.train.clock import StepClock, TimedJudge, TimedSampler
from dk_jax.train.credit import assign, nothing_to_learn
from dk_jax.train.device_turns import DeviceTurns, TurnSampler, at_once
from dk_jax.train.mismatch import make_screen
from dk_jax.train.overlap import Behaviour, OneStepAhead, OnPolicy, warn_of_shared_clock
from dk_jax.train.state import Checkpoints, TrainState

if TYPE_CHECKING:
    from dk_jax.train.run import Run

log = logging.getLogger(__name__)
REPORT_PAUSE_S = 180.0
"""Between reports while a phase goes on: making one takes seconds."""
BEST_WINDOW = 5
"""Steps over whose mean `rl.keep_best` is compared: single ones are mostly luck with their tasks."""


class RLPhase:
    """The RL phase of one run: its updater and its checkpoints. Use as a context manager, or `close` it.

    Args:
        run: the run; its model, library, metrics and judge are used.
    """

    def __init__(self, run: Run):
        self.run, self.cfg = run, run.cfg
        self.ahead = bool(run.cfg.rl.staleness)
        self.clock = StepClock()
        self.turns = DeviceTurns(self.clock)
        self._run_program = self.turns.learn if self.ahead else at_once
        self.updater = updaters.for_rl(run.cfg, run.model, self._run_program)
        self.checkpoints = Checkpoints(run.checkpoints_folder / "rl", keep=run.cfg.rl.keep_checkpoints)
        self._unsettled: TrainState | None = None
        rules = setup.lifecycle_rules(run.cfg)
        self.lifecycle = Lifecycle(rules) if rules else None
        self._index = SkillIndex()  # over the skills of the step before

    def close(self) -> None:
        self.checkpoints.close()

    def __enter__(self) -> RLPhase:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def newest(self, start: Any) -> TrainState:
        """The state of the newest whole checkpoint, or the one before the first step; what later steps left behind is undone."""
        fresh = self.run.fresh_state(self.updater, start)
        fresh.record = {"seed": self.cfg.seed, "judged": 0}
        state = self.checkpoints.restore(fresh, behind=self.ahead) or fresh
        self.run.library.rollback_to(state.step)
        self.run.metrics.rewind("rl", state.step)
        return state

    def train(self, start: Any, over: Callable[[int], bool] = lambda step: False) -> TrainState:
        """From the cold start's parameters (or the newest checkpoint) to `rl.steps`, or to the first step after which `over` says so, asked
        with its number when the step's metrics are there."""
        c, run, r = self.cfg.rl, self.run, self.cfg.rollout
        known = self.checkpoints.latest_step
        state = self.newest(start)
        if state.step == 0:
            self.checkpoints.save(state)
        judge = run.judge("rl")
        self._tell_lost(state.step, known, judge.journal)
        self._unsettled = state
        turns = (r.tasks * r.turns + r.checked_tasks) * (r.selections + 1) * r.rollouts
        with self._source(judge, turns) as source, tqdm(total=c.steps, desc="joint RL", unit="step", initial=state.step) as bar:
            self.clock.read()
            ends = state.step >= c.steps
            while not ends:
                rollouts, behaviour = source.next(state)
                state.behind = None  # it is in a checkpoint, or not needed for one
                self.clock.count("episodes", len(rollouts.of("policy")))
                self._settle(judge.journal)
                with self.clock.during("update"):
                    state, metrics = self.learn(state, rollouts, behaviour)
                metrics |= self._make_final(state, rollouts)
                metrics |= self.clock.read()
                run.metrics.scalars("rl", state.step, metrics)
                self._log_examples(state.step, rollouts)
                ends = state.step == c.steps or over(state.step)
                if state.step % c.checkpoint_every == 0 or ends:
                    run.metrics.flush()
                    state.record = self._with_best(state)
                    self.checkpoints.save(state)
                    self._unsettled = state
                    run.report_so_far(REPORT_PAUSE_S)
                bar.update(1)
                bar.set_postfix(
                    reward=f"{metrics['reward']:.2f}",
                    correct=f"{metrics['correct']:.0%}",
                    speedup=f"{metrics['speedup']:.2f}",
                    skills=int(metrics["skills_active"]),
                )
        self._settle(judge.journal)
        return state

    def _source(self, judge: Any, turns: int) -> OnPolicy | OneStepAhead:
        """Where the steps' rollouts come from, by rl.staleness; each has so many `turns`, at most."""
        run, timed = self.run, TimedJudge(judge, self.clock)
        sampler: Any = TimedSampler(run.sampler(temperature=self.cfg.rollout.temperature), self.clock)
        if self.ahead:
            warn_of_shared_clock(self.cfg, run.model.mesh)
            sampler = TurnSampler(sampler, self.turns)

        def make(behaviour: Behaviour, step: int) -> StepRollouts:
            with tqdm(total=turns, desc=f"  step {step + 1}", unit="turn", leave=False) as bar, self.clock.during("collect"):
                return self.collect(behaviour, step, sampler, timed, run.verifier, progress=bar.update)

        def cancel() -> None:
            self.turns.cancel()
            judge.abort()

        if not self.ahead:
            return OnPolicy(make, self.behaviour)
        return OneStepAhead(make, self.behaviour, self.present, steps=self.cfg.rl.steps, cancel=cancel)

    def behaviour(self, state: TrainState) -> Behaviour:
        """What the rollouts of the step after `state` are made with: the parameters and library of that state, or with rl.staleness=1
        of the one before, if it knows that."""
        if not self.ahead or state.behind is None:
            return self.present(state)
        library, step = self.run.library, state.step - 1
        return Behaviour(step=step, trainable=state.behind, active=library.at_step(min(step, library.step)).active())

    def present(self, state: TrainState) -> Behaviour:
        """The parameters of that state, and the library as committed."""
        return Behaviour(step=state.step, trainable=state.trainable, active=self.run.library.active())

    def _make_final(self, state: TrainState, rollouts: StepRollouts) -> dict[str, float]:
        """All of the step but its checkpoint: a step that it holds is not done again, so nothing of it may be missing."""
        run = self.run
        overtaken = run.verifier.stage(run.library, rollouts.proposals, step=state.step)
        self._stage_usage(rollouts)
        for change in self.lifecycle.review(run.library, state.step) if self.lifecycle else ():
            log.info("step %d: skill %s is %s: %s", state.step, change.name, change.status, change.reason)
        run.library.commit(state.step)
        if self.cfg.rl.keep_rollouts:
            save_trajectories(run.workdir / "rollouts" / f"step_{state.step:05d}.jsonl", rollouts.trajectories)
        counts = run.library.counts()
        named = ("proposed", "verified", "active", *(("dormant", "retired") if self.lifecycle else ()))
        return {f"skills_{k}": float(counts[k]) for k in named} | {"proposals_overtaken": float(overtaken)}

    def _settle(self, journal: Any) -> None:
        """Waits for the checkpoint in work, and lets go of what it makes needless: verdicts that no whole checkpoint asks for again,
        and the best checkpoint so far if it is better."""
        state, self._unsettled = self._unsettled, None
        if state is None:
            return
        self.checkpoints.wait()
        if state.record.get("best", {}).get("step") == state.step:
            self.checkpoints.keep_as_best(state.step)
        oldest = self.checkpoints.steps[-2:][0]
        journal.forget(lambda key: _step_of(key) < oldest)

    def _tell_lost(self, step: int, known: int | None, journal: Any) -> None:
        """Warns where a damaged checkpoint's step is done again and its verdicts are not there any more."""
        if known is not None and known > step and not any(_step_of(key) == step for key in journal.keys()):
            log.warning(
                "RL goes on from step %d, where it had come to step %d: the verdicts in between are not in the journal any more. These steps "
                "are judged again; their timings, and what follows from them, will differ",
                step, known,
            )  # fmt: skip

    def _with_best(self, state: TrainState) -> dict[str, Any]:
        """The record, with this step in it as the best one if it is: by the mean of `rl.keep_best` over the last steps. As long as there
        are fewer, the newest one is."""
        record, name = dict(state.record), self.cfg.rl.keep_best
        if not name:
            return record
        recent, best = record["recent"]["values"], record.get("best")
        value = sum(recent) / len(recent)
        if best is None or best["metric"] != name or best.get("steps", 0) < len(recent) or value >= best["value"]:
            record["best"] = {"metric": name, "step": state.step, "steps": len(recent), "value": value}
        return record

    def collect(
        self, behaviour: Behaviour, step: int, sampler, judge, verifier, progress=None, *, tasks: Sequence[Task] | None = None
    ) -> StepRollouts:
        """The rollouts of the step that follows `step` others; of `tasks` alone, where they are given, without skills. Neither the library's
        file nor the metrics are touched, so that another thread may do it."""
        r, seed, run = self.cfg.rollout, self.cfg.seed, self.run
        config, active, checked = run.rollout_config, behaviour.active, []
        if tasks is not None:
            config, active = dataclasses.replace(config, max_triggers=0), []
        else:
            tasks = setup.step_tasks(run.tasks.rl, step, count=r.tasks, seed=seed)
            if r.checked_tasks:
                checked = setup.step_tasks(run.tasks.checked, step, count=r.checked_tasks, seed=seed, key="rollout.checked_tasks")
        return collect(
            run.speaker(sampler, behaviour.trainable),
            judge,
            verifier,
            tasks,
            active,
            config=config,
            seed=seed,
            step=step,
            checked=checked,
            progress=progress,
            index=self._index,
        )

    def learn(self, state: TrainState, rollouts: StepRollouts, behaviour: Behaviour) -> tuple[TrainState, dict[str, float]]:
        """The joint update on all three agents' tokens; with `rl.epochs` > 1 several from the same rollouts.

        Old log-probabilities stay those of the sampler, so that clipping bounds how far the epochs may go together; what the
        loss tells (ratio, kl, clip_fraction, ...) is of the last one. With one epoch it is how far the parameters that learn are from
        those that sampled: by rounding where the metric `staleness` (the updates between them) is 0, by an update where it is 1.
        Mismatch rejection compares trainer and sampler under the same parameters, those that sampled, whatever the staleness.

        Args:
            behaviour: what the rollouts were made with; its parameters are let go.

        Raises:
            BadBatch: a number that is not finite, or a gradient that is far larger than those before it. The batch is saved first.
        """
        batches: list[dict[str, Any]] = []
        try:
            screen = make_screen(self.cfg, self.run.model, behaviour.trainable, self._run_program)
            rows, metrics = assign(rollouts, config=setup.credit_config(self.cfg), seed=self.cfg.seed, step=state.step, screen=screen)
            metrics |= rollout_metrics(rollouts) | agent_metrics(rollouts.trajectories, rows)
            metrics["staleness"] = float(state.step - behaviour.step)
            behaviour.let_go()
            del screen
            c = self.cfg.rl
            batches += microbatches(rows, size=c.microbatch, step=c.length_step, tokens=c.microbatch_tokens)
            trainable, opt_state = state.trainable, state.opt_state
            limit = largest_norm(state.record, self.cfg.rl.max_grad_norm_spike)
            for epoch in range(self.cfg.rl.epochs if rows else 0):
                trainable, opt_state, found = self.updater.update(
                    trainable, self.run.model.frozen, opt_state, batches, largest_norm=limit, keep=self.ahead and epoch == 0
                )
                metrics |= found
            check_finite(metrics)
        except FloatingPointError as error:
            raise save_bad_batch(self.run.workdir, state.step + 1, error, rollouts, batches) from error
        if not rows:
            log.warning("step %d: %s", state.step + 1, nothing_to_learn(metrics))
        record = remembered(state.record, metrics, keep_best=self.cfg.rl.keep_best, window=BEST_WINDOW)
        record["judged"] = int(record.get("judged", 0)) + sum(len(t.verdicts) for t in rollouts.of("policy"))
        behind = state.trainable if self.ahead else None
        return TrainState(step=state.step + 1, trainable=trainable, opt_state=opt_state, record=record, behind=behind), metrics

    def _stage_usage(self, rollouts: StepRollouts) -> None:
        library = self.run.library
        for name, use in skill_usage(rollouts, null=self.cfg.rollout.selections, floor=self.cfg.skills.fail_speedup):
            library.use(library.get(name).id, **use)

    def _log_examples(self, step: int, rollouts: StepRollouts) -> None:
        best = max(rollouts.of("policy"), key=lambda t: t.best.verdict.speedup if t.best else 0.0)
        if best.best is not None:
            text = f"{best.task}: {best.best.verdict.speedup:.2f}x\n\n```\n{best.best.source}\n```"
            self.run.metrics.text("rl/best_kernel", step, text)


def _step_of(key: str) -> int:
    """The step whose rollouts a verdict belongs to, of its key in the journal: rl/STEP/..."""
    return int(key.split("/")[1])
