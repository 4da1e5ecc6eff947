"""Evaluates any policy on any tasks, chunk of tasks by chunk, so that nothing is lost and nothing is done twice.

The protocol is that of dk_jax.evaluation.heldout, seeds included: for each task one scheme is selected greedily from the library, and each
sample writes T turns. What is added: the folder remembers what is evaluated and refuses anything else; finished samples are appended to
results.jsonl after each chunk; verdicts go to a journal, by the content of task and kernel, the moment they arrive. A task that the sandbox
does not admit, and one whose prompt leaves no room for an answer, are samples without a kernel that say why.

Not here: the policies (dk_jax.evaluation.policies), scores and tables (dk_jax.evaluation.results).
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from dk_jax.agents import policy as policy_agent
from dk_jax.agents import selection
from dk_jax.evaluation import machine
from dk_jax.evaluation.policies import ANSWERS, OUT_OF_BUDGET, Policy
from dk_jax.evaluation.results import REFUSED, RESULTS, UNFIT, Result, ResultsFile, compare, save_json, summarise
from dk_jax.interop.endpoint import AnswerJournal
from dk_jax.rollout.episode import RolloutConfig, choose_schemes, policy_turns, task_view
from dk_jax.rollout.judge import Journal, Judge
from dk_jax.rollout.trajectory import Trajectory, Turn, Verdict, derive_seed
from dk_jax.skills.record import Skill
from dk_jax.tasks.task import Task
from dk_jax.train.workdir import WEIGHTS

log = logging.getLogger(__name__)
SETTINGS, SESSIONS, ADMISSION, VERDICTS = "settings.json", "sessions.json", "admission.json", "journal.jsonl"
PHASE = "eval"
"""Names the work in seeds, as in a run's own held-out evaluation: the same model says the same."""
_SHOWN = 5
_ASKED_AT_ONCE = 16


class SettingsError(ValueError):
    """The folder holds another evaluation; the message names what differs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is asked.

    Attributes:
        tasks: distinct names, in the order in which they are evaluated. samples, turns: of each.
        chunk: tasks that are sampled and judged together.
        seed: equal seeds and verdicts give equal trajectories.
        config: of the episodes. skills: of the library, on offer to the policy's selection agent.
    """

    tasks: tuple[Task, ...]
    samples: int
    turns: int
    chunk: int
    seed: int
    config: RolloutConfig
    skills: tuple[Skill, ...] = ()

    def __post_init__(self):
        if not self.tasks or len({task.name for task in self.tasks}) < len(self.tasks):
            raise ValueError(f"an evaluation takes at least one task and no name twice: {[task.name for task in self.tasks]}")
        for name in ("samples", "turns", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")

    @property
    def chunks(self) -> list[tuple[Task, ...]]:
        return [self.tasks[i : i + self.chunk] for i in range(0, len(self.tasks), self.chunk)]


# --- what a folder remembers ----------------------------------------------------------------------------------------------------------


def settings_of(cfg: ConfigDict, plan: Plan, *, policy: Mapping[str, Any], split: str, library: Mapping[str, Any]) -> dict[str, Any]:
    """All that the results depend on, as plain data: what a folder remembers and compares.

    Args:
        policy: its facts (dk_jax.evaluation.policies). library: where the skills are from.
    """
    s, c = cfg.sandbox, plan.config
    names = ("language", "form", "threads", "correctness_trials", "timing", "target_arch", "build_s", "load_s", "check_s", "time_s")
    tokens = ("max_policy_tokens", "max_selection_tokens", "max_context_tokens")
    episode = ("style", *tokens, "headers", "max_skills", "selector", "context", "use_skills")
    baselines = ["eager", *(name for name in s.baselines if name != "eager")]
    settings = {
        "policy": dict(policy),
        "split": split,
        "tasks": {task.name: _digest(task.name, task.dtype, task.reference) for task in plan.tasks},
        **{name: getattr(plan, name) for name in ("samples", "turns", "seed", "chunk")},
        "temperature": cfg.evaluation.temperature,
        "top_p": cfg.evaluation.top_p,
        "library": {**library, "skills": {k.name: _digest(k.name, k.description, k.scope, *k.tags, k.content) for k in plan.skills}},
        "episode": {name: getattr(c, name) for name in episode},
        "sandbox": {"device": s.device.partition(":")[0], "baselines": baselines, **{name: s[name] for name in names}},
        "reward": cfg.reward.to_dict(),
    }
    return json.loads(json.dumps(settings))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()[:16]


def read_settings(workdir: Path) -> dict[str, Any] | None:
    """What the folder remembers; None before anything was evaluated in it. Raises SettingsError for a file that can't be read."""
    path = workdir / SETTINGS
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"{path} can't be read ({error}): restore it, or use another --workdir") from error


