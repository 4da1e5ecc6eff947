"""What the agents' prompts share: the view of a task, bounded text, fenced code, skills written out."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Literal, Protocol

from dk_jax.skills.record import Skill, SkillDraft

Style = Literal["chat", "compact"]
LANGUAGE_NAMES = {"triton": "Triton", "cuda": "CUDA", "cpp": "C++"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskView:
    """What the prompts say of a task.

    Attributes:
        name: unique name.
        level: 1, 2 or 3.
        reference: KernelBench source (chat style).
        compact: the same in few tokens (compact style).
        language: "triton", "cuda" or "cpp".
        form: "module" or "kernel" (DESIGN 2.2).
        signature: head of the C function of a bare kernel; "" if the sandbox alone knows it.
    """

    name: str
    level: int
    reference: str
    compact: str
    language: str
    form: str
    signature: str = ""

    @property
    def fence(self) -> str:
        """Language tag of the code block that holds a candidate."""
        return "cpp" if self.form == "kernel" else "python"


class VerdictView(Protocol):
    """The part of a verdict that feedback tells."""

    outcome: str
    speedup: float
    feedback: str


def is_compact(style: str) -> bool:
    """Whether `style` is "compact"; raises ValueError on anything but the two styles."""
    if style not in ("chat", "compact"):
        raise ValueError(f'style {style!r} is unknown: it must be "chat" or "compact"')
    return style == "compact"


def bounded(text: str, max_chars: int) -> str:
    """The text, or its ends around a note of what was left out; at most `max_chars` (>= 40) characters."""
    text = text.strip()
    if len(text) <= max_chars:
        return text
    note = f"\n[{len(text)} characters, middle left out]\n"
    head = (max_chars - len(note)) * 2 // 3
    tail = max_chars - len(note) - head
    return text[:head] + note + text[-tail:]


def after_thinking(text: str) -> str:
    """The message without its reasoning: what follows the last </think>; "" if a <think> was never closed."""
    _, closed, rest = text.rpartition("</think>")
    if closed:
        return rest
    return "" if text.lstrip().startswith("<think>") else text


def trimmed(code: str) -> str:
    """Code without blank lines around it and without trailing blanks at its end."""
    return re.sub(r"\A(?:[^\S\n]*\n)+", "", code).rstrip()


def fenced(code: str, language: str) -> str:
    """A Markdown code block. The fence is longer than any run of backticks that begins a line of the code."""
    runs = re.findall(r"^[^\S\n]*(`{3,})", code, re.MULTILINE)
    fence = "`" * max([3, *(len(run) + 1 for run in runs)])
    return f"{fence}{language}\n{trimmed(code)}\n{fence}"


def fenced_blocks(text: str) -> tuple[list[str], bool]:
    """The code blocks of a Markdown text, in order, and whether the last one was left open.

    An open block is not among them.
    """
    blocks, _, open_ended = _parts(text)
    return blocks, open_ended


def prose(text: str) -> str:
    """What a Markdown text says outside its code blocks, without blank lines around it."""
    return "\n".join(_parts(text)[1]).strip()


def _parts(text: str) -> tuple[list[str], list[str], bool]:
    """Closed code blocks, lines outside of blocks, and whether the last block was left open."""
    blocks, outside, lines = [], [], []
    fence = ""
    for line in text.split("\n"):
        bare = line.strip()
        if not fence:
            opening = re.fullmatch(r"(`{3,})[\w+#.-]*", bare)
            if opening:
                fence, lines = opening.group(1), []
            else:
                outside.append(line)
        elif bare.startswith(fence) and not bare.strip("`"):
            blocks.append("\n".join(lines))
            fence = ""
        else:
            lines.append(line)
    return blocks, outside, bool(fence)


def speed(speedup: float) -> str:
    """A speedup as prompts write it, e.g. 1.84x."""
    return f"{speedup:.2f}x"


def header(skill: Skill | SkillDraft, style: Style) -> str:
    """A skill's header, without its content: name, scope, tags, description."""
    if is_compact(style):
        return f"{skill.name} | {skill.scope} | {' '.join(skill.tags)} | {skill.description}"
    return f"- {skill.name} ({skill.scope}; {', '.join(skill.tags)}): {skill.description}"


def full_skills(skills: Sequence[Skill | SkillDraft], style: Style) -> str:
    """Whole skills, one after another; "" if there are none."""
    if is_compact(style):
        return (
            "\n".join(["skills:", *(f"{skill.name}\n{skill.content.strip()}" for skill in skills)])
            if skills
            else ""
        )
    return "\n\n".join(
        f"### Skill {skill.name} ({skill.scope})\n{skill.description}\n\n{skill.content.strip()}"
        for skill in skills
    )
