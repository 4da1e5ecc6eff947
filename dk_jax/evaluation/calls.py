"""Do the selection and the summary agent make calls that can be used? Asked on held-out tasks, with prompts as RL would give them.

Selection is offered what retrieval finds for the task among the cold start's skill topics (the library itself is empty before RL, and
then grows; this way all evaluations of a run ask the same). Summary is shown a first and a best kernel of the task, generated and
judged, that would have earned a summary, with and without skills in view. Each prompt is answered `samples` times. All shares are over
messages, with Wilson's 95 % interval (Wilson 1927).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dk_jax.agents import selection, summary
from dk_jax.rollout.episode import RolloutConfig, task_view
from dk_jax.rollout.speaker import Speaker
from dk_jax.rollout.trajectory import Trajectory, derive_seed
from dk_jax.sft.judged import JudgedKernel
from dk_jax.sft.lessons import lessons, speedup, taught_by
from dk_jax.sft.skill_topics import SkillTopic
from dk_jax.skills.record import Skill, SkillDraft
from dk_jax.skills.retrieval import SkillIndex
from dk_jax.skills.sameness import same_as
from dk_jax.tasks.task import Task

_SHOWN_ERRORS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """`hits` of `of` messages, and Wilson's interval of the share; (0, 1) of none."""

    hits: int
    of: int

    @property
    def share(self) -> float:
        return self.hits / self.of if self.of else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        n, z = self.of, 1.959964
        if not n:
            return 0.0, 1.0
        centre = (self.share + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(self.share * (1 - self.share) / n + z * z / (4 * n * n))
        return max(0.0, centre - half), min(1.0, centre + half)

    def plain(self) -> dict[str, float]:
        low, high = self.interval
        return {"hits": self.hits, "of": self.of, "share": self.share, "low": low, "high": high}


def evaluate_calls(
    speaker: Speaker,
    tasks: Sequence[Task],
    kernels: Sequence[JudgedKernel],
    topics: Sequence[SkillTopic],
    *,
    config: RolloutConfig,
    samples: int,
    lessons_per_task: int,
    min_gain: float,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> tuple[dict[str, Any], list[Trajectory]]:
    """Asks both agents and scores what they say.

    Args:
        tasks: held-out ones. kernels: judged and timed ones of theirs; a task without an improvement among them gives no summary prompt.
        topics: what is offered, a topic by its first phrasing.
        config: style, bounds on tokens, headers and skills.
        samples: messages a prompt.
        lessons_per_task, min_gain: summary prompts a task, and from which gain on; see dk_jax.sft.lessons.
        seed: equal values give equal messages.
        progress: called with the number of messages.

    Returns:
        Scores as plain data, and the trajectories. For each agent: `parsed` (the call can be read and obeys its rules), `whole` (the
        message was not cut short), `errors`, the commonest with their numbers, and `forms` of the calls (dk_jax.agents.call_forms). Of
        selection also `fitting`: of the skills chosen, those that the task's fastest judged kernel is an example of. Of summary also
        `usable`: of all messages, those with a skill that may be verified, and `ideas`, how many different ones those are about. An agent
        without a prompt has an empty dict.
    """
    asked: list[tuple[Trajectory, str]] = []
    fitting: dict[str, set[str]] = {}
    index = SkillIndex([Skill.from_draft(topic.phrasings[0]) for topic in topics])
    for task in tasks:
        own = [k for k in kernels if k.task == task.name]
        if best := max((k for k in own if k.verdict.correct), key=lambda k: k.verdict.speedup, default=None):
            fitting[task.name] = {topic.phrasings[0].name for topic in taught_by(best, topics)}
        asked += _selection_prompts(speaker, task, index, config=config, samples=samples)
        rng = np.random.default_rng(derive_seed(seed, "held-out-lessons", task.name))
        for number, lesson in enumerate(
            lessons(own, topics, count=lessons_per_task, min_gain=min_gain, max_skills=config.max_skills, rng=rng)
        ):
            view = task_view(task, language=config.language, form=config.form)
            prompt = summary.render(
                view, [Skill.from_draft(draft) for draft in lesson.injected],
                first_code=lesson.first.source, first_speedup=speedup(lesson.first),
                best_code=lesson.best.source, best_speedup=speedup(lesson.best),
                first_profile=lesson.first.verdict.profiled, best_profile=lesson.best.verdict.profiled, style=config.style,
            )  # fmt: skip
            if speaker.fits(prompt, config.max_summary_tokens):
                group = f"{task.name}/lesson{number}"
                asked += [(Trajectory(agent="summary", task=task.name, group=group, member=m), prompt) for m in range(samples)]
    for agent, most in (("selection", config.max_selection_tokens), ("summary", config.max_summary_tokens)):
        own = [(t, prompt) for t, prompt in asked if t.agent == agent]
        if own:
            seeds = [derive_seed(seed, "calls", agent, t.group, t.member) for t, _ in own]
            speaker.speak([t for t, _ in own], [prompt for _, prompt in own], seeds, max_new=most)
            if progress is not None:
                progress(len(own))
    trajectories = [t for t, _ in asked]
    chosen = _score_selections([t for t in trajectories if t.agent == "selection"], fitting, config)
    noted = _score_summaries([t for t in trajectories if t.agent == "summary"], speaker, config)
    return {"selection": chosen, "summary": noted}, trajectories


def _selection_prompts(
    speaker: Speaker, task: Task, index: SkillIndex, *, config: RolloutConfig, samples: int
) -> list[tuple[Trajectory, str]]:
    view = task_view(task, language=config.language, form=config.form)
    headers = index.top(selection.query(view), config.headers)
    prompt = ""
    while headers:
        prompt = selection.render(view, headers, style=config.style, max_skills=config.max_skills)
        if speaker.fits(prompt, config.max_selection_tokens):
            break
        headers = headers[:-1]
    shown = tuple(skill.name for skill in headers)
    trajectories = [Trajectory(agent="selection", task=task.name, group=task.name, member=m, shown=shown) for m in range(samples)]
    return [(t, prompt) for t in trajectories] if headers else []


def _score_selections(trajectories: Sequence[Trajectory], fitting: dict[str, set[str]], config: RolloutConfig) -> dict[str, Any]:
    chosen = good = 0
    for t in trajectories:
        turn = t.turns[-1]
        call = selection.parse(turn.text, t.shown, style=config.style, max_skills=config.max_skills)
        turn.form, turn.error = call.form, call.error or _cut(turn)
        t.skills = () if turn.error else tuple(call.names)
        if t.task in fitting:
            chosen += len(t.skills)
            good += len(set(t.skills) & fitting[t.task])
    return _scores(trajectories, fitting=Share(hits=good, of=chosen))


def _score_summaries(trajectories: Sequence[Trajectory], speaker: Speaker, config: RolloutConfig) -> dict[str, Any]:
    usable = 0
    refused: Counter[str] = Counter()
    drafts: list[SkillDraft] = []
    for t in trajectories:
        turn = t.turns[-1]
        notes = summary.parse(turn.text, style=config.style, count_tokens=lambda text: len(speaker.codec.encode(text)))
        turn.form, turn.error = notes.form, notes.error or _cut(turn)
        usable += not turn.error and bool(notes.drafts)
        if not turn.error:
            refused.update(problem for _, problems in notes.refused for problem in problems)
            drafts += notes.drafts
    found = _scores(trajectories, usable=Share(hits=usable, of=len(trajectories)))
    return found | {"refused": dict(refused.most_common(_SHOWN_ERRORS)), "ideas": ideas(drafts)} if found else found


def ideas(drafts: Sequence[SkillDraft]) -> dict[str, float]:
    """How many different ideas skills are about: a draft is of the first idea before it that says the same (dk_jax.skills.sameness).

    Returns:
        `drafts`, their number; `distinct`, the ideas; `effective`, exp of the entropy of the drafts' distribution over ideas (the number of
        equally frequent ideas that would be as diverse; Hill 1973); `largest`, the share of the commonest; all 0 without a draft.
    """
    counts: Counter[int] = Counter()
    first: list[SkillDraft] = []
    for draft in drafts:
        same = same_as(draft, first)
        if same is None:
            first.append(draft)
        counts[next(i for i, other in enumerate(first) if other is (same or draft))] += 1
    shares = [count / len(drafts) for count in counts.values()]
    effective = math.exp(-sum(p * math.log(p) for p in shares)) if shares else 0.0
    return {"drafts": len(drafts), "distinct": len(first), "effective": effective, "largest": max(shares, default=0.0)}


def _scores(trajectories: Sequence[Trajectory], **more: Share) -> dict[str, Any]:
    if not trajectories:
        return {}
    errors = Counter(t.turns[-1].error for t in trajectories if t.turns[-1].error)
    shares = {
        "parsed": Share(hits=len(trajectories) - errors.total(), of=len(trajectories)),
        "whole": Share(hits=sum(t.turns[-1].stop == "eos" for t in trajectories), of=len(trajectories)),
    } | more
    forms = Counter(t.turns[-1].form for t in trajectories if t.turns[-1].form)
    plain = {name: share.plain() for name, share in shares.items()}
    return plain | {"errors": dict(errors.most_common(_SHOWN_ERRORS)), "forms": dict(forms.most_common())}


def _cut(turn: Any) -> str:
    return "" if turn.stop == "eos" else "the call was cut short"