def remember_settings(workdir: Path, wanted: Mapping[str, Any]) -> None:
    """Writes the settings to the folder, or checks that they are those which it was started with. As long as nothing has been answered or
    judged there, others take their place.

    Raises:
        SettingsError: names what differs.
    """
    if (workdir / "config.json").exists():
        raise SettingsError(f"{workdir} holds a run: give an evaluation a folder of its own")
    found = read_settings(workdir)
    if found is None:
        save_json(workdir / SETTINGS, wanted)
    elif differing := differences(found, wanted):
        if not any(_filled(workdir / name) for name in (RESULTS, VERDICTS, ANSWERS)):
            for name in (WEIGHTS, ADMISSION):
                (workdir / name).unlink(missing_ok=True)
            save_json(workdir / SETTINGS, wanted)
            return
        raise SettingsError(f"{workdir} holds another evaluation ({'; '.join(differing)}). Use its settings, or another --workdir")


def _filled(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """In words: what is in two settings differently. Tasks and skills are named, not quoted."""
    said = []
    a, b = ({name: part for name, part in _flat(some)} for some in (found, wanted))
    for name in sorted(a.keys() | b.keys()):
        if a.get(name) != b.get(name):
            said.append(f"{name}: {a.get(name, 'not there')} -> {b.get(name, 'not there')}")
    for name, one, other in (("tasks", found["tasks"], wanted["tasks"]), ("skills", found["library"]["skills"], wanted["library"]["skills"])):
        for verb, names in (
            ("without", [n for n in one if n not in other]),
            ("with", [n for n in other if n not in one]),
            ("of other content", [n for n in one if n in other and one[n] != other[n]]),
        ):
            if names:
                said.append(f"{name}: now {verb} {', '.join(names[:_SHOWN])}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''}")
        if one == other and list(one) != list(other):
            said.append(f"{name}: in another order")
    return said


def _flat(data: Mapping[str, Any], prefix: str = ""):
    for key, value in data.items():
        if isinstance(value, dict) and f"{prefix}{key}" not in ("tasks", "library.skills"):
            yield from _flat(value, f"{prefix}{key}.")
        elif not isinstance(value, dict):
            yield f"{prefix}{key}", value


class Sessions:
    """What was worked when, with what, in sessions.json: one entry for each start of the command.

    Args:
        device: of the sandbox.
    """

    def __init__(self, path: Path, *, device: str):
        self.path = path
        self.entries: list[dict[str, Any]] = read_sessions(path)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._own = {"begun": now, "seconds": 0.0, "judged": 0, "device": device, "machine": machine.host(), "versions": machine.versions()}

    def note(self, *, seconds: float, judged: int) -> None:
        """Of this session so far: its wall time and the verdicts that arrived."""
        self._own |= {"seconds": round(seconds, 1), "judged": judged}
        save_json(self.path, {"sessions": [*self.entries, self._own]})


def read_sessions(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["sessions"] if path.exists() else []


def summary_of(workdir: Path, **fields: Any) -> dict[str, Any]:
    """The summary of all that a folder holds. `fields`: see dk_jax.evaluation.results.summarise. Raises SettingsError: it holds no evaluation."""
    settings, results = _folder(workdir)
    path = workdir / ADMISSION
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    refused = {name: reason for name, reason in known.items() if reason and name in settings["tasks"]}
    spent = None
    if (workdir / ANSWERS).exists():
        answers = AnswerJournal(workdir / ANSWERS)
        answers.close()
        spent = {"cost": answers.spent or None, "tokens": answers.spent_tokens}
    return summarise(results, settings, sessions=read_sessions(workdir / SESSIONS), refused=refused, spent=spent, **fields)


def compared(workdir: Path, other: Path, **fields: Any) -> dict[str, Any]:
    """What the evaluation of a folder has more than that of another (dk_jax.evaluation.results.compare), over the baselines of both, and
    `settings`: what was asked differently."""
    (own, results), (theirs, others) = _folder(workdir), _folder(other)
    baselines = [name for name in own["sandbox"]["baselines"] if name in theirs["sandbox"]["baselines"]]
    found = compare(results, others, baselines, seed=own["seed"], **fields)
    return found | {"settings": differences(theirs, own)}


def _folder(workdir: Path) -> tuple[dict[str, Any], list[Result]]:
    settings = read_settings(workdir)
    if settings is None:
        raise SettingsError(f"{workdir} holds no evaluation: there is no {SETTINGS}")
    return settings, list(ResultsFile(workdir / RESULTS, read_only=True).results.values())


class VerdictJournal(Journal):
    """A journal by the content of task and kernel: a kernel is judged once, whichever sample and turn hands it in, and whatever was
    evaluated beside it."""

    def get(self, key: str) -> Verdict | None:
        return super().get(_content(key))

    def put(self, key: str, verdict: Verdict) -> None:
        super().put(_content(key), verdict)


def _content(key: str) -> str:
    """The digest at the end of a key of dk_jax.rollout.judge."""
    return key.rpartition("/")[2]


def refusals(judge: Any, tasks: Sequence[Task], path: Path, *, progress: Callable[[int], None] | None = None) -> dict[str, str]:
    """Why the sandbox does not admit tasks that were read from files, by name; asked once, then read from `path`. Such tasks are evaluated
    as ones without a kernel, not left out.

    Args:
        judge: has `refusals` (dk_jax.rollout.judge.SandboxJudge).
        progress: called with the number of tasks that were asked about.
    """
    known: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    new = [task for task in tasks if task.spec is None and task.name not in known]
    for start in range(0, len(new), _ASKED_AT_ONCE):
        part = new[start : start + _ASKED_AT_ONCE]
        found = judge.refusals(part)
        known |= {task.name: found.get(task.name, "") for task in part}
        save_json(path, known)
        if progress is not None:
            progress(len(part))
    return {task.name: known[task.name] for task in tasks if known.get(task.name)}


# --- the work -------------------------------------------------------------------------------------------------------------------------


def evaluate(
    policy: Policy,
    judge: Judge,
    plan: Plan,
    results: ResultsFile,
    *,
    refused: Mapping[str, str] | None = None,
    progress: Callable[[int], None] | None = None,
    chunk_done: Callable[[], None] | None = None,
) -> Counter[str]:
    """Makes all results that are not there, chunk by chunk, and appends them.

    A chunk of which anything is missing is asked for whole, so that a sampler sees the same batch again; what is there already stays.

    Args:
        refused: tasks that the sandbox does not admit, and why.
        progress: called with the number of newly judged turns. chunk_done: called when a chunk's results are in the file.

    Returns:
        Samples that could not be finished, by reason: what the same command may still get. Where a budget is spent no further chunk
        is begun, and only those of the chunks that were begun are counted.
    """
    unfinished: Counter[str] = Counter()
    for part in plan.chunks:
        if all((task.name, sample) in results.results for task in part for sample in range(plan.samples)):
            continue
        made, open_ = _evaluate_chunk(policy, judge, part, plan, refused or {}, progress)
        results.append(made)
        unfinished.update(open_)
        if chunk_done is not None:
            chunk_done()
        if open_[OUT_OF_BUDGET]:
            break
    return unfinished


def _evaluate_chunk(
    policy: Policy, judge: Judge, tasks: Sequence[Task], plan: Plan, refused: Mapping[str, str], progress: Callable[[int], None] | None
) -> tuple[list[Result], Counter[str]]:
    c, by_task = plan.config, {task.name: task for task in tasks}

    def seed_of(trajectory: Trajectory, turn: int) -> int:
        return derive_seed(plan.seed, PHASE, trajectory.agent, trajectory.task, trajectory.member, turn)

    problems = {task.name: (REFUSED, f"the sandbox does not admit this task: {refused[task.name]}") for task in tasks if task.name in refused}
    for task in tasks:
        if task.name not in problems and not policy.speaker.fits(_prompt(task, (), plan), c.max_policy_tokens):
            said = f"its prompt and {c.max_policy_tokens} new tokens pass rollout.max_context_tokens={c.max_context_tokens}"
            problems[task.name] = UNFIT, said
    asked = [task for task in tasks if task.name not in problems]
    skills, unchosen = _choose(policy, asked, plan, seed_of)
    trajectories = [
        Trajectory(
            agent="policy", task=task.name, group=task.name, scheme=0, member=sample, skills=tuple(s.name for s in skills.get(task.name, ()))
        )
        for task in tasks
        for sample in range(plan.samples)
    ]
    spoken = [t for t in trajectories if t.task not in problems and t.task not in unchosen]
    if spoken:
        policy_turns(
            policy.speaker, judge, spoken, [by_task[t.task] for t in spoken], [skills.get(t.task, ()) for t in spoken], config=c,
            seed_of=seed_of, phase=PHASE, turns=plan.turns, progress=progress,
        )  # fmt: skip
    made, open_ = [], Counter(unchosen[t.task] for t in trajectories if t.task in unchosen)
    for t in trajectories:
        if t.task in unchosen:
            continue
        if t.task in problems:
            _without_kernel(t, *problems[t.task], c)
        elif reason := policy.unfinished(t):
            open_[reason] += 1
            continue
        task, usage = by_task[t.task], policy.usage(t)
        made.append(Result(trajectory=t, level=task.level, family=task.family, split=task.split, **dataclasses.asdict(usage)))
    policy.forget()
    return made, open_


def _prompt(task: Task, skills: Sequence[Skill], plan: Plan) -> str:
    """Of the first turn, as dk_jax.rollout.episode.policy_turns writes it."""
    c = plan.config
    view = task_view(task, language=c.language, form=c.form)
    return policy_agent.render_first(view, skills, style=c.style, summarise=c.context == "kernels" and plan.turns > 1)


def _without_kernel(trajectory: Trajectory, stop: str, reason: str, config: RolloutConfig) -> None:
    verdict = Verdict.without_kernel(reason, penalty=-config.failure_reward)
    trajectory.turns.append(Turn(text="", stop=stop, error=reason, verdict=verdict, reward=verdict.reward))
    trajectory.rewards.append(verdict.reward)


def _choose(
    policy: Policy, tasks: Sequence[Task], plan: Plan, seed_of: Callable[[Trajectory, int], int]
) -> tuple[dict[str, tuple[Skill, ...]], dict[str, str]]:
    """The skills of each task, and the tasks for which the selection agent could not be asked, with the reason."""
    if policy.greedy is None or not plan.skills or not plan.config.use_skills:
        return {}, {}
    c, offered = plan.config, []
    for task in tasks:
        bare = selection.render(task_view(task, language=c.language, form=c.form), [], style=c.style, max_skills=c.max_skills)
        if c.selector != "llm" or policy.greedy.fits(bare, c.max_selection_tokens):
            offered.append(task)
        else:
            log.warning("task %s gets no skills: the selection agent's prompt does not fit", task.name)
    calls, schemes = choose_schemes(policy.greedy, offered, plan.skills, config=c, samples=1, seed_of=seed_of) if offered else ([], {})
    unchosen = {call.task: reason for call in calls if (reason := policy.unfinished(call))}
    by_name, chosen = {skill.name: skill for skill in plan.skills}, {}
    for task in offered:
        own = [by_name[name] for name in schemes.get((task.name, 0), ())]
        while own and not policy.speaker.fits(_prompt(task, own, plan), c.max_policy_tokens):
            log.warning("task %s: skill %s is left out, the prompt with it leaves no room for an answer", task.name, own[-1].name)
            own.pop()
        chosen[task.name] = tuple(own)
    return chosen, unchosen
