"""One step's episodes: selection -> schemes -> multi-turn policy rollouts -> summary -> verification (DESIGN 3.3).

For each of B tasks the selection agent draws k skill sets and the null scheme is added; each scheme gets n rollouts of T
turns, every turn judged by the sandbox. Tasks that are only checked, which takes a fifth of the time, get as many rollouts
of one turn without skills. A rollout that improved on itself triggers s summaries; each new skill is verified by paired
arms before the step ends. All timed tasks of a step are sampled together and judged together, then all that are checked.

What it does not do: advantages (dk_jax.train.credit), the update, or committing skills (the caller does, with the step's
checkpoint).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Literal

from dk_jax.agents import policy, selection, summary
from dk_jax.agents.text import TaskView
from dk_jax.rollout.judge import Judge
from dk_jax.rollout.speaker import Speaker
from dk_jax.rollout.trajectory import Trajectory, derive_seed
from dk_jax.rollout.turns import judge_last_turns
from dk_jax.rollout.verify import Call, Proposal, Verifier
from dk_jax.skills.record import Skill
from dk_jax.skills.retrieval import SkillIndex
from dk_jax.tasks.task import Task

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The numbers of one episode; letters as in DESIGN 3.3."""

    selections: int  # k
    rollouts: int  # n
    turns: int  # T
    summaries: int  # s
    style: str
    language: str
    form: str
    max_policy_tokens: int
    max_selection_tokens: int
    max_summary_tokens: int
    max_context_tokens: int
    headers: int = 20
    max_skills: int = 3
    format_penalty: float = 0.1
    alpha: float = 1.2
    beta: float = 1.2
    max_triggers: int = 2
    selector: Literal["llm", "bm25"] = "llm"  # who chooses a scheme's skills: the agent, or retrieval alone
    context: Literal["full", "kernels"] = "full"  # what a later turn sees: all that was said, or a fresh prompt that tells of it
    use_skills: bool = True  # False: no selection, no injection, no summaries
    failure_reward: float = 0.0  # of a message without a kernel: as the sandbox's for a kernel that fails


@dataclasses.dataclass(kw_only=True)
class StepRollouts:
    """All that one step collected."""

    trajectories: list[Trajectory]
    proposals: list[Proposal]

    def of(self, agent: str) -> list[Trajectory]:
        return [t for t in self.trajectories if t.agent == agent]


def task_view(task: Task, *, language: str, form: str) -> TaskView:
    """What the prompts say of a task."""
    return TaskView(
        name=task.name,
        level=task.level,
        reference=task.reference,
        compact=task.compact,
        language=language,
        form=form,
        signature=task.cpp_signature if form == "kernel" else "",
    )


