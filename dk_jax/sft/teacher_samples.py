"""What a teacher's trajectories give to imitate, and the file of it.

Only what the sandbox proved is imitated. Of a policy's conversation these are kernels that were judged correct; a wrong one is shown, as
in samples of the generated corpus, and what comes after the last good one is left out. Of selection and summary calls see
`selection_sample` and `summary_sample`.

Form "code" writes each answer as the generated corpus does: the code block alone, the call alone (and what their prompts ask for beside
it). Form "message" takes the message as the teacher wrote it, reasoning and all.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from dk_jax.agents import policy, selection, summary
from dk_jax.agents.text import TaskView, after_thinking
from dk_jax.interop.endpoint import estimate_tokens
from dk_jax.models.config import AGENTS
from dk_jax.rollout.trajectory import Trajectory, Verdict
from dk_jax.sft.samples import Sample
from dk_jax.sft.teacher_speaker import Exchange
from dk_jax.skills.record import Skill, SkillDraft
from dk_jax.skills.sameness import same_as

Form = Literal["code", "message"]
STYLE = "chat"
SLACK = 0.9
"""A later kernel is imitated if it has this share of the speed of the fastest one before it: the prompt asks for a faster one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a sample comes from.

    Attributes:
        source: "teacher". host, model: of the endpoint.
        date: of its last answer (UTC, ISO 8601).
        prompt_tokens, completion_tokens, cost: of all answers in it; `estimated` where the endpoint told no usage, cost None without prices.
        skills: names of those in the prompt (policy, summary) or on offer (selection).
        outcomes, speedups: of each turn of a policy's sample.
        note: what its being kept goes by, where that is not the verdicts.
    """

    source: str = "teacher"
    host: str
    model: str
    date: str
    prompt_tokens: int
    completion_tokens: int
    cost: float | None
    estimated: bool
    skills: tuple[str, ...] = ()
    outcomes: tuple[str, ...] = ()
    speedups: tuple[float, ...] = ()
    note: str = ""

    @classmethod
    def of(cls, host: str, said: Sequence[Exchange], **fields: Any) -> Provenance:
        """Of the answers of one conversation."""
        answers = [exchange.answer for exchange in said]
        return cls(
            host=host,
            model=answers[-1].model,
            date=answers[-1].date,
            prompt_tokens=sum(a.prompt_tokens for a in answers),
            completion_tokens=sum(a.completion_tokens for a in answers),
            cost=None if any(a.cost is None for a in answers) else sum(a.cost for a in answers),
            estimated=any(a.estimated for a in answers),
            **fields,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaughtSample:
    """A sample and where it comes from; None where its file does not say."""

    sample: Sample
    provenance: Provenance | None


def save_samples(path: Path, taught: Iterable[TaughtSample]) -> None:
    """One JSON line a sample; complete or not at all."""
    path = Path(path)
    partial = path.with_suffix(".part")
    with open(partial, "w", encoding="utf-8") as file:
        for one in taught:
            where = dataclasses.asdict(one.provenance) if one.provenance is not None else None
            file.write(json.dumps({**dataclasses.asdict(one.sample), "provenance": where}) + "\n")
    partial.replace(path)


def load_taught(path: Path) -> list[TaughtSample]:
    """Reads what `save_samples` wrote, or lines of a sample's own fields. Raises ValueError naming file, line and field of what is none."""
    out = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                out.append(_read(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                problem = f"field {error} is missing" if isinstance(error, KeyError) else error
                raise ValueError(f"{path}:{number}: not a sample ({problem}). Make the file again, or delete that line.") from error
    return out


def load_samples(path: Path) -> list[Sample]:
    """The samples of a file, in order; see `load_taught`."""
    return [one.sample for one in load_taught(path)]


def _read(data: dict[str, Any]) -> TaughtSample:
    agent, kind, task, turns = data["agent"], data["kind"], data["task"], data["turns"]
    if agent not in AGENTS:
        raise ValueError(f"field 'agent' is {agent!r:.40}, none of {', '.join(AGENTS)}")
    if not (isinstance(kind, str) and isinstance(task, str)):
        raise ValueError("fields 'kind' and 'task' must be texts")
    if not isinstance(turns, list) or not turns:
        raise ValueError("field 'turns' must be a list of [prompt, answer, imitated]")
    for turn in turns:
        if not (isinstance(turn, list) and list(map(type, turn)) == [str, str, bool]):
            raise ValueError(f"field 'turns' holds {turn!r:.60}, which is not [prompt, answer, imitated]")
    sample = Sample(agent=agent, kind=kind, task=task, turns=tuple(map(tuple, turns)))
    where = data.get("provenance")
    if where is None:
        return TaughtSample(sample=sample, provenance=None)
    lists = {name: tuple(where[name]) for name in ("skills", "outcomes", "speedups") if name in where}
    return TaughtSample(sample=sample, provenance=Provenance(**{**where, **lists}))


def answer_form(view: TaskView, *, form: Form, summarise: bool) -> Callable[[str], str]:
    """How a policy's message stands in samples and in the conversation; one without a kernel as it is, less its reasoning.

    Args:
        summarise: the prompt asks for a short summary below the code.
    """

    def shown(text: str) -> str:
        if form == "message":
            return text
        source = policy.parse(text, style=STYLE).source
        if source is None:
            return after_thinking(text).strip()
        said = policy.own_summary(text, style=STYLE) if summarise else ""
        return "\n\n".join(filter(None, [policy.format(source, view, style=STYLE), said]))

    return shown


def imitated(verdicts: Sequence[Verdict]) -> list[bool]:
    """Which kernels of a conversation are worth imitating: correct, not known to leave the work to others, and not clearly slower than one
    before (the prompt asked for a faster one)."""
    out, fastest = [], 0.0
    for v in verdicts:
        lazy = v.coverage is not None and not v.speed_rewarded
        out.append(v.correct and not lazy and v.speedup >= SLACK * fastest)
        fastest = max(fastest, v.earned_speedup)
    return out


def policy_samples(trajectory: Trajectory, said: Sequence[Exchange], *, fresh: bool) -> list[tuple[Sample, slice]]:
    """A policy trajectory's samples, and which turns they are: one, or none without a kernel to imitate; with `fresh`, where each turn
    answers a prompt of its own, one a turn."""
    good = imitated([turn.verdict for turn in trajectory.turns])
    turns = [(exchange.prompt, exchange.shown, keep) for exchange, keep in zip(said, good, strict=True)]
    kind = "policy_with_skill" if trajectory.skills else "policy"
    if fresh:
        parts = [slice(i, i + 1) for i, keep in enumerate(good) if keep]
    else:
        parts = [slice(0, len(good) - good[::-1].index(True))] if any(good) else []
    return [(Sample(agent="policy", kind=kind, task=trajectory.task, turns=tuple(turns[part])), part) for part in parts]


def selection_sample(trajectory: Trajectory, said: Sequence[Exchange], *, max_skills: int, form: Form) -> Sample | None:
    """A selection call that can be read and names skills that were on offer; whether its choice was a good one the caller knows."""
    if trajectory.turns[-1].error:
        return None
    [exchange] = said
    choice = selection.parse(trajectory.turns[-1].text, trajectory.shown, max_skills=max_skills, style=STYLE)
    answer = exchange.answer.text
    if form == "code":
        answer = selection.format(choice.names, style=STYLE, think=choice.think, reasons=choice.reasons)
    return Sample(agent="selection", kind="selection", task=trajectory.task, turns=((exchange.prompt, answer, True),))


def summary_sample(
    trajectory: Trajectory, said: Sequence[Exchange], *, known: Sequence[Skill | SkillDraft], form: Form
) -> tuple[Sample | None, tuple[SkillDraft, ...], list[str]]:
    """A summary call whose drafts may enter a library (`validate_draft`) and are not among `known`, by name or by what they say.

    In form "code" the others are left out of the call, in form "message" a call with one of them is not imitated.

    Returns:
        The sample or None, the good drafts, and what was wrong, a sentence each.
    """
    if trajectory.turns[-1].error:
        return None, (), [trajectory.turns[-1].error]
    notes = summary.parse(trajectory.turns[-1].text, style=STYLE, count_tokens=estimate_tokens)
    good, problems = [], [f"{draft.name[:40]}: {problem}" for draft, wrong in notes.refused for problem in wrong]
    for draft in notes.drafts:
        if any(draft.name == other.name for other in known):
            problems.append(f"{draft.name}: there is a skill of that name")
        elif (other := same_as(draft, [*known, *good])) is not None:
            problems.append(f"{draft.name}: {other.name} says the same")
        else:
            good.append(draft)
    if not good or (form == "message" and problems):
        return None, tuple(good), problems or ["no skill was proposed"]
    [exchange] = said
    answer = exchange.answer.text if form == "message" else summary.format(good, style=STYLE, think=notes.think)
    kind = "summary_with_skill" if trajectory.skills else "summary"
    return Sample(agent="summary", kind=kind, task=trajectory.task, turns=((exchange.prompt, answer, True),)), tuple(good), problems
