"""What the cold start is trained on: the judged corpus of a run and the samples made of it, by config."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
from tqdm import tqdm

from dk_jax.agents.text import TaskView
from dk_jax.rollout.episode import task_view
from dk_jax.sft.corpus import Chosen, CorpusConfig, choose_all, judge_all, judge_untimed
from dk_jax.sft.judged import JudgedKernel, load_kernels, save_kernels
from dk_jax.sft.open_source.kernels import load_open_kernels
from dk_jax.sft.samples import Sample, SampleConfig, make_samples
from dk_jax.sft.teacher_samples import load_samples
from dk_jax.tasks.task import Task
from dk_jax.train import setup


@dataclasses.dataclass(frozen=True)
class ColdStartData:
    """Corpus and samples of one run.

    Attributes:
        cfg: the recipe.
        tasks: its tasks; kernels are made for those that train and for all generated ones.
        path: the file of judged kernels.
    """

    cfg: ConfigDict
    tasks: setup.TaskSets
    path: Path

    def kernels(self, make_judge: Callable[[], Any], tell: Callable[[dict[str, int]], None]) -> list[JudgedKernel]:
        """Judged kernels, read back or generated and judged now; in the latter case `tell` gets the counts of `judge_all`, before the
        file is there after which that is not done again."""
        if self.path.exists():
            return load_kernels(self.path)
        chosen = self._chosen(self._trained)
        with tqdm(total=len(chosen), desc="judging the corpus", unit="kernel") as bar:
            kernels, counts = judge_all(chosen, make_judge(), progress=bar.update)
        tell(counts)
        save_kernels(self.path, kernels)
        return kernels

    def check(self, judge: Any) -> None:
        """Judges the part of the corpus that is never timed; the verdicts stay in the judge's journal.

        For a machine without the accelerator: Triton's interpreter says whether a kernel is right, compilation ahead of time
        whether it would build. A run with the same tasks and seed that finds the journal in its workdir takes the verdicts over.
        """
        chosen = self._chosen(self._trained)
        with tqdm(total=sum(not c.timed for c in chosen), desc="checking the corpus", unit="kernel") as bar:
            judge_untimed(chosen, judge, progress=bar.update)

    def _kept(self, given: str, name: str) -> Path:
        """The run's own copy of a file, made once: what it is trained on stays what it was, whatever becomes of the file."""
        own = self.path.with_name(name + "".join(Path(given).suffixes[-2:] if given.endswith(".gz") else Path(given).suffixes[-1:]))
        if not own.exists():
            partial = own.with_name(own.name + ".part")
            shutil.copyfile(given, partial)
            partial.replace(own)
        return own

    def held_out_kernels(self, make_judge: Callable[[], Any]) -> list[JudgedKernel]:
        """Judged and timed kernels of the held-out tasks that kernels can be generated for, as many a task as of a timed one: what the
        summary agent is asked about where it is evaluated. Nothing is trained on them. Read back, or judged now."""
        path = self.path.with_name("corpus_held_out.jsonl")
        if path.exists():
            return load_kernels(path)
        tasks = [task for task in self.tasks.held_out if task.spec is not None]
        chosen = self._chosen(tasks, timed=len(tasks))
        if not chosen:
            return []
        with tqdm(total=len(chosen), desc="judging kernels of held-out tasks", unit="kernel") as bar:
            kernels, _ = judge_all(chosen, make_judge(), progress=bar.update)
        save_kernels(path, kernels)
        return kernels

    @property
    def _trained(self) -> list[Task]:
        # Tasks that were read from files have no spec, without which no kernel can be generated.
        return [task for task in (*self.tasks.train, *self.tasks.generated) if task.spec is not None]

    def _chosen(self, tasks: Sequence[Task], timed: int = 0) -> list[Chosen]:
        variants, _ = setup.kernel_variants(self.cfg.sandbox.language)
        c = self.cfg.corpus
        config = CorpusConfig(
            timed_tasks=timed or c.timed_tasks or len(tasks),
            variants_per_task=c.variants_per_task,
            untimed_variants=c.untimed_variants,
            wrong_share=c.wrong_share,
        )
        return choose_all(tasks, variants, config=config, seed=self.cfg.seed)

    def samples(self, views: Mapping[str, TaskView], kernels: Sequence[JudgedKernel]) -> list[Sample]:
        """The samples, the same for the same kernels, files and config: of the corpus, of open packages' kernels, of a teacher.

        Raises:
            OpenKernelError, ValueError: a file that can't be read, or is not what its name in the config says.
        """
        _, topics = setup.kernel_variants(self.cfg.sandbox.language)
        c = self.cfg.corpus
        config = SampleConfig(
            style=self.cfg.style,
            samples_per_task=c.samples_per_task,
            untimed_samples=c.untimed_samples,
            selection_samples=c.selection_samples,
            summary_samples=c.summary_samples,
            wrong_share=c.wrong_share,
            skill_share=c.skill_share,
            untimed_skill_share=c.untimed_skill_share,
            balance_skills=c.balance_skills,
            max_skills=self.cfg.rollout.max_skills,
            headers=self.cfg.rollout.headers,
        )
        views, kernels = dict(views), list(kernels)
        if c.open_kernels:
            tasks, more = load_open_kernels(self._kept(c.open_kernels, "open_kernels"))
            kernels += more
            s = self.cfg.sandbox
            views |= {task.name: task_view(task, language=s.language, form=s.form) for task in tasks}
        made = make_samples(views, kernels, topics(), config=config, seed=self.cfg.seed)
        return made + (load_samples(self._kept(c.teacher, "teacher_samples")) if c.teacher else [])