def policy_turns(
    speaker: Speaker,
    judge: Judge,
    trajectories: Sequence[Trajectory],
    tasks: Sequence[Task],
    skills: Sequence[Sequence[Skill]],
    *,
    config: RolloutConfig,
    seed_of: Callable[[Trajectory, int], int],
    phase: str,
    turns: int,
    timed: bool = True,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Runs all turns of the given policy trajectories together, in place: sample, judge (with `timed=False` for correctness
    alone), feed back. With `config.context` "kernels" a later turn answers a fresh prompt, see `_retold`."""
    views = [task_view(task, language=config.language, form=config.form) for task in tasks]
    fresh = config.context == "kernels"
    alive = list(range(len(trajectories)))
    for turn in range(turns):
        prompts = []
        for i in alive:
            if turn == 0:
                prompts.append(policy.render_first(views[i], skills[i], style=config.style, summarise=fresh and turns > 1))
            elif fresh:
                prompts.append(_retold(speaker, trajectories[i], views[i], skills[i], config=config))
            else:
                prompts.append(policy.render_feedback(trajectories[i].turns[-1].verdict, views[i], style=config.style))
        room = speaker.speak(
            [trajectories[i] for i in alive],
            prompts,
            [seed_of(trajectories[i], turn) for i in alive],
            max_new=config.max_policy_tokens,
            keep=turn + 1 < turns and not fresh,
            fresh=fresh,
        )
        alive = [i for i, fits in zip(alive, room, strict=True) if fits]
        judge_last_turns(
            judge,
            [trajectories[i] for i in alive],
            [tasks[i] for i in alive],
            [trajectories[i].turns[-2].source if turn > 0 else None for i in alive],
            config=config,
            phase=f"{phase}/turn{turn}",
            timed=timed,
            progress=progress,
        )


def _retold(speaker: Speaker, trajectory: Trajectory, view: TaskView, skills: Sequence[Skill], *, config: RolloutConfig) -> str:
    """A later turn's fresh prompt: the task, the kernels so far with their authors' summaries and verdicts, nothing of the reasoning.
    Where they do not fit into the context, the oldest are left out."""
    attempts = [
        policy.Attempt(source=turn.source, summary=policy.own_summary(turn.text, style=config.style), verdict=turn.verdict)
        for turn in trajectory.turns
    ]
    while True:
        prompt = policy.render_first(view, skills, style=config.style, attempts=attempts, summarise=True)
        if len(attempts) == 1 or speaker.fits(prompt, config.max_policy_tokens):
            return prompt
        attempts = attempts[1:]


def choose_schemes(
    speaker: Speaker,
    tasks: Sequence[Task],
    active: Sequence[Skill],
    *,
    config: RolloutConfig,
    samples: int,
    seed_of: Callable[[Trajectory, int], int],
    index: SkillIndex | None = None,
) -> tuple[list[Trajectory], dict[tuple[str, int], tuple[str, ...]]]:
    """The selection agent's trajectories, and the skills of each (task, scheme), `samples` schemes a task.

    With `config.selector` "bm25" there are no trajectories: each of a task's schemes is the first `max_skills` that retrieval finds, or
    as many of them as fit into the context. Without skills, or without `use_skills`, both are empty. `index`: over the skills of an
    earlier call, made to follow `active`.
    """
    if not active or not config.use_skills:
        return [], {}
    index, schemes = SkillIndex() if index is None else index, {}
    index.follow(active)
    if config.selector == "llm":
        chosen = select_skills(speaker, tasks, index, config=config, samples=samples, seed_of=seed_of)
        return chosen, {(t.task, t.scheme): t.skills for t in chosen}
    for task in tasks:
        view = task_view(task, language=config.language, form=config.form)
        skills = index.top(selection.query(view), config.max_skills)
        while skills and not speaker.fits(policy.render_first(view, skills, style=config.style), config.max_policy_tokens):
            skills = skills[:-1]
        schemes |= {(task.name, j): tuple(skill.name for skill in skills) for j in range(samples)}
    return [], schemes


def select_skills(
    speaker: Speaker,
    tasks: Sequence[Task],
    index: SkillIndex,
    *,
    config: RolloutConfig,
    samples: int,
    seed_of: Callable[[Trajectory, int], int],
) -> list[Trajectory]:
    """BM25 headers -> the selection agent's choices; one trajectory a sample, `skills` holding what it chose.

    A malformed call chooses nothing and carries its error in the turn; it is penalised by the caller, not rewarded as an
    empty choice (DESIGN 3.4).
    """
    trajectories, prompts = [], []
    for task in tasks:
        view = task_view(task, language=config.language, form=config.form)
        headers = index.top(selection.query(view), config.headers)
        prompt = selection.render(view, headers, style=config.style, max_skills=config.max_skills)
        while headers and not speaker.fits(prompt, config.max_selection_tokens):
            headers = headers[:-1]
            prompt = selection.render(view, headers, style=config.style, max_skills=config.max_skills)
        for j in range(samples):
            shown = tuple(skill.name for skill in headers)
            trajectories.append(Trajectory(agent="selection", task=task.name, group=task.name, scheme=j, shown=shown))
            prompts.append(prompt)
    speaker.speak(trajectories, prompts, [seed_of(t, 0) for t in trajectories], max_new=config.max_selection_tokens)
    for trajectory in trajectories:
        turn = trajectory.turns[-1]
        call = selection.parse(turn.text, trajectory.shown, max_skills=config.max_skills, style=config.style)
        turn.form, turn.error = call.form, call.error or ("" if turn.stop == "eos" else "the call was cut short")
        trajectory.skills = () if turn.error else tuple(call.names)
    return trajectories


def summarise(
    speaker: Speaker, trigger: Trajectory, tasks: dict[str, Task], by_name: dict[str, Skill], *, config: RolloutConfig, seed_of
) -> list[Call]:
    """The summary agent's calls on one rollout that earned them, `config.summaries` of them; none where the prompt does not fit.

    A call that can't be read, or of which no skill may be verified, carries its error in the turn.
    """
    view = task_view(tasks[trigger.task], language=config.language, form=config.form)
    first, best = trigger.turns[0], trigger.best
    prompt = summary.render(
        view,
        [by_name[name] for name in trigger.skills],
        first_code=first.source or "",
        first_speedup=first.verdict.speedup,
        first_profile=first.verdict.profiled,
        best_code=best.source,
        best_speedup=best.verdict.speedup,
        best_profile=best.verdict.profiled,
        style=config.style,
    )
    if not speaker.fits(prompt, config.max_summary_tokens):
        log.warning("a rollout of task %s is not summarised: two kernels and its skills do not fit into the context", trigger.task)
        return []
    group = f"{trigger.task}/scheme{trigger.scheme}/rollout{trigger.member}"
    calls = [
        Trajectory(agent="summary", task=trigger.task, group=group, scheme=trigger.scheme, member=m, skills=trigger.skills)
        for m in range(config.summaries)
    ]
    speaker.speak(calls, [prompt] * len(calls), [seed_of(t, 0) for t in calls], max_new=config.max_summary_tokens)
    out = []
    for call in calls:
        turn = call.turns[-1]
        parsed = summary.parse(turn.text, style=config.style, count_tokens=lambda text: len(speaker.codec.encode(text)))
        unread = parsed.error or ("" if turn.stop == "eos" else "the call was cut short")
        turn.form, turn.error = parsed.form, unread or _all_refused(parsed)
        drafts = [*parsed.drafts, *(draft for draft, _ in parsed.refused)]
        out.append(Call(trajectory=call, trigger=trigger, drafts=[] if unread else drafts))
    return out


def _all_refused(notes: summary.Notes) -> str:
    """Why a call that proposes skills proposes none that may be verified: as malformed as one that can't be read. "" otherwise."""
    if notes.drafts or not notes.refused:
        return ""
    return "no skill of it may be verified: " + "; ".join(f"{draft.name}: {problems[0]}" for draft, problems in notes.refused)


def triggers(trajectories: Sequence[Trajectory], *, alpha: float, beta: float, limit: int) -> list[Trajectory]:
    """Rollouts that earned a summary: best turn >= alpha x first turn and >= beta x eager (DESIGN 3.4).

    At most one a task (its largest gain) and `limit` in all, largest gain first.
    """
    best: dict[str, tuple[float, Trajectory]] = {}
    for trajectory in trajectories:
        top = trajectory.best
        if top is None or not trajectory.turns:
            continue
        first, reached = trajectory.turns[0].verdict.earned_speedup, top.verdict.earned_speedup
        gain = reached / max(first, 0.1)
        if top is not trajectory.turns[0] and reached >= max(alpha * first, beta):
            if trajectory.task not in best or gain > best[trajectory.task][0]:
                best[trajectory.task] = (gain, trajectory)
    ranked = sorted(best.values(), key=lambda pair: -pair[0])
    return [trajectory for _, trajectory in ranked[:limit]]


def collect(
    speaker: Speaker,
    judge: Judge,
    verifier: Verifier,
    tasks: Sequence[Task],
    active: Sequence[Skill],
    *,
    config: RolloutConfig,
    seed: int,
    step: int,
    checked: Sequence[Task] = (),
    progress: Callable[[int], None] | None = None,
    index: SkillIndex | None = None,
) -> StepRollouts:
    """One step's rollouts for all agents.

    Args:
        speaker: sampler, parameters and codec.
        judge: where candidates go.
        verifier: proves proposed skills.
        tasks: the B tasks of the step (distinct names).
        active: skills of the library as of the last commit.
        config, seed, step: equal values and equal verdicts give equal rollouts.
        checked: further tasks, whose kernels are checked and not timed.
        progress: called with the number of newly judged turns.
        index: of an earlier step, which spares making a new one over `active`.
    """
    names = [t.name for t in (*tasks, *checked)]
    if len(set(names)) != len(names):
        raise ValueError(f"the tasks of a step must be distinct: {names}")
    by_name = {skill.name: skill for skill in active}
    by_task = {task.name: task for task in (*tasks, *checked)}

    def seed_of(trajectory: Trajectory, turn: int) -> int:
        return derive_seed(
            seed, "rl", step, trajectory.agent, trajectory.task, trajectory.group, trajectory.scheme, trajectory.member, turn
        )

    chosen, sets = choose_schemes(speaker, tasks, active, config=config, samples=config.selections, seed_of=seed_of, index=index)
    rollouts = [
        Trajectory(
            agent="policy",
            task=task.name,
            group=task.name,
            scheme=scheme,
            member=member,
            skills=sets.get((task.name, scheme), ()),
        )
        for task in tasks
        for scheme in range(config.selections + 1)
        for member in range(config.rollouts)
    ]
    policy_turns(
        speaker,
        judge,
        rollouts,
        [by_task[t.task] for t in rollouts],
        [[by_name[name] for name in t.skills] for t in rollouts],
        config=config,
        seed_of=seed_of,
        phase=f"rl/{step}",
        turns=config.turns,
        progress=progress,
    )
    untimed = [
        Trajectory(agent="policy", task=task.name, group=task.name, member=member, timed=False)
        for task in checked
        for member in range((config.selections + 1) * config.rollouts)
    ]
    if untimed:
        policy_turns(
            speaker,
            judge,
            untimed,
            [by_task[t.task] for t in untimed],
            [()] * len(untimed),
            config=config,
            seed_of=seed_of,
            phase=f"rl/{step}/checked",
            turns=1,
            timed=False,
            progress=progress,
        )
    calls: list[Call] = []
    limit = config.max_triggers if config.use_skills else 0
    for trigger in triggers(rollouts, alpha=config.alpha, beta=config.beta, limit=limit):
        calls += summarise(speaker, trigger, by_task, by_name, config=config, seed_of=seed_of)
    proposals = verifier.verify(
        speaker,
        judge,
        calls,
        by_task,
        active,
        config=config,
        views=lambda task: task_view(task, language=config.language, form=config.form),
        seed=seed,
        step=step,
    )
    return StepRollouts(trajectories=chosen + rollouts + untimed + [call.trajectory for call in calls], proposals=proposals)
