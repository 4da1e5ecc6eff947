"""The cold start's third source: a teacher behind an endpoint plays the three agents, and what proves good is kept to be imitated.

For each task, as in one step of RL (dk_jax.rollout.episode):

    1. where skills are known: k selection calls over the headers that retrieval finds
    2. n conversations of T turns without skills, and n with each set of skills that was chosen; every turn is judged
    3. s summaries of the conversation without and of the one with skills that improved most, if one improved enough

Tasks go in rounds of a fixed size, in their order; skills that were proposed well in a round are known from the next one on. So what is
asked depends on the answers and verdicts of earlier rounds alone, and not on which came first: with both in their journals an
interrupted run asks and judges nothing twice but what was in flight, and a run over more tasks goes on where one over fewer has ended.

Not here: proof of the proposed skills by execution (dk_jax.rollout.verify), filters for variety.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from dk_jax.interop.endpoint import UNASKED, Endpoint, EndpointError
from dk_jax.rollout.episode import RolloutConfig, choose_schemes, policy_turns, summarise, task_view, triggers
from dk_jax.rollout.judge import Judge
from dk_jax.rollout.trajectory import Trajectory
from dk_jax.sft.samples import Sample
from dk_jax.sft.teacher_samples import STYLE, Form, Provenance, TaughtSample, answer_form, policy_samples, selection_sample, summary_sample
from dk_jax.sft.teacher_speaker import EndpointSpeaker, Exchange
from dk_jax.skills.record import Provenance as SkillProvenance
from dk_jax.skills.record import Skill, SkillDraft
from dk_jax.tasks.task import Task

LOOK_S = 0.5
"""An interrupt that comes the moment before a thread begins to wait is seen when it wakes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """What is asked for.

    Attributes:
        rollout: numbers, limits and style of the episodes, whose context is that of the model that is to learn: `rollouts` (n), `turns`
            (T), `selections` (k), `summaries` (s), ...
        max_tokens: longest answer of the teacher, reasoning included.
        temperature, top_p: of all its answers; None leaves the endpoint its own.
        form: how answers stand in samples, see dk_jax.sft.teacher_samples.
        round_tasks: tasks of a round.
        grow: skills that summaries propose are known from the next round on.
        workers: conversations at once.
    """

    rollout: RolloutConfig
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    form: Form = "code"
    round_tasks: int = 8
    grow: bool = True
    workers: int = 16

    def __post_init__(self):
        if self.rollout.style != STYLE:
            raise ValueError(f"the style is {self.rollout.style!r}: a teacher reads prompts of style {STYLE!r} alone")
        for name, value in {"round_tasks": self.round_tasks, "workers": self.workers, "max_tokens": self.max_tokens}.items():
            if value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spoken:
    """A finished trajectory with what was said in it. `known`: the skills there were when it began (summaries)."""

    trajectory: Trajectory
    said: tuple[Exchange, ...]
    known: tuple[Skill, ...] = ()


