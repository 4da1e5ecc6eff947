"""The summary agent reads how a kernel got faster and writes down, as skills, what is worth knowing."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

from dk_jax.agents.calls import listed, read_call, write_call
from dk_jax.agents.text import (
    LANGUAGE_NAMES,
    Style,
    TaskView,
    bounded,
    fenced,
    full_skills,
    is_compact,
    speed,
    trimmed,
)
from dk_jax.skills.record import MAX_CONTENT_TOKENS, Skill, SkillDraft, validate_draft

HEAD = "summary"
CALL = "add_skills"
MAX_SKILLS = 2
MAX_PROFILE_CHARS = 400
_TEXT_FIELDS = ("name", "description", "scope", "content")

_FORM = """\
Record at most {max_skills} skills that made the difference and will help on other tasks; an empty list is
right if nothing is worth keeping. A skill teaches how to write a faster kernel: never advise to leave the
work to a library or to skip writing one. Its fields:
- name: snake_case, new
- description: one line of at most 120 characters
- scope: "general" or "task_specific/<type>"
- tags: three to six words
- content: at most {max_tokens} tokens in three sections, "Motivation:", "Key Idea:" and "Example:" (a few
  lines of code)
Answer with one call:
"""
_FORM_DRAFT = SkillDraft(
    name="...",
    description="...",
    scope="general",
    tags=("...", "...", "..."),
    content="Motivation: ...\nKey Idea: ...\nExample: ...",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Notes:
    """What a message proposes.

    Attributes:
        drafts: skills that may be verified.
        refused: skills that could be read but may not enter a library, each with what is wrong with it.
        think: the agent's own remarks.
        error: why the message could not be read at all; then there are no drafts.
        form: how the call was written (dk_jax.agents.calls.Reading); notes that differ in nothing else are equal.
    """

    drafts: tuple[SkillDraft, ...] = ()
    refused: tuple[tuple[SkillDraft, tuple[str, ...]], ...] = ()
    think: str = ""
    error: str = ""
    form: str = dataclasses.field(default="", compare=False)


def render(
    task: TaskView,
    skills: Sequence[Skill | SkillDraft],
    *,
    first_code: str,
    first_speedup: float,
    best_code: str,
    best_speedup: float,
    style: Style,
    first_profile: str = "",
    best_profile: str = "",
    max_skills: int = MAX_SKILLS,
    max_tokens: int = MAX_CONTENT_TOKENS,
) -> str:
    """The prompt: task, skills that were in view, first and best turn with what the profiler saw of them.

    Args:
        task: the task that was solved.
        skills: those injected into the rollout; compact style shows name and description only.
        first_code, first_speedup: the first turn, "" if it held no candidate; speedup 0 if it was not
            correct.
        best_code, best_speedup: the fastest correct turn.
        style: "chat" or "compact".
        first_profile, best_profile: where these turns spent their device time (`Verdict.profiled`); "" where no profiler ran, as on
            a CPU, and the prompt then says nothing of it.
        max_skills, max_tokens: bounds told to the agent.
    """
    first_profile, best_profile = (bounded(profile, MAX_PROFILE_CHARS) for profile in (first_profile, best_profile))
    if is_compact(style):
        known = ["skills:", *(f"{skill.name}: {skill.description}" for skill in skills)] if skills else []
        lines = ["summarize", task.compact.strip(), *known]
        lines += [
            f"first {speed(first_speedup)}",
            first_profile,
            trimmed(first_code),
            f"best {speed(best_speedup)}",
            best_profile,
            trimmed(best_code),
        ]
        return "\n".join(line for line in lines if line)
    language = LANGUAGE_NAMES[task.language]
    first = f"{speed(first_speedup)} the speed of PyTorch eager" if first_speedup > 0 else "not correct"
    parts = [
        f"A {language} kernel for the task below was improved. Say what is worth knowing for later ones.",
        f"## Task {task.name}\n" + fenced(task.reference, "python"),
    ]
    if skills:
        parts.append("## Skills its author had\n" + full_skills(skills, style))
    parts += [
        f"## First version ({first})\n"
        + _profiled(first_profile)
        + (fenced(first_code, task.fence) if first_code.strip() else "(no kernel)"),
        f"## Best version ({speed(best_speedup)} the speed of PyTorch eager)\n"
        + _profiled(best_profile)
        + fenced(best_code, task.fence),
        "## Output\n"
        + _FORM.format(max_skills=max_skills, max_tokens=max_tokens)
        + format([_FORM_DRAFT], style=style, think="<what made it faster>"),
    ]
    return "\n\n".join(parts)


def _profiled(profile: str) -> str:
    return f"Profile, in shares of device time (coverage: that of its own kernels): {profile}\n\n" if profile else ""


def parse(
    text: str,
    *,
    style: Style,
    max_skills: int = MAX_SKILLS,
    count_tokens: Callable[[str], int] | None = None,
    max_tokens: int = MAX_CONTENT_TOKENS,
) -> Notes:
    """Reads the proposed skills out of a message, in any form of `dk_jax.agents.call_forms`. Never raises.

    Args:
        text: the message.
        style: "chat" or "compact".
        max_skills: most skills a call may add; more make it malformed.
        count_tokens, max_tokens: bound on a skill's content, see `validate_draft`.
    """
    call = read_call(text, CALL, style=style)
    if call.error:
        return Notes(error=call.error)
    items, error = listed(call.arguments, "add" if is_compact(style) else "skills")
    if error:
        return Notes(error=error)
    if len(items) > max_skills:
        return Notes(error=f"{len(items)} skills are added; at most {max_skills} may be")
    drafts: list[SkillDraft] = []
    refused: list[tuple[SkillDraft, tuple[str, ...]]] = []
    for item in items:
        draft, error = _read_draft(item)
        if draft is None:
            return Notes(error=error)
        problems = validate_draft(draft, count_tokens=count_tokens, max_tokens=max_tokens)
        if any(draft.name == other.name for other in drafts):
            problems.append(f"name {draft.name!r} is used twice in one call")
        if problems:
            refused.append((draft, tuple(problems)))
        else:
            drafts.append(draft)
    think = call.arguments.get("think", "")
    think = think if isinstance(think, str) else ""
    return Notes(drafts=tuple(drafts), refused=tuple(refused), think=think, form=call.form)


def _read_draft(item: Any) -> tuple[SkillDraft | None, str]:
    if not isinstance(item, dict):
        return None, f"a skill is not an object: {reprlib.repr(item)}"
    for field in _TEXT_FIELDS:
        if not isinstance(item.get(field), str):
            return None, f"a skill's field {field!r} is missing or not text"
    tags = item.get("tags")
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        return None, "a skill's field 'tags' is missing or not a list of words"
    return SkillDraft(tags=tuple(tags), **{field: item[field].strip() for field in _TEXT_FIELDS}), ""


def format(drafts: Sequence[SkillDraft], *, style: Style, think: str = "") -> str:
    """The message that adds `drafts`; `parse` gives them back."""
    items = [
        {
            "name": draft.name,
            "description": draft.description,
            "scope": draft.scope,
            "tags": list(draft.tags),
            "content": draft.content,
        }
        for draft in drafts
    ]
    if is_compact(style):
        return write_call(CALL, {"think": think, "add": items} if think else {"add": items}, style=style)
    return write_call(CALL, {"think": think, "skills": items}, style=style)
