"""The phases of a run, each resumable: corpus -> codec -> cold start -> evaluation -> RL -> evaluation -> report.

One RL step (DESIGN 3.3, 3.4):

    1. take the step's B tasks; sample k skill selections for each, add the null scheme
    2. n rollouts a scheme, T turns each, every turn judged by the sandbox
    3. summaries of rollouts that improved on themselves; verification of each proposed skill by paired arms
    4. leave-one-out advantages per agent; one joint update on all three agents' tokens
    5. commit the step's skills, write the checkpoint, forget the journal

A run killed anywhere is started again by the same command: finished phases are read back, the RL phase goes on from its newest
checkpoint, skills committed after that checkpoint are rolled back, and verdicts already received are taken from the journal.
"""

from __future__ import annotations

import fcntl
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax
from ml_collections import ConfigDict
from tqdm import tqdm

from dk_jax import distributed
from dk_jax.evaluation import heldout
from dk_jax.evaluation.calls import evaluate_calls
from dk_jax.evaluation.report import ReportError, write_report
from dk_jax.generation.sampler import Sampler, make_sampler
from dk_jax.generation.tokenizer import load_codec
from dk_jax.metrics import Metrics
from dk_jax.models.lora import combine
from dk_jax.models.sharding import row_share
from dk_jax.rollout.episode import task_view
from dk_jax.rollout.judge import Journal
from dk_jax.rollout.speaker import Speaker
from dk_jax.rollout.trajectory import save_trajectories
from dk_jax.rollout.verify import Verifier
from dk_jax.sft import training as sft
from dk_jax.sft.embeddings import BackboneEmbedder
from dk_jax.sft.judged import JudgedKernel
from dk_jax.sft.samples import Sample, to_row
from dk_jax.sft.validation import Validation, split
from dk_jax.skills.library import SkillLibrary
from dk_jax.train import clean_samples, modes, setup, updaters
from dk_jax.train import model as models
from dk_jax.train.admission import FILE, admitted
from dk_jax.train.checks import check_config, check_tasks
from dk_jax.train.cold_start import ColdStartData
from dk_jax.train.rl_phase import RLPhase
from dk_jax.train.state import Checkpoints, TrainState
from dk_jax.train.update import Updater, for_sampling
from dk_jax.train.workdir import remember_config, remember_weights

log = logging.getLogger(__name__)
PHASES = ("eval_untrained", "corpus", "sft", "eval_sft", "rl", "eval_rl", "report")


