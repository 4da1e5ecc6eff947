"""The selection agent reads the headers that retrieval found and picks the few skills to inject."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Sequence

from dk_jax.agents.calls import listed, read_call, write_call
from dk_jax.agents.text import LANGUAGE_NAMES, Style, TaskView, fenced, header, is_compact
from dk_jax.skills.record import Skill, SkillDraft

HEAD = "selection"
CALL = "select_skills"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What a message chose. With an `error` it chose nothing, which is not the same as an empty choice.

    `form`: how the call was written (dk_jax.agents.calls.Reading); choices that differ in nothing else are equal.
    """

    names: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    think: str = ""
    error: str = ""
    form: str = dataclasses.field(default="", compare=False)


def query(task: TaskView) -> str:
    """The text that retrieval searches with: what the task is called and what it computes."""
    return f"{task.name} {task.language} {task.compact}\n{task.reference}"


def render(
    task: TaskView, headers: Sequence[Skill | SkillDraft], *, style: Style, max_skills: int = 3
) -> str:
    """The prompt: the task and the headers of the skills on offer.

    Args:
        task: what a kernel will be written for.
        headers: skills on offer, in retrieval's order; only their headers are shown.
        style: "chat" or "compact".
        max_skills: how many may be chosen.
    """
    shown = "\n".join(header(skill, style) for skill in headers)
    if is_compact(style):
        return f"select {max_skills}\n{task.compact.strip()}\nskills:\n{shown}"
    language = LANGUAGE_NAMES[task.language]
    return "\n\n".join(
        [
            f"Choose the optimisation skills that will help most to write a fast {language} kernel for this "
            "task. Their full text will be shown to the author of the kernel.",
            f"## Task {task.name}\n" + fenced(task.reference, "python"),
            "## Skills on offer\n" + (shown or "(none)"),
            f"## Output\nPick at most {max_skills}, most useful first, none twice; an empty list is right if "
            "none fits. Answer with one call:\n"
            + format(
                ["<skill>"], style=style, think="<what limits this task and what helps>", reasons=["<why>"]
            ),
        ]
    )


def parse(text: str, shown: Sequence[str], *, style: Style, max_skills: int = 3) -> Choice:
    """Reads the choice out of a message, in any form of `dk_jax.agents.call_forms`. Never raises.

    Args:
        text: the message.
        shown: names that were on offer; others may not be chosen.
        style: "chat" or "compact". Compact takes plain names as well as {name, reason}.
        max_skills: how many may be chosen.
    """
    call = read_call(text, CALL, style=style)
    if call.error:
        return Choice(error=call.error)
    key = "select" if is_compact(style) else "skills"
    items, error = listed(call.arguments, key)
    if error:
        return Choice(error=error)
    think = call.arguments.get("think", "")
    names, reasons, offered = [], [], frozenset(shown)
    for item in items:
        if isinstance(item, str) and is_compact(style):
            item = {"name": item}
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            return Choice(error=f"{key!r} holds something without a name: {reprlib.repr(item)}")
        name, reason = item["name"], item.get("reason", "")
        if name not in offered:
            return Choice(error=f"skill {name!r:.60} was not on offer")
        if name in names:
            return Choice(error=f"skill {name!r} is chosen twice")
        names.append(name)
        reasons.append(reason if isinstance(reason, str) else "")
    if len(names) > max_skills:
        return Choice(error=f"{len(names)} skills are chosen; at most {max_skills} may be")
    return Choice(
        names=tuple(names), reasons=tuple(reasons), think=think if isinstance(think, str) else "", form=call.form
    )


def format(names: Sequence[str], *, style: Style, think: str = "", reasons: Sequence[str] = ()) -> str:
    """The message that chooses `names`.

    Compact style writes names only, unless there is something to say about them.
    """
    reasons = tuple(reasons) or ("",) * len(names)
    items = [{"name": name, "reason": reason} for name, reason in zip(names, reasons, strict=True)]
    if not is_compact(style):
        return write_call(CALL, {"think": think, "skills": items}, style=style)
    said = {"think": think} if think else {}
    return write_call(CALL, {**said, "select": items if any(reasons) else list(names)}, style=style)
