"""Where a report's rollouts come from, and what was asked in them.

A run keeps tokens, so its prompts can be read back. An evaluation keeps texts and verdicts alone: there the first prompt is rendered again from
the task, if a task of just that content is known and no skills were shown; what came between turns is the verdict's feedback.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dk_jax.agents import policy as policy_agent
from dk_jax.evaluation.evaluated import STAGES, Evaluated, ReportError, read_trajectories
from dk_jax.evaluation.report_rollout import Prompts
from dk_jax.generation.tokenizer import Codec, load_codec
from dk_jax.rollout.episode import task_view
from dk_jax.rollout.trajectory import Trajectory
from dk_jax.tasks.task import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Rollouts of one kind.

    Attributes:
        name: as the chooser says it.
        load: reads them. prompts: what was asked in one of them.
        levels: of tasks, by name, as far as they are known.
    """

    name: str
    load: Callable[[], Sequence[Trajectory]]
    prompts: Callable[[Trajectory], Prompts]
    levels: Mapping[str, int]


# --- runs -----------------------------------------------------------------------------------------------------------------------------


def sources_of_run(workdir: Path, levels: Mapping[str, int], *, name: str = "", steps: int | None = None) -> list[Source]:
    """All rollouts that a run kept: its held-out evaluations and the calls of these, the last one first, then RL steps from the newest back.

    Args:
        name: put before each source's, where there are several runs.
        steps: only so many of the newest RL steps; None for all.

    Raises:
        ReportError: the run's codec is damaged.
    """
    folder, before = workdir / "rollouts", f"{name}: " if name else ""
    paths = []
    for stem, title in reversed(STAGES.items()):
        paths += [(folder / f"{stem}.jsonl", f"held-out tasks, {title}"), (folder / f"{stem}_calls.jsonl", f"held-out tasks, {title}, calls")]
    found = sorted(folder.glob("step_*.jsonl"), reverse=True)
    paths += [(path, f"RL step {int(path.stem[5:])}") for path in found[:steps]]
    prompts = _decoder(workdir)
    return [
        Source(name=before + title, load=lambda path=path: read_trajectories(path), prompts=prompts, levels=levels)
        for path, title in paths
        if path.exists()
    ]


def _decoder(workdir: Path) -> Callable[[Trajectory], Prompts]:
    codec: Codec | None = None
    if (workdir / "codec" / "done").exists():
        try:
            codec = load_codec(workdir / "codec")
        except (OSError, ValueError, KeyError) as error:
            raise ReportError(f"{workdir / 'codec'} can't be read ({error!r}). Put it back from a copy.") from error

    def prompts(t: Trajectory) -> Prompts:
        if codec is None:
            return Prompts(of_turns=(), note="The prompts are not shown: the run's codec is not there.")
        if not t.tokens:
            return Prompts(of_turns=(), note="The prompts are not shown: no tokens were kept of this rollout.")
        return Prompts(of_turns=[codec.decode(_asked(t, turn)) for turn in range(len(t.turns))], note="")

    return prompts


def _asked(t: Trajectory, turn: int) -> list[int]:
    """The tokens before a turn's answer that no turn before sampled, of its own sequence."""
    first = next((i for i, at in enumerate(t.turn_index) if at == turn), None)
    if first is None:
        return []
    begin = next((i + 1 for i in range(first - 1, -1, -1) if t.turn_index[i] >= 0 or i + 1 in t.starts), 0)
    return t.tokens[begin:first]


# --- evaluations ----------------------------------------------------------------------------------------------------------------------


def source_of_evaluation(e: Evaluated, tasks: Mapping[str, Task], *, name: str = "") -> Source:
    """The rollouts of an evaluation's folder. `tasks`: that may be meant, by name (see `known_tasks`)."""
    settings = e.summary["settings"]

    def prompts(t: Trajectory) -> Prompts:
        return _rendered(t, tasks.get(t.task), settings)

    return Source(name=name or e.name, load=lambda: [t for r in e.results for t in (r.trajectory, *r.further)], prompts=prompts, levels=e.levels)


def known_tasks(settings: Mapping[str, Any], others: Sequence[Task] = ()) -> dict[str, Task]:
    """Those of an evaluation's tasks whose text is known: built-in ones and `others` of just the content that was evaluated."""
    from dk_jax.tasks.builtin import builtin_suite
    from dk_jax.tasks.learnable import learnable_tasks

    wanted, found = settings["tasks"], {}
    for task in (*others, *builtin_suite("cpu"), *builtin_suite("gpu"), *learnable_tasks("gpu"), *learnable_tasks("small")):
        if wanted.get(task.name) == _digest(task.name, task.dtype, task.reference):
            found.setdefault(task.name, task)
    return found


def _digest(*parts: str) -> str:
    """As an evaluation's settings name content (dk_jax.evaluation.harness)."""
    return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()[:16]


def _rendered(t: Trajectory, task: Task | None, settings: Mapping[str, Any]) -> Prompts:
    episode, sandbox = settings["episode"], settings["sandbox"]
    search = (settings.get("search") or {}).get("name", "turns")
    why, reference = "", task.reference if task is not None else ""
    if settings["policy"]["policy"] in _SILENT:
        return Prompts(of_turns=(), note="This policy reads no prompts.", reference=reference)
    if t.agent != "policy" or search != "turns":
        why = f"an evaluation does not keep prompts, and those of {t.agent if t.agent != 'policy' else search} are made on the way."
    elif t.skills:
        why = "an evaluation does not keep prompts, nor the text of the skills that stood in this one."
    elif task is None:
        why = "an evaluation does not keep prompts, and the text of this task is not known here (--tasks=DIR names a folder of tasks)."
    if why:
        return Prompts(of_turns=(), note=f"The prompts are not shown: {why}", reference=reference)
    view, style, fresh = task_view(task, language=sandbox["language"], form=sandbox["form"]), episode["style"], episode["context"] == "kernels"
    first = policy_agent.render_first(view, (), style=style, summarise=fresh and settings["turns"] > 1)
    if fresh:
        note = "The first prompt is rendered again from the task; later ones tell the task again, with the kernels and verdicts so far."
        return Prompts(of_turns=[first], note=note)
    later = [policy_agent.render_feedback(turn.verdict, view, style=style) for turn in t.turns[:-1]]
    return Prompts(of_turns=[first, *later], note="Prompts are rendered again from task and verdicts.")


_SILENT = ("expert", "naive", "wrong", "kernels")
