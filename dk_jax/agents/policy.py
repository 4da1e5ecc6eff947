"""The policy agent writes the kernel: one code block a turn, then again with the sandbox's feedback."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from dk_jax.agents.rules import rules
from dk_jax.agents.text import (
    LANGUAGE_NAMES,
    Style,
    TaskView,
    VerdictView,
    after_thinking,
    bounded,
    fenced,
    fenced_blocks,
    full_skills,
    is_compact,
    prose,
    speed,
    trimmed,
)
from dk_jax.skills.record import Skill, SkillDraft

HEAD = "policy"
MAX_SKILLS = 3
KEEP = "keep"
"""A later turn's answer that hands in the kernel of the turn before again."""
MAX_FEEDBACK_CHARS = 2000
MAX_COMPACT_FEEDBACK_CHARS = 80
MAX_SUMMARY_CHARS = 800

_ENTRY = re.compile(r"\bModelNew\b|\bvoid\s+kernel\s*\(")
_COMPILER_ERROR = re.compile(r"\b(\d+):(?:\d+:)? *(?:fatal )?error: *(.+)")
_MAX_ERROR = re.compile(
    r"max\w*[ _.](?:abs\w*[ _.])?(?:err\w*|diff\w*)\D{0,12}?(\d[\d.]*(?:e[+-]?\d+)?|nan|inf)", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """What a message holds: the candidate's source, or None and the reason."""

    source: str | None
    error: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """An earlier turn as a later one's fresh prompt tells it: the kernel (None if there was none), what its author said of it in
    short ("" for nothing), and the verdict."""

    source: str | None
    summary: str
    verdict: VerdictView


def render_first(
    task: TaskView, skills: Sequence[Skill | SkillDraft] = (), *, style: Style, attempts: Sequence[Attempt] = (), summarise: bool = False
) -> str:
    """The first turn's prompt, or that of a later turn which starts afresh.

    Args:
        task: what to write a kernel for.
        skills: up to three whole skills, shown as optional references.
        style: "chat" or "compact".
        attempts: earlier turns to tell of, in order: kernels, short summaries and verdicts, without the reasoning that led to them
            (Kevin, arXiv 2507.11948, section 3: contexts of several turns stay short, and no chain of thought is fed back).
        summarise: ask for such a short summary below the code (chat style; a compact message holds the source alone).

    Raises:
        ValueError: too many skills, or a language and form that nobody judges.
    """
    if len(skills) > MAX_SKILLS:
        raise ValueError(f"{len(skills)} skills for task {task.name!r}; at most {MAX_SKILLS} are injected")
    if is_compact(style):
        told = [part for a in attempts for part in (trimmed(a.source or ""), _compact_feedback(a.verdict))]
        return "\n".join(filter(None, [*told, task.compact.strip(), full_skills(skills, style)]))
    language = LANGUAGE_NAMES.get(task.language, task.language)
    parts = [
        f"You are an expert in writing fast {language} kernels. Replace the PyTorch model below by a faster "
        "implementation that computes the same outputs within floating-point tolerance. It is compiled, "
        "checked on random inputs and timed against PyTorch eager.",
        f"## Task {task.name}\n" + fenced(task.reference, "python"),
        "## Rules\n" + rules(task),
    ]
    if skills:
        parts.append(
            "## Skills\nThese worked on other tasks. Use what fits, ignore the rest.\n\n"
            + full_skills(skills, style)
        )
    if attempts:
        told = [f"### Attempt {i}\n" + _attempt(attempt, task) for i, attempt in enumerate(attempts, 1)]
        parts.append("## Your attempts so far\n\n" + "\n\n".join(told) + f"\n\n{_wish(attempts[-1].verdict)}")
    parts.append(
        f"## Output\nAnswer with exactly one code block that starts with ```{task.fence} and holds all the "
        "source."
        + (" Below it say in two or three sentences what you did and why; of your reasoning only that is kept." if summarise else "")
    )
    return "\n\n".join(parts)


def render_feedback(verdict: VerdictView, task: TaskView, *, style: Style) -> str:
    """A later turn's prompt: the sandbox's verdict on the turn before, of bounded length.

    Compact prompts say the task again, so that a later turn ends as a first one does and all that a small model from scratch has
    learnt of first turns holds for it.
    """
    if is_compact(style):
        return f"{_compact_feedback(verdict)}\n{task.compact.strip()}"
    again = f"{_wish(verdict)} Answer in the same format, with one code block of all the source."
    parts = [f"Verdict on your kernel: {_said(verdict)}.", bounded(verdict.feedback, MAX_FEEDBACK_CHARS), again]
    return "\n\n".join(filter(None, parts))


def _said(verdict: VerdictView) -> str:
    if verdict.outcome != "ok":
        return verdict.outcome.replace("_", " ")
    return f"correct, {speed(verdict.speedup)} the speed of PyTorch eager" if verdict.speedup > 0 else "correct, not timed"


def _wish(verdict: VerdictView) -> str:
    return "Write a faster version." if verdict.outcome == "ok" else "Find the cause and write a corrected version."


def _attempt(attempt: Attempt, task: TaskView) -> str:
    code = fenced(attempt.source, task.fence) if attempt.source else "(no kernel)"
    said = f"Your summary: {attempt.summary}" if attempt.summary else ""
    verdict = f"Verdict: {_said(attempt.verdict)}."
    return "\n\n".join(filter(None, [code, said, verdict, bounded(attempt.verdict.feedback, MAX_FEEDBACK_CHARS)]))


def own_summary(text: str, *, style: Style) -> str:
    """What a message says of its kernel outside reasoning and code, of bounded length; "" in compact style, whose messages are code."""
    if is_compact(style):
        return ""
    return bounded(prose(after_thinking(text)), MAX_SUMMARY_CHARS)


def _compact_feedback(verdict: VerdictView) -> str:
    if verdict.outcome == "ok":
        return f"ok {speed(verdict.speedup)}" if verdict.speedup > 0 else "ok"
    # Bounded first: candidates have a hand in this text, and patterns should not meet megabytes of it.
    text = bounded(verdict.feedback, MAX_FEEDBACK_CHARS)
    if verdict.outcome == "incorrect" and (found := _MAX_ERROR.search(text)):
        return f"incorrect max err {found.group(1)}"
    if found := _COMPILER_ERROR.search(text):
        said = f"line {found.group(1)} {found.group(2).strip()}"
    else:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        said = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
        said = said.removeprefix(verdict.outcome).lstrip(" :.")
    return f"{verdict.outcome}: {said[:MAX_COMPACT_FEEDBACK_CHARS].rstrip()}" if said else verdict.outcome


def parse(text: str, *, style: Style, previous: str | None = None) -> Reply:
    """Reads the candidate out of a message. Never raises.

    Compact: the whole message is the source. Chat: the code block; of several, the last that defines the
        entry point. In either, `KEEP` alone stands for the source of the turn before.

    Args:
        previous: that source, or None where there was none.
    """
    if after_thinking(text).strip().lower() == KEEP:
        return Reply(source=previous, error="" if previous else "there is no kernel of a turn before that could be kept")
    if is_compact(style):
        source = trimmed(text)
        return Reply(source=source) if source else Reply(source=None, error="the message is empty")
    blocks, open_ended = fenced_blocks(after_thinking(text))
    if open_ended:
        return Reply(source=None, error="the last code block is not closed")
    filled = [source for block in blocks if (source := trimmed(block))]
    if not filled:
        return Reply(source=None, error="the message holds no code block with source in it")
    entries = [source for source in filled if _ENTRY.search(source)]
    return Reply(source=(entries or filled)[-1])


def format(source: str, task: TaskView, *, style: Style, previous: str | None = None) -> str:
    """The message that hands in `source`; `parse` gives it back, trimmed. Compact ones say `KEEP` for what was handed in before."""
    if is_compact(style) and previous is not None and trimmed(source) == trimmed(previous):
        return KEEP
    return trimmed(source) if is_compact(style) else fenced(source, task.fence)
