"""Judged kernels -> cold-start samples for the three agents.

Four kinds (RECIPES, daVinci-kernel): policy trajectories of two turns, policy trajectories with injected skills, selection
calls, and summary calls with and without skills in view. First turns are drawn evenly from all correct kernels, slow ones
too, and now and then from wrong ones (which are shown but not imitated), so that the cold start teaches to write kernels and
to repair them, while which optimisation pays is left for RL to find.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dk_jax.agents import policy, selection, summary
from dk_jax.agents.text import TaskView
from dk_jax.generation.tokenizer import Codec
from dk_jax.models.config import AGENTS
from dk_jax.rollout.trajectory import Verdict, derive_seed
from dk_jax.sft.skill_topics import SkillTopic
from dk_jax.skills.record import Skill, SkillDraft
from dk_jax.train.batch import Row


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgedKernel:
    """A generated kernel with the sandbox's verdict on it."""

    task: str
    source: str
    techniques: tuple[str, ...]
    intent: str
    verdict: Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """How many samples, and of what.

    Attributes:
        samples_per_task: policy trajectories of a task with timed kernels, half of them with an injected skill.
        untimed_samples: the same of a task whose kernels were judged for correctness only; these have one turn, or two where
            the first shows a wrong kernel, and no selection or summary samples.
        wrong_share: share of first turns that show a wrong or broken kernel (not imitated).
        max_skills: skills a selection call may name.
        headers: most headers shown to the selection agent.
        min_gain: a summary sample needs best >= min_gain x first.
    """

    style: str
    samples_per_task: int
    untimed_samples: int
    wrong_share: float
    max_skills: int
    headers: int
    min_gain: float = 1.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A conversation of one agent: (prompt, answer, whether the answer is imitated) for each turn."""

    agent: str
    kind: str
    task: str
    turns: tuple[tuple[str, str, bool], ...]

    @property
    def texts(self) -> list[str]:
        return [text for prompt, answer, _ in self.turns for text in (prompt, answer)]


def save_kernels(path: Path, kernels: Sequence[JudgedKernel]) -> None:
    """One JSON line a kernel; complete or not at all."""
    partial = path.with_suffix(".part")
    with open(partial, "w", encoding="utf-8") as file:
        for kernel in kernels:
            file.write(json.dumps(dataclasses.asdict(kernel)) + "\n")
    partial.replace(path)


def load_kernels(path: Path) -> list[JudgedKernel]:
    """Reads what `save_kernels` wrote; a bad line is named."""
    out = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                data = json.loads(line)
                data["verdict"] = Verdict(**data["verdict"])
                data["techniques"] = tuple(data["techniques"])
                out.append(JudgedKernel(**data))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: not a judged kernel ({error}). Delete the file; it is made again.") from error
    return out


def _skill(draft: SkillDraft) -> Skill:
    return Skill.from_draft(draft)


def make_samples(
    views: dict[str, TaskView],
    kernels: Sequence[JudgedKernel],
    topics: Sequence[SkillTopic],
    *,
    config: SampleConfig,
    seed: int,
) -> list[Sample]:
    """All samples of the cold start, in a fixed order for equal inputs.

    Tasks without a correct kernel give none.
    """
    by_task: dict[str, list[JudgedKernel]] = {}
    for kernel in kernels:
        by_task.setdefault(kernel.task, []).append(kernel)
    samples: list[Sample] = []
    for task, judged in by_task.items():
        rng = np.random.default_rng(derive_seed(seed, "samples", task))
        correct = [k for k in judged if k.verdict.correct]
        wrong = [k for k in judged if not k.verdict.correct]
        if not correct:
            continue
        maker = _TaskSamples(view=views[task], correct=correct, wrong=wrong, topics=topics, config=config, rng=rng)
        timed = any(k.verdict.speedup > 0 for k in correct)
        for i in range(config.samples_per_task if timed else config.untimed_samples):
            with_skill = i % 2 == 1 if timed else bool(rng.random() < 0.3)
            samples.append(maker.policy(with_skill=with_skill, timed=timed))
        if timed:
            samples += maker.selections() + maker.summaries()
    return samples


@dataclasses.dataclass(kw_only=True)
class _TaskSamples:
    view: TaskView
    correct: list[JudgedKernel]
    wrong: list[JudgedKernel]
    topics: Sequence[SkillTopic]
    config: SampleConfig
    rng: np.random.Generator

    def _pick(self, items):
        return items[int(self.rng.integers(len(items)))]

    def _phrase(self, topic: SkillTopic) -> SkillDraft:
        return self._pick(topic.phrasings)

    def _taught_by(self, kernel: JudgedKernel, beyond: JudgedKernel | None = None) -> list[SkillTopic]:
        """Topics that a kernel is an example of; with `beyond`, those that the other kernel is not."""
        own = set(kernel.techniques)
        other = set(beyond.techniques) if beyond is not None else None
        return [t for t in self.topics if t.techniques <= own and (other is None or not t.techniques <= other)]

    def policy(self, *, with_skill: bool, timed: bool) -> Sample:
        style = self.config.style
        skills: list[Skill] = []
        first = self._pick(self.correct)
        if with_skill:
            taught = self._taught_by(first)
            if taught:
                skills = [_skill(self._phrase(self._pick(taught)))]
                if self.config.max_skills > 1 and self.rng.random() < 0.3:
                    other = _skill(self._phrase(self._pick(self.topics)))
                    if other.name != skills[0].name:
                        skills.insert(int(self.rng.integers(2)), other)
        elif self.wrong and (not timed or self.rng.random() < self.config.wrong_share):
            first = self._pick(self.wrong)
        turns = [
            (policy.render_first(self.view, skills, style=style), policy.format(first.source, self.view, style=style), first.verdict.correct)
        ]
        if timed or not first.verdict.correct:
            second = self._improve(first)
            turns.append((policy.render_feedback(first.verdict, style=style), policy.format(second.source, self.view, style=style), True))
        kind = "policy_with_skill" if skills else "policy"
        return Sample(agent="policy", kind=kind, task=self.view.name, turns=tuple(turns))

    def _improve(self, first: JudgedKernel) -> JudgedKernel:
        if not first.verdict.correct:
            same = [k for k in self.correct if set(k.techniques) == set(first.techniques)]
            return self._pick(same or self.correct)
        faster = [k for k in self.correct if k.verdict.speedup >= 1.1 * first.verdict.speedup]
        return self._pick(faster) if faster else first

    @property
    def _best(self) -> JudgedKernel:
        return max(self.correct, key=lambda k: k.verdict.speedup)

    def selections(self) -> list[Sample]:
        best = self._best
        useful = {t.topic for t in self._taught_by(best)}
        out = []
        for _ in range(max(1, self.config.samples_per_task // 4)):
            count = int(self.rng.integers(1, min(self.config.headers, len(self.topics)) + 1))
            order = self.rng.permutation(len(self.topics))[:count]
            shown = [(self.topics[i], _skill(self._phrase(self.topics[i]))) for i in order]
            names = [skill.name for topic, skill in shown if topic.topic in useful][: self.config.max_skills]
            prompt = selection.render(
                self.view, [skill for _, skill in shown], style=self.config.style, max_skills=self.config.max_skills
            )
            answer = selection.format(names, style=self.config.style)
            out.append(Sample(agent="selection", kind="selection", task=self.view.name, turns=((prompt, answer, True),)))
        return out

    def summaries(self) -> list[Sample]:
        pairs = [
            (a, b)
            for a in self.correct
            for b in self.correct
            if b.verdict.speedup >= max(self.config.min_gain * a.verdict.speedup, self.config.min_gain)
            and self._taught_by(b, beyond=a)
        ]
        out = []
        for i in range(min(len(pairs), max(1, self.config.samples_per_task // 4))):
            first, best = self._pick(pairs)
            taught = self._taught_by(best, beyond=first)
            injected = [_skill(self._phrase(self._pick(self.topics)))] if i % 2 else []
            draft = self._phrase(self._pick(taught))
            prompt = summary.render(
                self.view,
                injected,
                first_code=first.source,
                first_speedup=first.verdict.speedup,
                best_code=best.source,
                best_speedup=best.verdict.speedup,
                style=self.config.style,
            )
            kind = "summary_with_skill" if injected else "summary"
            answer = summary.format([draft], style=self.config.style)
            out.append(Sample(agent="summary", kind=kind, task=self.view.name, turns=((prompt, answer, True),)))
        return out


def to_row(sample: Sample, codec: Codec) -> Row:
    """Tokens and loss mask of a sample; weight 1 a target token is left to the caller."""
    tokens: list[int] = []
    loss: list[float] = []
    for prompt, answer, imitated in sample.turns:
        opened = codec.open_turn(prompt, first=not tokens)
        said = codec.encode(answer) + [codec.eos_id]
        tokens += opened + said
        loss += [0.0] * len(opened) + [float(imitated)] * len(said)
    zeros = [0.0] * len(tokens)
    return Row(tokens=tokens, loss=loss, advantage=zeros, old_logp=zeros, agent=AGENTS.index(sample.agent), weight=1.0)
