"""When two skills say the same: a skill that repeats another one takes room in prompts and proves nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

from dk_jax.skills.record import Skill, SkillDraft

NEAR = 0.8  # share of common words from which texts count as the same; phrasings of one subject share less than 0.6
MIN_EXAMPLE_CHARS = 16  # shorter examples are no sign of anything

_EXAMPLE = re.compile(r"^[ \t]*(?:#{1,6}[ \t]*|\*\*)?Example(?:\*\*)?[ \t]*:?(?:\*\*)?", re.IGNORECASE | re.MULTILINE)

Text = TypeVar("Text", Skill, SkillDraft)


def same_as(draft: SkillDraft, known: Iterable[Text]) -> Text | None:
    """The first of `known` that says what `draft` says, whatever their names, or None.

    Two skills say the same if their contents agree up to white space and case, or have the same example (of at least 16
    characters, white space apart), or hold the same numbers and share 0.8 of their words. Two texts that put one idea in different
    words and show different code are not found.
    """
    content, example, words = _folded(draft.content), _example(draft.content), _words(draft.content)
    for skill in known:
        if _folded(skill.content) == content or (example and _example(skill.content) == example):
            return skill
        other = _words(skill.content)
        near = len(words & other) >= NEAR * max(len(words | other), 1)
        if near and not any(word.isdigit() for word in words ^ other):
            return skill
    return None


def _folded(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().lower()


def _example(content: str) -> str:
    """The code of the example without white space, "" if it is too short or not there."""
    headings = list(_EXAMPLE.finditer(content))
    code = re.sub(r"```\w*|\s+", "", content[headings[-1].end() :]) if headings else ""
    return code if len(code) >= MIN_EXAMPLE_CHARS else ""


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.lower()))
