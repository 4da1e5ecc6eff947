"""Does the jobs of an ablation, one after another, as far as a piece's time reaches.

    DIR/settings.json                what the results depend on; anything else is refused there
    DIR/pieces.jsonl                 which piece worked on which job, on what machine
    DIR/sft/START                    run of a cold start; not needed once the start is kept
    DIR/starts/START                 what it ended with (dk_jax.reproduce.starts)
    DIR/runs/ARM_seedN, runs/START   run of an arm's RL; folder of the cold start's own evaluation
    DIR/eval/NAME                    evaluations (dk_jax.evaluation.harness)

Every job says by its files whether it is done, and goes on from what is there: an RL step by the trainer's checkpoints and journal, bit for
bit; evaluations chunk by chunk. A kill at any point costs the work since then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from dk_jax.evaluation import harness
from dk_jax.evaluation.policies import Policy, restore_trainable
from dk_jax.evaluation.results import RESULTS, ResultsFile, save_json
from dk_jax.evaluation.scripted_policy import ScriptedPolicy
from dk_jax.reproduce import digests, ledger, starts
from dk_jax.reproduce.arms import ARMS, AblationError, Job, Preset
from dk_jax.reproduce.pieces import Piece, PieceLog, PieceOver
from dk_jax.rollout.episode import task_view
from dk_jax.tasks.task import Task
from dk_jax.train import manifest, setup
from dk_jax.train.setup import TaskSets

log = logging.getLogger(__name__)
SETTINGS, PIECES, EXPERT = "settings.json", "pieces.jsonl", "expert"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tools:
    """What the work is done with; tests have their own.

    Attributes:
        make_run: (recipe, workdir) -> dk_jax.train.run.Run.
        make_judge: (recipe, journal) -> judge.
    """

    make_run: Callable[[ConfigDict, Path], Any]
    make_judge: Callable[[ConfigDict, Any], Any]


def sandbox_tools(socket: str) -> Tools:
    """On a running sandbox."""
    from dk_jax.train.run import Run

    return Tools(make_run=lambda cfg, workdir: Run(cfg, workdir, socket), make_judge=lambda cfg, journal: setup.make_judge(cfg, socket, journal))


class Ablation:
    """An ablation in a folder.

    Args:
        preset: what is compared.
        folder: DIR; made if it is not there.

    Raises:
        AblationError: the folder holds another ablation; the message names what differs.
    """

    def __init__(self, preset: Preset, folder: Path):
        self.preset, self.folder = preset, Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        remember(self.folder / SETTINGS, json.loads(json.dumps(preset.settings)))

    # --- places -----------------------------------------------------------------------------------------------------

    def start(self, job: Job) -> Path:
        return self.folder / "starts" / job.start.name

    def run_folder(self, job: Job) -> Path:
        """Of the run that a job trains or evaluates."""
        if job.arm is None:
            return self.folder / "runs" / job.start.name
        return self.folder / "runs" / f"{job.arm.trained}_seed{job.seed}"

    def evaluation(self, job: Job) -> Path:
        name = EXPERT if job.kind == "expert" else job.start.name if job.arm is None else f"{job.arm.name}_seed{job.seed}"
        return self.folder / "eval" / name

    def recipe(self, job: Job) -> ConfigDict:
        """Of a job's run."""
        if job.arm is None:
            return self.preset.start_recipe(job.start)
        return self.preset.recipe(next(arm for arm in ARMS if arm.name == job.arm.trained), job.seed)

    # --- what is done -----------------------------------------------------------------------------------------------

    def is_done(self, job: Job) -> bool:
        """By its files."""
        if job.kind == "start":
            return starts.is_kept(self.start(job))
        if job.kind == "train":
            return self.is_trained(self.run_folder(job))
        return (self.evaluation(job) / "done").exists()

    def is_trained(self, workdir: Path) -> bool:
        """Whether the budget is spent at the newest committed step."""
        return ledger.spent(workdir).is_over(candidates=self.preset.candidates, tokens=self.preset.tokens) and self._committed(workdir)

    def _committed(self, workdir: Path) -> bool:
        """Whether the last step that the metrics tell of has its digest, which is written after its checkpoint."""
        own = digests.read(workdir)
        return bool(own) and own[-1]["step"] == ledger.spent(workdir).steps

    def work(self, jobs: list[Job], tools: Tools, piece: Piece, pieces: PieceLog, *, say: Callable[[str], None] = print) -> list[Job]:
        """Works on the jobs in their order until the piece is over; returns those that are not done."""
        try:
            for job in jobs:
                if self.is_done(job):
                    continue
                say(f"{sum(self.is_done(other) for other in jobs) + 1} of {len(jobs)}: {job.name}")
                pieces.begins(job.name)
                piece.begin()
                getattr(self, f"_{job.kind}")(job, tools, piece)
                if not self.is_done(job):
                    break
        except PieceOver:
            log.info("the piece's time was over in the middle of a part")
        return [job for job in jobs if not self.is_done(job)]

    # --- jobs -------------------------------------------------------------------------------------------------------

    def _start(self, job: Job, tools: Tools, piece: Piece) -> None:
        workdir = self.folder / "sft" / job.start.name
        workdir.mkdir(parents=True, exist_ok=True)
        self._take_corpus(job, workdir)
        with contextlib.closing(tools.make_run(self.preset.start_recipe(job.start), workdir)) as run:
            starts.keep(run, run.sft(), self.start(job))

    def _take_corpus(self, job: Job, workdir: Path) -> None:
        """The judged kernels of the other cold start of the same seed: the filter comes after them."""
        for other in (self.folder / "sft").glob(f"*_seed{job.start.seed}/corpus.jsonl"):
            if not (workdir / "corpus.jsonl").exists():
                partial = workdir / "corpus.jsonl.part"
                shutil.copyfile(other, partial)
                partial.replace(workdir / "corpus.jsonl")

    def _train(self, job: Job, tools: Tools, piece: Piece) -> None:
        workdir, cfg = self.run_folder(job), self.recipe(job)
        budget = dict(candidates=self.preset.candidates, tokens=self.preset.tokens)
        starts.plant(self.start(job), workdir)

        def over(step: int) -> bool:
            return piece.over() or ledger.spent(workdir).is_over(**budget)

        with contextlib.closing(tools.make_run(cfg, workdir)) as run:
            begin = starts.load(self.start(job), run.model.trainable)
            # A kill may have come between the checkpoint of the last step and its digest.
            checkpoint = newest(run.checkpoints_folder / "rl")
            done = checkpoint is not None and int(checkpoint.name) == ledger.spent(workdir).steps and ledger.spent(workdir).is_over(**budget)
            step = int(checkpoint.name) if done else run.rl(begin, over).step
        self._digest(cfg, workdir, step)

    def _digest(self, cfg: ConfigDict, workdir: Path, step: int) -> None:
        digests.update(workdir, step=step, null=cfg.rollout.selections, floor=cfg.skills.fail_speedup)

    def digest_runs(self, jobs: list[Job]) -> None:
        """Makes the digests of all committed steps of the jobs' runs."""
        for job in jobs:
            if job.kind == "train" and (checkpoint := newest(self.run_folder(job) / "checkpoints" / "rl")) is not None:
                self._digest(self.recipe(job), self.run_folder(job), int(checkpoint.name))

    def _expert(self, job: Job, tools: Tools, piece: Piece) -> None:
        cfg = self.preset.start_recipe(job.start)
        tasks = setup.load_tasks(cfg)
        views = {t.name: task_view(t, language=cfg.sandbox.language, form=cfg.sandbox.form) for t in tasks.held_out}
        policy = ScriptedPolicy("expert", tasks.held_out, views, setup.kernel_variants(cfg.sandbox.language)[0], style=cfg.style)
        cfg.evaluation.update(dict(samples=self.preset.expert_samples, turns=1))
        facts = {"policy": "expert", "kernels": policy.digest}
        self._ask(job, cfg, Policy(speaker=policy), tasks.held_out, facts, (), tools, piece)

    def _evaluate_start(self, job: Job, tools: Tools, piece: Piece) -> None:
        workdir = self.run_folder(job)
        starts.plant(self.start(job), workdir)
        with contextlib.closing(tools.make_run(self.recipe(job), workdir)) as run:
            trainable = starts.load(self.start(job), run.model.trainable)
            self._ask_run(job, run, trainable, 0, (), tools, piece)

    def _evaluate(self, job: Job, tools: Tools, piece: Piece) -> None:
        with contextlib.closing(tools.make_run(self.recipe(job), self.run_folder(job))) as run:
            checkpoint = newest(run.checkpoints_folder / "rl")
            problem = "it is not there" if checkpoint is None else manifest.problem(checkpoint)
            if problem:
                raise AblationError(f"{job.name}: the last checkpoint in {run.checkpoints_folder / 'rl'} can't be used: {problem}")
            step = int(checkpoint.name)
            skills = tuple(run.library.at_step(min(step, run.library.step)).active()) if job.arm.inject else ()
            self._ask_run(job, run, restore_trainable(checkpoint, run.model.trainable), step, skills, tools, piece)

    def _ask_run(self, job: Job, run: Any, trainable: Any, step: int, skills: tuple, tools: Tools, piece: Piece) -> None:
        c = run.cfg.evaluation
        samplers = [run.sampler(temperature=c.temperature, top_p=c.top_p), run.sampler(temperature=0.0)]
        speaker, greedy = (run.speaker(sampler, trainable) for sampler in samplers)
        facts = {"policy": "run", "arm": job.arm.name if job.arm else job.start.name, "step": step, "content": starts.digest(trainable)}
        self._ask(job, run.cfg, Policy(speaker=speaker, greedy=greedy), run.tasks.held_out, facts, skills, tools, piece)

    def _ask(
        self, job: Job, cfg: ConfigDict, policy: Policy, held_out: tuple[Task, ...], facts: dict, skills: tuple, tools: Tools, piece: Piece
    ) -> None:
        """Evaluates a policy on held-out tasks in the job's folder, chunk by chunk."""
        c, folder = cfg.evaluation, self.evaluation(job)
        folder.mkdir(parents=True, exist_ok=True)
        plan = harness.Plan(
            tasks=held_out[: c.max_tasks] if c.max_tasks else held_out, samples=c.samples, turns=c.turns, chunk=self.preset.chunk, seed=cfg.seed,
            config=setup.rollout_config(cfg), skills=skills,
        )  # fmt: skip
        settings = harness.settings_of(cfg, plan, policy=facts, split="held_out", library={"inject": bool(skills)})
        harness.remember_settings(folder, settings)
        results = ResultsFile(folder / RESULTS)

        def chunk_done() -> None:
            if piece.over() and len(results.results) < len(plan.tasks) * plan.samples:
                raise PieceOver

        with contextlib.closing(harness.VerdictJournal(folder / harness.VERDICTS)) as journal:
            harness.evaluate(policy, tools.make_judge(cfg, journal), plan, results, chunk_done=chunk_done)
        if len(results.results) == len(plan.tasks) * plan.samples:
            save_json(folder / "done", {"samples": len(results.results)})


def newest(folder: Path) -> Path | None:
    """The checkpoint of the highest step."""
    found = {int(path.name): path for path in folder.glob("[0-9]*") if path.name.isdigit()} if folder.is_dir() else {}
    return found[max(found)] if found else None


def remember(path: Path, wanted: dict[str, Any]) -> None:
    """Writes the settings, or checks that they are those which are there. Raises AblationError."""
    if not path.exists():
        save_json(path, wanted)
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    a, b = dict(_flat(found)), dict(_flat(wanted))
    if differing := sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key)):
        said = "; ".join(f"{key}: {a.get(key, 'not there')} -> {b.get(key, 'not there')}" for key in differing[:5])
        raise AblationError(f"{path.parent} holds another ablation ({said}): use its settings, or another --workdir")


def _flat(data: dict[str, Any], prefix: str = ""):
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def parts(tasks: TaskSets) -> dict[str, str]:
    """Of each held-out task, by name: "siblings" if its family has tasks that are trained on, else "families"."""
    trained = {task.family for task in tasks.train}
    return {task.name: "siblings" if task.family in trained else "families" for task in tasks.held_out}
