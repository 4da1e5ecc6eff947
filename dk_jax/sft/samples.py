"""Judged kernels -> cold-start samples for the three agents.

Four kinds (RECIPES, daVinci-kernel): policy trajectories of two turns, policy trajectories with injected skills, selection
calls, and summary calls with and without skills in view. First turns are drawn evenly from all correct kernels, slow ones
too, and now and then from wrong ones (which are shown but not imitated), so that the cold start teaches to write kernels and
to repair them, while which optimisation pays is left for RL to find.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from dk_jax.agents import policy, selection, summary
from dk_jax.agents.text import TaskView
from dk_jax.generation.tokenizer import Codec
from dk_jax.models.config import AGENTS
from dk_jax.rollout.trajectory import derive_seed
from dk_jax.sft.judged import JudgedKernel
from dk_jax.sft.lessons import lessons, speedup, taught_by
from dk_jax.sft.skill_topics import SkillTopic
from dk_jax.skills.record import Skill, SkillDraft
from dk_jax.train.batch import Row


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """How many samples, and of what.

    Attributes:
        samples_per_task: policy trajectories of a task with timed kernels.
        untimed_samples: the same of a task whose kernels were judged for correctness only; these have one turn, or two where
            the first shows a wrong kernel, and no selection or summary samples.
        selection_samples, summary_samples: calls of a task with timed kernels, no two alike; fewer where there are not as many.
        wrong_share: share of first turns that show a wrong or broken kernel (not imitated).
        skill_share, untimed_skill_share: share of policy trajectories whose prompt holds a skill that the first kernel is an
            example of (if there is such a topic), of timed tasks and of the others.
        balance_skills: draw that skill's topic with weights that are the inverse of how many correct kernels are examples of it,
            so that techniques that few kernels use are shown more often; otherwise evenly.
        max_skills: skills a selection call may name.
        headers: most headers shown to the selection agent.
        min_gain: a summary sample needs best >= min_gain x first and >= min_gain x eager.
    """

    style: str
    samples_per_task: int
    untimed_samples: int
    selection_samples: int
    summary_samples: int
    wrong_share: float
    max_skills: int
    headers: int
    skill_share: float = 0.5
    untimed_skill_share: float = 0.3
    balance_skills: bool = False
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
    examples: Counter[str] = Counter()
    for kernel in kernels:
        by_task.setdefault(kernel.task, []).append(kernel)
        examples.update(t.topic for t in taught_by(kernel, topics) if kernel.verdict.correct)
    samples: list[Sample] = []
    for task, judged in by_task.items():
        rng = np.random.default_rng(derive_seed(seed, "samples", task))
        correct = [k for k in judged if k.verdict.correct]
        wrong = [k for k in judged if not k.verdict.correct]
        if not correct:
            continue
        maker = _TaskSamples(
            view=views[task], correct=correct, wrong=wrong, topics=topics, examples=examples, config=config, rng=rng
        )
        timed = any(k.verdict.speedup > 0 for k in correct)
        for i in range(config.samples_per_task if timed else config.untimed_samples):
            if timed:  # every second one for a share of 0.5
                with_skill = math.floor((i + 1) * config.skill_share) > math.floor(i * config.skill_share)
            else:
                with_skill = bool(rng.random() < config.untimed_skill_share)
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
    examples: Counter[str]  # correct kernels of all tasks by topic
    config: SampleConfig
    rng: np.random.Generator

    def _pick(self, items):
        return items[int(self.rng.integers(len(items)))]

    def _phrase(self, topic: SkillTopic) -> SkillDraft:
        return self._pick(topic.phrasings)

    def _pick_topic(self, topics: Sequence[SkillTopic]) -> SkillTopic:
        if not self.config.balance_skills:
            return self._pick(topics)
        weights = np.array([1.0 / self.examples[t.topic] for t in topics])
        return topics[int(self.rng.choice(len(topics), p=weights / weights.sum()))]

    def policy(self, *, with_skill: bool, timed: bool) -> Sample:
        style = self.config.style
        skills: list[Skill] = []
        first = self._pick(self.correct)
        if with_skill:
            taught = taught_by(first, self.topics)
            if taught:
                skills = [_skill(self._phrase(self._pick_topic(taught)))]
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
            feedback = policy.render_feedback(first.verdict, self.view, style=style)
            turns.append((feedback, policy.format(second.source, self.view, style=style, previous=first.source), True))
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
        useful = {t.topic for t in taught_by(best, self.topics)}
        out: dict[str, Sample] = {}
        for _ in range(20 * self.config.selection_samples):
            if len(out) == self.config.selection_samples:
                break
            count = int(self.rng.integers(1, min(self.config.headers, len(self.topics)) + 1))
            order = self.rng.permutation(len(self.topics))[:count]
            fitting = [i for i, topic in enumerate(self.topics) if topic.topic in useful]
            if len(out) % 4 and fitting and not set(order) & set(fitting):
                # Retrieval finds what fits more often than chance: so do three calls of four.
                order[int(self.rng.integers(count))] = self._pick(fitting)
            shown = [(self.topics[i], _skill(self._phrase(self.topics[i]))) for i in order]
            names = [skill.name for topic, skill in shown if topic.topic in useful][: self.config.max_skills]
            prompt = selection.render(
                self.view, [skill for _, skill in shown], style=self.config.style, max_skills=self.config.max_skills
            )
            answer = selection.format(names, style=self.config.style)
            out.setdefault(prompt, Sample(agent="selection", kind="selection", task=self.view.name, turns=((prompt, answer, True),)))
        return list(out.values())

    def summaries(self) -> list[Sample]:
        """Calls whose prompts are those that a rollout with these two turns would give the summary agent."""
        out = []
        for lesson in lessons(
            [*self.correct, *self.wrong],
            self.topics,
            count=self.config.summary_samples,
            min_gain=self.config.min_gain,
            max_skills=self.config.max_skills,
            rng=self.rng,
        ):
            prompt = summary.render(
                self.view,
                [_skill(draft) for draft in lesson.injected],
                first_code=lesson.first.source,
                first_speedup=speedup(lesson.first),
                first_profile=lesson.first.verdict.profiled,
                best_code=lesson.best.source,
                best_speedup=speedup(lesson.best),
                best_profile=lesson.best.verdict.profiled,
                style=self.config.style,
            )
            kind = "summary_with_skill" if lesson.injected else "summary"
            answer = summary.format([lesson.draft], style=self.config.style)
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