class Run:
    """One run in one workdir.

    Args:
        cfg: the recipe.
        workdir: where everything goes; one run at a time may use it. Of several processes (dk_jax.distributed) the first writes there.
        socket: a running sandbox, or "" for phases that need none.
        make_judge: builds the judge from (cfg, socket, journal); tests pass a scripted one.
    """

    def __init__(self, cfg: ConfigDict, workdir: Path, socket: str, make_judge: Callable[..., Any] = setup.make_judge):
        make_judge = distributed.for_all(make_judge)
        self.cfg, self.shared = cfg, Path(workdir)
        self._lock: TextIO | None = None
        self.workdir = distributed.own_workdir(self.shared, self._take)
        # All of the config that can be wrong is looked at first: a workdir remembers none that could not run.
        check_config(cfg)
        models.check_source(cfg.model)
        self.tasks = setup.load_tasks(cfg)
        if distributed.by_first(lambda: bool(socket)) and any(task.spec is None for task in self.tasks.all):
            self.tasks = admitted(self.tasks, make_judge(cfg, socket, None), self.workdir / FILE)
        check_tasks(cfg, self.tasks)
        self.rollout_config = setup.rollout_config(cfg)
        self.verifier = Verifier.from_config(cfg, self.tasks.siblings)
        remember_config(cfg, self.workdir)
        self.views = {
            t.name: task_view(t, language=cfg.sandbox.language, form=cfg.sandbox.form)
            for t in self.tasks.all
        }
        self.data = ColdStartData(cfg, self.tasks, self.workdir / "corpus.jsonl")
        self.metrics = Metrics(self.workdir)
        self.library = SkillLibrary(self.workdir / "library.sqlite")
        self._socket, self._make_judge = socket, make_judge
        self._model: models.Model | None = None
        self._sampler: Sampler | None = None
        self._reported = time.monotonic()

    def _take(self) -> None:
        """Makes the workdir and keeps other runs out of it."""
        self.shared.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.shared / ".lock", "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise setup.ConfigError(f"another run is using {self.shared}: wait for it, or choose another --workdir") from error

    @property
    def checkpoints_folder(self) -> Path:
        """Of all processes: each writes its part of a checkpoint."""
        return self.shared / "checkpoints"

    def close(self) -> None:
        self.metrics.close()
        self.library.close()
        if self._lock is not None:
            self._lock.close()

    def judge(self, phase: str):
        """A judge whose journal belongs to a phase."""
        return self._make_judge(self.cfg, self._socket, Journal(self.workdir / f"journal_{phase}.jsonl"))

    # --- corpus and codec -------------------------------------------------------------------------------------------

    def corpus(self) -> list[JudgedKernel]:
        """Judged kernels of the cold start: read back, or generated and judged now."""
        started = time.monotonic()

        def tell(counts: dict[str, int]) -> None:
            self.metrics.forget("corpus", 0)  # of a run that was killed before the corpus was saved
            self.metrics.scalars("corpus", 0, {**counts, "seconds": time.monotonic() - started})

        found = self.data.path.exists()
        kernels = self.data.kernels(lambda: self.judge("corpus"), tell)
        if not found:
            (self.workdir / "journal_corpus.jsonl").unlink(missing_ok=True)
        return kernels

    def check_corpus(self) -> Path:
        """Judges the part of the corpus that is never timed; returns the journal of these verdicts (see ColdStartData.check)."""
        judge = self.judge("corpus")
        self.data.check(judge)
        return judge.journal.path

    def samples(self) -> list[Sample]:
        """The cold start's samples, the same for the same corpus and config."""
        return self.data.samples(self.views, self.corpus())

    def trained_samples(self) -> Sequence[Sample]:
        """Those of them that the cold start is trained on (dk_jax.train.clean_samples); all unless the recipe says otherwise."""
        samples, path = self.samples(), self.shared / "sft_kept.json"
        if not clean_samples.is_on(self.cfg.corpus):
            return samples

        if self.cfg.corpus.diversity.on and distributed.several() and not path.exists():
            raise setup.ConfigError(
                "corpus.diversity.on with several processes: samples are embedded by one alone. Start the run in one process first, until the "
                "cold start's training begins, or set corpus.diversity.on=False"
            )

        def embed() -> BackboneEmbedder:
            model = self.model
            return BackboneEmbedder(model.static, combine(model.trainable, model.frozen), model.codec)

        def found() -> clean_samples.Cleaned:
            tasks = [*self.tasks.train, *self.tasks.generated]
            return clean_samples.cleaned(samples, tasks, self.tasks.held_out, cfg=self.cfg, embed=embed, path=path)

        distributed.by_first(lambda: found() and None)  # the others read it
        left = found()
        log.info("cold start: %s, %d stay", ", ".join(f"{count} {name}" for name, count in left.counts.items()), len(left.samples))
        return left.samples

    @property
    def model(self) -> models.Model:
        """Backbone and codec, made once."""
        if self._model is None:
            remember_weights(self.cfg, self.workdir)
            # Made by the first process alone; the others read it from the workdir.
            trains = distributed.by_first(lambda: models.trains_codec(self.cfg, self.shared))
            texts = [text for sample in self.samples() for text in sample.texts] if trains else []
            distributed.by_first(lambda: models.make_codec(self.cfg, self.shared, lambda: texts) and None)
            codec = load_codec(self.shared / "codec")
            self._model = models.make_model(self.cfg, codec)
        return self._model

    # --- cold start -------------------------------------------------------------------------------------------------

    def sft(self) -> TrainState:
        """Cold-start training; returns (or restores) its final state, or with a validation split its best one."""
        c, updater = self.cfg.sft, updaters.for_cold_start(self.cfg, self.model)
        state = self.fresh_state(updater)
        if not c.steps:  # no cold start: RL begins with the model as it is
            return state
        with Checkpoints(self.checkpoints_folder / "sft") as checkpoints:
            state = checkpoints.restore(state) or state
            if state.step != c.steps:
                self.metrics.rewind("sft", state.step)
                state = self._train_sft(state, updater, checkpoints)
            return sft.best(checkpoints, state)

    def _train_sft(self, state: TrainState, updater: Updater, checkpoints: Checkpoints) -> TrainState:
        model, c = self.model, self.cfg.sft
        shares = c.shares.to_dict()
        samples = self.trained_samples()
        rows = [to_row(sample, model.codec) for sample in samples]
        fitting = [sample for sample, row in zip(samples, rows, strict=True) if sft.fits(row, c.max_tokens)]
        _, kept = split(fitting, c.validation_share, seed=self.cfg.seed)
        tasks = {sample.task for sample in kept}
        if c.validation_share and not kept:
            raise setup.ConfigError(
                f"sft.validation_share={c.validation_share} of the tasks leaves no sample that fits sft.max_tokens={c.max_tokens} to validate "
                "with: make more samples, or set it to 0"
            )
        held = [row for sample, row in zip(samples, rows, strict=True) if sample.task in tasks and sft.fits(row, c.max_tokens)]
        rows = [row for sample, row in zip(samples, rows, strict=True) if sample.task not in tasks]
        validation = Validation(
            rows=held, model=model, microbatch=c.microbatch, microbatch_tokens=c.microbatch_tokens, length_step=self.cfg.learner.length_step,
            shares=shares,
        )  # fmt: skip
        with tqdm(total=c.steps, desc="cold start", unit="step", initial=state.step) as bar:

            def report(step: int, metrics: dict[str, float]) -> None:
                self.metrics.scalars("sft", step, metrics)
                if step % c.checkpoint_every == 0 or step == c.steps:
                    self.metrics.flush()  # before the checkpoint
                bar.update(1)
                bar.set_postfix(loss=f"{metrics['loss']:.3f}")

            config = sft.SFTConfig(
                steps=c.steps,
                batch=c.batch,
                microbatch=c.microbatch,
                microbatch_tokens=c.microbatch_tokens,
                length_step=self.cfg.learner.length_step,
                max_tokens=c.max_tokens,
                checkpoint_every=c.checkpoint_every,
                shares=shares,
            )
            return sft.train(
                rows, updater, checkpoints, state, model.frozen, config=config, seed=self.cfg.seed, report=report,
                validate=validation.losses if held else None,
            )  # fmt: skip

    def fresh_state(self, updater: Updater, trainable: Any = None) -> TrainState:
        # A copy: updates donate their buffers, and the model's initial parameters must outlive them.
        start = self.model.trainable if trainable is None else trainable
        trainable = jax.tree.map(lambda leaf: leaf.copy(), start)
        return TrainState(step=0, trainable=trainable, opt_state=updater.start(trainable), record={})

    # --- sampling ---------------------------------------------------------------------------------------------------

    def sampler(self, *, temperature: float, top_p: float = 1.0) -> Sampler:
        """A sampler that draws in this way; all of a run share their compiled programs."""
        if self._sampler is None:
            config = setup.sampler_config(self.cfg, self.model.codec.eos_id, row_share(self.model.mesh))
            self._sampler = make_sampler(self.model.static, config, self.model.mesh)
        return self._sampler.drawing(temperature=temperature, top_p=top_p)

    def speaker(self, sampler, trainable: Any) -> Speaker:
        return Speaker(
            sampler=sampler,
            params=for_sampling(combine(trainable, self.model.frozen)),
            codec=self.model.codec,
            max_context_tokens=self.cfg.rollout.max_context_tokens,
        )

    # --- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self, phase: str, trainable: Any, *, step: int) -> dict[str, Any]:
        """Held-out scores of the parameters after RL step `step`, with the library as it was then.

        Read back if they are there already and are those of this step, this library and these tasks.
        """
        path, c = self.workdir / f"{phase}.json", self.cfg.evaluation
        tasks = self.tasks.held_out[: c.max_tasks] if c.max_tasks else self.tasks.held_out
        library = self.library.at_step(min(step, self.library.step))
        of = {"step": step, "library": library.version, "tasks": [task.name for task in tasks]}
        if path.exists() and (scores := json.loads(path.read_text(encoding="utf-8"))).get("of") == of:
            return scores
        with tqdm(total=len(tasks) * c.samples * c.turns, desc=f"{phase}: held-out tasks", unit="turn") as bar:
            trajectories = heldout.evaluate(
                self.speaker(self.sampler(temperature=c.temperature, top_p=c.top_p), trainable),
                self.judge(phase),
                tasks,
                library.active(),
                config=self.rollout_config,
                samples=c.samples,
                turns=c.turns,
                seed=self.cfg.seed,
                phase="eval",
                greedy_speaker=self.speaker(self.sampler(temperature=0.0), trainable),
                inject=c.inject,
                progress=bar.update,
            )
        save_trajectories(self.workdir / "rollouts" / f"{phase}.jsonl", trajectories)
        scores = heldout.all_scores(trajectories, turns=c.turns) | {"calls": self._evaluate_calls(phase, trainable), "of": of}
        last = scores["last_turn"]
        series = "eval" if phase != "eval_untrained" else phase
        self.metrics.forget(series, step)  # of a run that was killed before the scores were saved, or of other tasks
        self.metrics.scalars(
            series,
            step,
            {k: last[k] for k in ("compiled", "correct", "mean_speedup", "geomean_correct")}
            | {f"fast_{p}": share for p, share in last["fast"].items()},
        )
        self.metrics.flush()
        heldout.save_scores(path, scores)  # last: with this file the phase has finished
        return scores

    def _evaluate_calls(self, phase: str, trainable: Any) -> dict[str, Any]:
        """What the selection and the summary agent make of their calls on held-out tasks (dk_jax.evaluation.calls); {} if not asked for."""
        c = self.cfg.evaluation
        if not c.call_samples:
            return {}
        tasks = self.tasks.held_out[: c.max_tasks] if c.max_tasks else self.tasks.held_out
        kernels = self.data.held_out_kernels(lambda: self.judge("corpus_held_out"))
        (self.workdir / "journal_corpus_held_out.jsonl").unlink(missing_ok=True)
        _, topics = setup.kernel_variants(self.cfg.sandbox.language)
        with tqdm(desc=f"{phase}: selection and summary calls", unit="call") as bar:
            scores, trajectories = evaluate_calls(
                self.speaker(self.sampler(temperature=c.temperature, top_p=c.top_p), trainable), tasks, kernels, topics(),
                config=self.rollout_config, samples=c.call_samples, lessons_per_task=c.call_lessons, min_gain=self.cfg.skills.alpha,
                seed=self.cfg.seed, progress=bar.update,
            )  # fmt: skip
        save_trajectories(self.workdir / "rollouts" / f"{phase}_calls.jsonl", trajectories)
        return scores

    # --- RL ---------------------------------------------------------------------------------------------------------

    def rl(self, start: Any, over: Callable[[int], bool] = lambda step: False) -> TrainState:
        """Joint RL from the cold start's parameters (or the newest checkpoint) to `rl.steps`, or to the first step after which `over`, asked
        with its number, says so; a later call goes on from there."""
        with RLPhase(self) as phase:
            return phase.train(start, over)

    def rollout_only(self, path: Path) -> int:
        """See `dk_jax.train.modes.rollout_only`."""
        return modes.rollout_only(self, path)

    def train_from(self, path: Path) -> dict[str, float]:
        """See `dk_jax.train.modes.train_from`."""
        return modes.train_from(self, path)

    def overfit_one(self, task_name: str = "") -> list[dict[str, float]]:
        """See `dk_jax.train.modes.overfit_one`."""
        return modes.overfit_one(self, task_name)

    # --- all of it --------------------------------------------------------------------------------------------------

    def report_so_far(self, pause_s: float = 0.0) -> None:
        """Writes the report of what is there, unless one was written in the last `pause_s`; one that can't be made is told, and stops nothing."""
        if time.monotonic() < self._reported + pause_s:
            return
        self._reported = time.monotonic()
        try:
            write_report(self.workdir)
        except (ReportError, OSError) as error:
            log.warning("no report this time: %s", error)

    def all(self) -> dict[str, Any]:
        """Every phase in turn; returns scores before and after, skill counts, and paths."""
        untrained = self.evaluate("eval_untrained", self.model.trainable, step=0) if self.cfg.evaluation.untrained else None
        self.report_so_far()
        cold = self.sft()
        before = self.evaluate("eval_sft", cold.trainable, step=0)
        self.report_so_far()
        final = self.rl(cold.trainable)
        after = self.evaluate("eval_rl", final.trainable, step=final.step)
        report = write_report(self.workdir)
        self.library.export_jsonl(self.workdir / "library.jsonl")
        return {
            "untrained": untrained,
            "before": before,
            "after": after,
            "skills": self.library.counts(),
            "paths": {
                "report": report,
                "tensorboard": self.metrics.directory,
                "library": self.workdir / "library.sqlite",
                "checkpoint": self.checkpoints_folder / "rl" / str(final.step),
            },
        }
