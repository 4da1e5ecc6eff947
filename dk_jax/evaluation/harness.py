"""Evaluates any policy on any tasks, chunk of tasks by chunk, so that nothing is lost and nothing is done twice.

The protocol is that of dk_jax.evaluation.heldout, seeds included, unless a recipe searches otherwise (dk_jax.search). What is added: the
folder remembers what is evaluated and refuses anything else; finished samples are appended to results.jsonl after each chunk; verdicts go to
a journal, by the content of task and kernel, the moment they arrive; a library that grows as it evaluates does so chunk by chunk.

Not here: what is done with a chunk (dk_jax.evaluation.chunk), policies (dk_jax.evaluation.policies), scores and tables
(dk_jax.evaluation.results, scaling).
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from dk_jax.evaluation import machine
from dk_jax.evaluation.asked_speaker import Unanswered
from dk_jax.evaluation.chunk import evaluate_chunk
from dk_jax.evaluation.policies import ANSWERS, OUT_OF_BUDGET, Policy
from dk_jax.evaluation.results import RESULTS, Result, ResultsFile, compare, save_json, summarise
from dk_jax.evaluation.scaling import at_equal_budget, shape_of
from dk_jax.interop.endpoint import AnswerJournal
from dk_jax.rollout.episode import RolloutConfig
from dk_jax.rollout.judge import Journal, Judge
from dk_jax.rollout.trajectory import Verdict
from dk_jax.search.growth import LIBRARY, Growth, grown
from dk_jax.search.strategy import Search
from dk_jax.skills.record import Skill
from dk_jax.tasks.task import Task
from dk_jax.train import admission
from dk_jax.train.workdir import WEIGHTS

log = logging.getLogger(__name__)
SETTINGS, SESSIONS, VERDICTS = "settings.json", "sessions.json", "journal.jsonl"
ADMISSION = admission.FILE
_SHOWN = 5


class SettingsError(ValueError):
    """The folder holds another evaluation; the message names what differs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is asked.

    Attributes:
        tasks: distinct names, in the order in which they are evaluated. samples, turns: of each.
        chunk: tasks that are sampled and judged together.
        seed: equal seeds and verdicts give equal trajectories.
        config: of the episodes. skills: of the library, on offer to the policy's selection agent; where it grows, at the beginning.
        search: how turns are spent.
    """

    tasks: tuple[Task, ...]
    samples: int
    turns: int
    chunk: int
    seed: int
    config: RolloutConfig
    skills: tuple[Skill, ...] = ()
    search: Search = Search()

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
    s, c, k = cfg.sandbox, plan.config, cfg.skills
    names = ("language", "form", "threads", "correctness_trials", "timing", "target_arch", "build_s", "load_s", "check_s", "time_s")
    tokens = ("max_policy_tokens", "max_selection_tokens", "max_context_tokens")
    episode = ("style", *tokens, "headers", "max_skills", "selector", "context", "use_skills")
    summaries = ("summaries", "max_summary_tokens", "alpha", "beta", "max_triggers")
    proofs = ("verification", "pairs_per_look", "looks", "error_rate", "min_ratio", "bar", "fail_speedup", "statistic", "max_verifications")
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
        "search": plan.search.settings,
    }
    if plan.search.grow:
        settings["growth"] = {**{name: getattr(c, name) for name in summaries}, **{name: k[name] for name in proofs}}
    return json.loads(json.dumps(settings))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()[:16]


def read_settings(workdir: Path) -> dict[str, Any] | None:
    """What the folder remembers; None before anything was evaluated in it. Raises SettingsError for a file that can't be read."""
    path = workdir / SETTINGS
    if not path.exists():
        return None
    try:
        return {"search": Search().settings, **json.loads(path.read_text(encoding="utf-8"))}  # of before there were others
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
            for name in (WEIGHTS, ADMISSION, LIBRARY, f"{LIBRARY}-wal", f"{LIBRARY}-shm"):
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
    refused, marked = told_of_tasks(workdir / ADMISSION, settings["tasks"])
    spent = None
    if (workdir / ANSWERS).exists():
        answers = AnswerJournal(workdir / ANSWERS)
        answers.close()
        spent = {"cost": answers.spent or None, "tokens": answers.spent_tokens}
    growth = grown(workdir / LIBRARY, of=-(-len(settings["tasks"]) // settings["chunk"])) if settings["search"]["grow"] else None
    told = dict(refused=refused, marked=marked, spent=spent, growth=growth)
    return summarise(results, settings, sessions=read_sessions(workdir / SESSIONS), **told, **fields)


def compared(workdir: Path, other: Path, **fields: Any) -> dict[str, Any]:
    """What the evaluation of a folder has more than that of another (dk_jax.evaluation.results.compare), over the baselines of both, the
    same at an equal budget of candidates (dk_jax.evaluation.scaling.at_equal_budget), and `settings`: what was asked differently."""
    (own, results), (theirs, others) = _folder(workdir), _folder(other)
    baselines = [name for name in own["sandbox"]["baselines"] if name in theirs["sandbox"]["baselines"]]
    found = compare(results, others, baselines, seed=own["seed"], **fields)
    equal = at_equal_budget(results, others, baselines, (shape_of(own), shape_of(theirs)), seed=own["seed"], **fields)
    return found | {"equal_budget": equal, "settings": differences(theirs, own)}


def _folder(workdir: Path) -> tuple[dict[str, Any], list[Result]]:
    settings = read_settings(workdir)
    if settings is None:
        raise SettingsError(f"{workdir} holds no evaluation: there is no {SETTINGS}")
    return settings, list(ResultsFile(workdir / RESULTS, read_only=True).results.values())


class VerdictJournal(Journal):
    """A journal by the content of task and kernel: a kernel is judged once, whichever sample and turn hands it in, and whatever was
    evaluated beside it. Not so the arms of a verification, which are judged together and compared with each other alone."""

    def get(self, key: str) -> Verdict | None:
        return super().get(_content(key))

    def put(self, key: str, verdict: Verdict) -> None:
        super().put(_content(key), verdict)


def _content(key: str) -> str:
    """The digest at the end of a key of dk_jax.rollout.judge; all of it where that is of a verification."""
    return key if "/verify/" in key else key.rpartition("/")[2]


def refusals(judge: Any, tasks: Sequence[Task], path: Path, **fields: Any) -> dict[str, str]:
    """Why tasks that were read from files can't be used at all, by name; asked once, then read from `path`. Such tasks are evaluated as ones
    without a kernel, not left out; those that a trivial answer would pass are evaluated as all others, and marked.

    Args:
        judge: has `examinations` and `limits` (dk_jax.rollout.judge.SandboxJudge). fields: see dk_jax.train.admission.examined.

    Raises:
        ValueError: a line of the file is damaged.
    """
    found = admission.examined(judge, [task for task in tasks if task.spec is None], path, **fields)
    return {name: one.problem for name, one in found.items() if one.problem}


def told_of_tasks(path: Path, tasks: Collection[str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Of these tasks, by name: why one can't be used at all, and what else is to be told of one beside its scores."""
    problems = {name: entry["problem"] for name, entry in admission.AdmissionFile(path).entries.items() if name in tasks and entry["problem"]}
    return problems, {name: said for name, said in admission.marks(path).items() if name in tasks and name not in problems}


# --- the work -------------------------------------------------------------------------------------------------------------------------


def evaluate(
    policy: Policy,
    judge: Judge,
    plan: Plan,
    results: ResultsFile,
    *,
    refused: Mapping[str, str] | None = None,
    growth: Growth | None = None,
    progress: Callable[[int], None] | None = None,
    chunk_done: Callable[[], None] | None = None,
) -> Counter[str]:
    """Makes all results that are not there, chunk by chunk, and appends them.

    A chunk of which anything is missing is asked for whole, so that a sampler sees the same batch again; what is there already stays.

    Args:
        refused: tasks that the sandbox does not admit, and why.
        growth: what is on offer to each chunk, where the plan's search lets the library grow. After a chunk's results it takes in what they
            teach; a chunk that a crash left without that gets it from the file. No chunk is begun before the one before it is whole.
        progress: called with the number of newly judged turns. chunk_done: called when a chunk's results are in the file.

    Returns:
        Samples that could not be finished, by reason: what the same command may still get; what a chunk teaches counts as one. Where a
        budget is spent no further chunk is begun, and only those of the chunks that were begun are counted.
    """
    if plan.search.grow != (growth is not None):
        raise ValueError(f"evaluation.search.grow={plan.search.grow}, but the evaluation has {'a' if growth else 'no'} library that grows")
    unfinished: Counter[str] = Counter()
    for number, part in enumerate(plan.chunks):
        whole = all((task.name, sample) in results.results for task in part for sample in range(plan.samples))
        if whole and (growth is None or growth.knows(number)):
            continue
        if not whole:
            skills = plan.skills if growth is None else growth.offered(number)
            made, open_ = evaluate_chunk(policy, judge, part, plan, skills=skills, refused=refused or {}, progress=progress)
            results.append(made)
            unfinished.update(open_)
        if growth is not None and not unfinished and not growth.knows(number):
            own = [results.results[task.name, sample].trajectory for task in part for sample in range(plan.samples)]
            try:
                growth.learn(number, own, part, speaker=policy.insisting(), judge=judge, config=plan.config, seed=plan.seed)
            except Unanswered as missing:
                unfinished[missing.reason] += 1
            policy.forget()
        if chunk_done is not None:
            chunk_done()
        if unfinished[OUT_OF_BUDGET] or growth is not None and unfinished:
            break
    return unfinished
