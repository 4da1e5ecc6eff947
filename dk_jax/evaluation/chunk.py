"""One chunk of an evaluation: the schemes of its tasks, its samples' turns, and what they took.

By default one scheme a task is selected greedily from the library; a selection search (dk_jax.search.schemes) has several, to which the samples
are dealt out in turn. A task that the sandbox does not admit, and one whose prompt leaves no room for an answer, are samples without a kernel
that say why.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dk_jax.agents import policy as policy_agent
from dk_jax.agents import selection
from dk_jax.evaluation.policies import Policy
from dk_jax.evaluation.results import REFUSED, UNFIT, Result
from dk_jax.evaluation.usage import Usage
from dk_jax.rollout.episode import RolloutConfig, choose_schemes, task_view
from dk_jax.rollout.judge import Judge
from dk_jax.rollout.trajectory import Trajectory, Turn, Verdict, derive_seed
from dk_jax.search.schemes import Halving, Scheme, distinct
from dk_jax.skills.record import Skill
from dk_jax.tasks.task import Task

if TYPE_CHECKING:
    from dk_jax.evaluation.harness import Plan

log = logging.getLogger(__name__)
PHASE = "eval"
"""Names the work in seeds, as in a run's own held-out evaluation: the same model says the same."""


def evaluate_chunk(
    policy: Policy,
    judge: Judge,
    tasks: Sequence[Task],
    plan: Plan,
    *,
    skills: Sequence[Skill],
    refused: Mapping[str, str],
    progress: Callable[[int], None] | None,
) -> tuple[list[Result], Counter[str]]:
    """The results of some of a plan's tasks, and the samples that have none yet, by reason.

    Args:
        skills: on offer. refused: tasks that the sandbox does not admit, and why.
        progress: called with the number of newly judged turns.
    """
    c, by_task, by_name = plan.config, {task.name: task for task in tasks}, {skill.name: skill for skill in skills}

    def seed_of(trajectory: Trajectory, turn: int) -> int:
        return derive_seed(plan.seed, PHASE, trajectory.agent, trajectory.task, trajectory.member, turn)

    problems = {task.name: (REFUSED, f"the sandbox does not admit this task: {refused[task.name]}") for task in tasks if task.name in refused}
    for task in tasks:
        if task.name not in problems and not policy.speaker.fits(_prompt(task, (), plan), c.max_policy_tokens):
            said = f"its prompt and {c.max_policy_tokens} new tokens pass rollout.max_context_tokens={c.max_context_tokens}"
            problems[task.name] = UNFIT, said
    schemes, unchosen = _choose(policy, [task for task in tasks if task.name not in problems], plan, skills, seed_of)
    trajectories, further = [], {}
    for task in tasks:
        own = schemes.get(task.name) or [Scheme()]
        for sample in range(plan.samples):
            scheme = own[sample % len(own)]
            t = Trajectory(agent="policy", task=task.name, group=task.name, scheme=scheme.index, member=sample, skills=scheme.skills)
            trajectories.append(t)
            further[task.name, sample] = list(scheme.calls) if sample < len(own) else []
    spoken = [t for t in trajectories if t.task not in problems and t.task not in unchosen]
    if spoken:
        calls = plan.search.spend(
            policy.speaker, judge, spoken, [by_task[t.task] for t in spoken], [[by_name[name] for name in t.skills] for t in spoken], config=c,
            seed_of=seed_of, phase=PHASE, turns=plan.turns, progress=progress,
        )  # fmt: skip
        for call in calls or ():
            further[call.task, call.member].append(call)
    waiting = {t.task: unchosen[t.task] for t in trajectories if t.task in unchosen}
    made, open_ = [], Counter()
    reasons = {id(t): waiting.get(t.task) or _reason(policy, t, further[t.task, t.member]) for t in trajectories if t.task not in problems}
    if isinstance(plan.search.spend, Halving):  # who went on depends on all of a task's samples: they are finished together
        together = {t.task: reasons[id(t)] for t in trajectories if reasons.get(id(t))}
        reasons = {id(t): together.get(t.task, "") for t in trajectories}
    for t in trajectories:
        if reason := reasons.get(id(t)):
            open_[reason] += 1
            continue
        task, usage = by_task[t.task], Usage(calls=(0,), tokens=(0,))
        if t.task in problems:
            _without_kernel(t, *problems[t.task], c)
        else:
            usage = policy.usage(t, further[t.task, t.member])
        about = dict(level=task.level, family=task.family, split=task.split, further=tuple(further[t.task, t.member]))
        made.append(Result(trajectory=t, **about, **dataclasses.asdict(usage)))
    policy.forget()
    return made, open_