@dataclasses.dataclass(kw_only=True)
class Teacher:
    """Collects samples from an endpoint.

    Attributes:
        library: skills that are known from the beginning.
        accepted: proposed ones that joined them, in order.
        spoken: all finished trajectories, in no particular order.
        tasks_done: of finished rounds. planned: conversations of the rounds that began.
        changed: called, by any thread but by one at a time, after each trajectory and round.
    """

    endpoint: Endpoint
    judge: Judge
    config: TeacherConfig
    library: Sequence[Skill] = ()
    changed: Callable[[], None] = lambda: None
    accepted: list[Skill] = dataclasses.field(default_factory=list, init=False)
    spoken: list[Spoken] = dataclasses.field(default_factory=list, init=False)
    tasks_done: int = dataclasses.field(default=0, init=False)
    planned: int = dataclasses.field(default=0, init=False)
    _order: dict[str, int] = dataclasses.field(default_factory=dict, init=False, repr=False)
    _lock: Any = dataclasses.field(default_factory=threading.RLock, init=False, repr=False)

    def teach(self, tasks: Sequence[Task], *, timed: Callable[[Task], bool] = lambda task: True) -> None:
        """Goes through the tasks; may be called once. Ends without an error where the budget does, after the round that it ended in.

        Args:
            tasks: distinct names. timed: whose kernels are timed; those of others are judged for correctness alone, and have no summaries.

        Raises:
            EndpointError, SandboxUnavailable, ...: and also then `samples` has what came before.
        """
        self._order = {task.name: i for i, task in enumerate(tasks)}
        if len(self._order) < len(tasks):
            raise ValueError("the tasks of a teacher must have distinct names")
        for start in range(0, len(tasks), self.config.round_tasks):
            if self.budget_spent:
                return
            part = tasks[start : start + self.config.round_tasks]
            self._round(part, {task.name for task in part if timed(task)})
            self.tasks_done += len(part)
            self.changed()

    @property
    def budget_spent(self) -> bool:
        """Whether something was not asked for want of money or tokens."""
        return self.endpoint.tally.problems[UNASKED] > 0

    def known(self) -> list[Skill]:
        """The library's skills and the accepted ones."""
        return [*self.library, *self.accepted]

    def _round(self, tasks: Sequence[Task], timed: set[str]) -> None:
        known, c = self.known(), self.config.rollout
        by_name = {skill.name: skill for skill in known}
        by_task = {task.name: task for task in tasks}
        sets = self._in_parallel(lambda task: self._choose(task, known), [(task,) for task in tasks])
        talks = [
            (task, skills, member)
            for task, chosen in zip(tasks, sets, strict=True)
            for skills in ((), *chosen)
            for member in range(c.rollouts)
        ]
        self.planned += len(talks)
        self._in_parallel(
            lambda task, skills, member: self._talk(task, [by_name[name] for name in skills], member, task.name in timed), talks
        )
        own = [s.trajectory for s in self._sorted("policy") if s.trajectory.task in by_task and s.trajectory.turns]
        improved = [
            trigger
            for with_skills in (False, True)
            for trigger in triggers(
                [t for t in own if bool(t.skills) == with_skills], alpha=c.alpha, beta=c.beta, limit=len(tasks) if c.use_skills else 0
            )
        ]
        self._in_parallel(lambda trigger: self.summarise(trigger, by_task, known), [(trigger,) for trigger in improved])
        if self.config.grow:
            for s in self._sorted("summary"):
                if s.trajectory.task in by_task:
                    _, drafts, _ = self._summary(s, [*known, *self.accepted])
                    where = SkillProvenance(task=s.trajectory.task, rollouts=(s.trajectory.group,))
                    self.accepted += [Skill.from_draft(draft, language=c.language, provenance=where) for draft in drafts]

    def _speaker(self, **fields: Any) -> EndpointSpeaker:
        c = self.config
        return EndpointSpeaker(
            endpoint=self.endpoint, max_tokens=c.max_tokens, max_context_tokens=c.rollout.max_context_tokens, temperature=c.temperature,
            top_p=c.top_p, **fields,
        )  # fmt: skip

    def _choose(self, task: Task, known: Sequence[Skill]) -> list[tuple[str, ...]]:
        """The distinct non-empty sets of skills that were chosen for a task."""
        speaker, c = self._speaker(), self.config.rollout
        calls, schemes = choose_schemes(speaker, [task], known, config=c, samples=c.selections, seed_of=_sample_of)
        for call in calls:
            self._finish(Spoken(trajectory=call, said=tuple(speaker.conversation(call))))
        return sorted({names for names in schemes.values() if names})

    def _talk(self, task: Task, skills: Sequence[Skill], member: int, timed: bool) -> None:
        c = self.config.rollout
        view, fresh = task_view(task, language=c.language, form=c.form), c.context == "kernels"
        speaker = self._speaker(shown=answer_form(view, form=self.config.form, summarise=fresh and c.turns > 1))
        names = tuple(skill.name for skill in skills)
        trajectory = Trajectory(agent="policy", task=task.name, group=task.name, member=member, skills=names, timed=timed)
        policy_turns(
            speaker, self.judge, [trajectory], [task], [skills], config=c, seed_of=_sample_of,
            phase=f"teacher/{'timed' if timed else 'checked'}/{task.name}/{_digest(names)}/{member}", turns=c.turns, timed=timed,
        )  # fmt: skip
        self._finish(Spoken(trajectory=trajectory, said=tuple(speaker.conversation(trajectory))))

    def summarise(self, trigger: Trajectory, tasks: dict[str, Task], known: Sequence[Skill]) -> None:
        speaker, by_name = self._speaker(), {skill.name: skill for skill in known}
        for call in summarise(speaker, trigger, tasks, by_name, config=self.config.rollout, seed_of=_sample_of):
            said = tuple(speaker.conversation(call.trajectory))
            self._finish(Spoken(trajectory=call.trajectory, said=said, known=tuple(known)))

    def _finish(self, spoken: Spoken) -> None:
        with self._lock:
            self.spoken.append(spoken)
            self.changed()

    def _in_parallel(self, function: Callable[..., Any], arguments: Sequence[tuple]) -> list[Any]:
        """Results in order. An error ends all: what the endpoint has in flight is waited for and kept, but not on an interrupt."""
        with concurrent.futures.ThreadPoolExecutor(max_workers=self.config.workers) as pool:
            futures: list[concurrent.futures.Future] = []
            try:
                for own in arguments:  # within the try: an interrupt may come here already
                    futures.append(pool.submit(function, *own))
                waiting = set(futures)
                while waiting:
                    done, waiting = concurrent.futures.wait(waiting, timeout=LOOK_S, return_when=concurrent.futures.FIRST_COMPLETED)
                    for future in done:
                        future.result()
            except BaseException as error:
                for future in futures:
                    future.cancel()
                if not isinstance(error, Exception):
                    self.endpoint.abort()
                if not isinstance(error, EndpointError):
                    self.judge.abort()
                raise
        return [future.result() for future in futures]

    # --- what is kept -----------------------------------------------------------------------------------------------------------------

    def _sorted(self, agent: str) -> list[Spoken]:
        """Finished trajectories of an agent in the order of tasks, skills and samples."""
        with self._lock:
            own = [s for s in self.spoken if s.trajectory.agent == agent]
        return sorted(own, key=lambda s: (self._order[s.trajectory.task], s.trajectory.skills, s.trajectory.scheme, s.trajectory.member))

    def samples(self) -> list[TaughtSample]:
        """What there is to imitate so far, no two alike, in the order of tasks: the same for the same answers and verdicts."""
        c, found = self.config, []
        for s in self._sorted("policy"):
            t, fresh = s.trajectory, c.rollout.context == "kernels"
            outcomes, speedups = (tuple(getattr(v, name) for v in t.verdicts) for name in ("outcome", "speedup"))
            for sample, part in policy_samples(t, s.said, fresh=fresh):
                where = Provenance.of(self._host, s.said[part], skills=t.skills, outcomes=outcomes[part], speedups=speedups[part])
                found.append((t.task, TaughtSample(sample=sample, provenance=where)))
        for s in self._sorted("selection"):
            sample, note = self._selection(s)
            if sample is not None:
                where = Provenance.of(self._host, s.said, skills=s.trajectory.shown, note=note)
                found.append((s.trajectory.task, TaughtSample(sample=sample, provenance=where)))
        for s in self._sorted("summary"):
            sample, _, _ = self._summary(s, s.known)
            if sample is not None:
                where = Provenance.of(self._host, s.said, skills=s.trajectory.skills)
                found.append((s.trajectory.task, TaughtSample(sample=sample, provenance=where)))
        distinct = {one.sample: one for _, one in sorted(found, key=lambda pair: self._order[pair[0]])[::-1]}
        return list(distinct.values())[::-1]

    @property
    def _host(self) -> str:
        return self.endpoint.config.host

    def _selection(self, s: Spoken) -> tuple[Sample | None, str]:
        """A selection call's sample, and what speaks for it.

        Kept is a choice whose conversations were judged, at least one kernel correct, and whose selection advantage (DESIGN 3.4: the
        mean over the conversations of the best turn's reward, less the mean of that over the task's other sets of skills, the empty one
        among them) is not negative.
        """
        t, c = s.trajectory, self.config
        sample = selection_sample(t, s.said, max_skills=c.rollout.max_skills, form=c.form)
        rewards, correct = self._outcomes(t.task)
        others = [reward for names, reward in rewards.items() if names != t.skills]
        if sample is None or not others or not correct.get(t.skills):
            return None, ""
        advantage = rewards[t.skills] - sum(others) / len(others)
        return (sample if advantage >= 0 else None), f"selection advantage {advantage:.3f} over {len(others)} other sets"

    def _outcomes(self, task: str) -> tuple[dict[tuple[str, ...], float], Counter[tuple[str, ...]]]:
        """For each set of skills that a task's conversations had: the mean of the best turn's reward, and the number of correct kernels."""
        rewards: dict[tuple[str, ...], list[float]] = {}
        correct: Counter[tuple[str, ...]] = Counter()
        for s in self._sorted("policy"):
            if s.trajectory.task == task and s.trajectory.rewards:
                rewards.setdefault(s.trajectory.skills, []).append(max(s.trajectory.rewards))
                correct[s.trajectory.skills] += sum(v.correct for v in s.trajectory.verdicts)
        return {names: sum(found) / len(found) for names, found in rewards.items()}, correct

    def problems_of(self, s: Spoken) -> list[str]:
        """What was wrong with a summary call or with the skills in it."""
        return self._summary(s, s.known)[2]

    def _summary(self, s: Spoken, known: Sequence[Skill | SkillDraft]) -> tuple[Sample | None, tuple[SkillDraft, ...], list[str]]:
        return summary_sample(s.trajectory, s.said, known=known, form=self.config.form)


def _sample_of(trajectory: Trajectory, turn: int) -> int:
    """Which of several answers to one question a trajectory stands for."""
    return trajectory.scheme if trajectory.agent == "selection" else trajectory.member


def _digest(names: tuple[str, ...]) -> str:
    return hashlib.sha256("\x1f".join(names).encode()).hexdigest()[:12] if names else "none"