def _reason(policy: Policy, trajectory: Trajectory, further: Sequence[Trajectory]) -> str:
    """Why a sample is not finished, or ""."""
    return next((reason for t in (trajectory, *further) if (reason := policy.unfinished(t))), "")


def _prompt(task: Task, skills: Sequence[Skill], plan: Plan) -> str:
    """Of the first turn, as dk_jax.rollout.episode.policy_turns writes it, or dk_jax.search.memory."""
    c = plan.config
    view = task_view(task, language=c.language, form=c.form)
    summarise = c.context == "kernels" and plan.turns > 1 or plan.search.name != "turns"
    return policy_agent.render_first(view, skills, style=c.style, summarise=summarise)


def _without_kernel(trajectory: Trajectory, stop: str, reason: str, config: RolloutConfig) -> None:
    verdict = Verdict.without_kernel(reason, penalty=-config.failure_reward)
    trajectory.turns.append(Turn(text="", stop=stop, error=reason, verdict=verdict, reward=verdict.reward))
    trajectory.rewards.append(verdict.reward)


def _choose(
    policy: Policy, tasks: Sequence[Task], plan: Plan, skills: Sequence[Skill], seed_of: Callable[[Trajectory, int], int]
) -> tuple[dict[str, list[Scheme]], dict[str, str]]:
    """The schemes of each task, and the tasks for which the selection agent could not be asked, with the reason."""
    c, spend = plan.config, plan.search.spend
    found = {task.name: [Scheme(index=spend.selections if isinstance(spend, Halving) else 0)] for task in tasks}
    if policy.greedy is None or not skills or not c.use_skills:
        return found, {}
    offered = []
    for task in tasks:
        bare = selection.render(task_view(task, language=c.language, form=c.form), [], style=c.style, max_skills=c.max_skills)
        if c.selector != "llm" or policy.greedy.fits(bare, c.max_selection_tokens):
            offered.append(task)
        else:
            log.warning("task %s gets no skills: the selection agent's prompt does not fit", task.name)
    if not offered:
        return found, {}
    if isinstance(spend, Halving):

        def seed_of_call(call: Trajectory, turn: int) -> int:
            return derive_seed(plan.seed, PHASE, call.agent, call.task, call.scheme, call.member, turn)

        found |= spend.propose(policy.speaker, offered, skills, config=c, seed_of=seed_of_call)
    else:
        calls, chosen = choose_schemes(policy.greedy, offered, skills, config=c, samples=1, seed_of=seed_of)
        asked = {call.task: (call,) for call in calls}
        found |= {task.name: [Scheme(skills=chosen.get((task.name, 0), ()), calls=asked.get(task.name, ()))] for task in offered}
    unchosen = {name: reason for name, own in found.items() for s in own for call in s.calls if (reason := policy.unfinished(call))}
    by_name = {skill.name: skill for skill in skills}
    for task in offered:
        fitting = []
        for scheme in found[task.name]:
            own = list(scheme.skills)
            while own and not policy.speaker.fits(_prompt(task, [by_name[name] for name in own], plan), c.max_policy_tokens):
                log.warning("task %s: skill %s is left out, the prompt with it leaves no room for an answer", task.name, own[-1])
                own.pop()
            fitting.append(dataclasses.replace(scheme, skills=tuple(own)))
        found[task.name] = distinct(fitting)
    return found, unchosen
