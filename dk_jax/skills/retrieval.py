"""Finds skills by words: BM25 (Okapi) over all their text. Scores are those of rank_bm25, with a floor on the idf (see bm25.py)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from dk_jax.skills.bm25 import Bm25
from dk_jax.skills.record import Skill, SkillDraft

_WORD = re.compile(r"[a-z]+|\d+")
_SPARE_ROWS = 64
"""So many removed skills, or a quarter as many as there are if that is more, stay in the index until it tidies up."""


def words(text: str) -> list[str]:
    """The text's words in lower case.

    Identifiers fall into their parts (`row_sum`, `LayerNorm`, `float32`).
    """
    return _WORD.findall(re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower())


class SkillIndex:
    """An index over skills, which may be added and removed.

    A skill with an id is known by it, one without (a draft) by its text. Texts may be there several times; ids may not.

    With 100,000 skills of 120 words, adding or removing one takes less than a quarter of a millisecond, and a query of 200 words about
    three. After every 25,000 or so removals one takes a second, as it tidies up after the others. Not for changes in one thread while
    another one asks.

    Raises:
        ValueError: two skills have the same id.
    """

    def __init__(self, skills: Iterable[Skill | SkillDraft] = ()):
        self._rows: dict[str | tuple, list[int]] = {}
        self._fill(skills)

    def __len__(self) -> int:
        return len(self._bm25)

    def add(self, skill: Skill | SkillDraft) -> None:
        """Adds a skill behind all others. Raises ValueError if one with its id is there already."""
        self._know(skill, len(self._skills))
        self._bm25.add(words(_text(skill)))
        self._skills.append(skill)

    def remove(self, skill: Skill | SkillDraft | str) -> None:
        """Removes a skill, given itself or its id; of several drafts with the same text, the first.

        Raises:
            KeyError: it is not there.
        """
        key = skill if isinstance(skill, str) else _key(skill)
        if key not in self._rows:
            raise KeyError(f"no skill {key!r:.80} in the index")
        rows = self._rows[key]
        row = rows.pop(0)
        if not rows:
            del self._rows[key]
        self._skills[row] = None
        self._bm25.remove(row)
        if self._bm25.removed > max(_SPARE_ROWS, len(self) // 4):
            self._skills = [self._skills[row] for row in self._bm25.compact()]
            self._number()

    def follow(self, skills: Sequence[Skill | SkillDraft]) -> None:
        """Has the index hold these skills in this order: as a new one over them, but where it can be it only removes and adds."""
        wanted = {_key(skill): skill for skill in skills}
        there = [skill for skill in self._skills if skill is not None]
        kept = [skill for skill in there if _same_text(skill, wanted.get(_key(skill)))]
        if len(wanted) < len(skills) or [_key(skill) for skill in kept] != [_key(skill) for skill in skills[: len(kept)]]:
            self._fill(skills)
            return
        staying = {_key(skill) for skill in kept}
        for skill in there:
            if _key(skill) not in staying:
                self.remove(skill)
        for skill in skills[len(kept) :]:
            self.add(skill)
        self._skills = [skill and wanted[_key(skill)] for skill in self._skills]  # usage and evidence may be others by now

    def scores(self, query: str) -> np.ndarray:
        """The BM25 score of every skill, f64[number of skills], in the order in which they were given.

        A word counts once, however often the query holds it.
        """
        return self._bm25.scores(words(query))

    def top(self, query: str, k: int = 20) -> list[Skill | SkillDraft]:
        """The k best skills for a query, best first.

        Equal scores keep the order in which the skills were given.

        Skills that share no word with the query come last, so that a small library is shown whole.
        """
        return [self._skills[row] for row in self._bm25.top(words(query), k)]

    def _fill(self, skills: Iterable[Skill | SkillDraft]) -> None:
        self._skills: list[Skill | SkillDraft | None] = list(skills)  # by row; None where one was removed
        self._number()
        self._bm25 = Bm25(words(_text(skill)) for skill in self._skills)

    def _number(self) -> None:
        self._rows.clear()
        for row, skill in enumerate(self._skills):
            self._know(skill, row)

    def _know(self, skill: Skill | SkillDraft, row: int) -> None:
        key = _key(skill)
        rows = self._rows.setdefault(key, [])
        if rows and isinstance(key, str):
            raise ValueError(f"a skill with the id {key!r} is in the index already")
        rows.append(row)


def _key(skill: Skill | SkillDraft) -> str | tuple:
    """The skill's id; its text if it has none."""
    return getattr(skill, "id", "") or (skill.name, skill.description, skill.scope, tuple(skill.tags), skill.content)


def _same_text(skill: Skill | SkillDraft, other: Skill | SkillDraft | None) -> bool:
    return other is not None and all(getattr(skill, name) == getattr(other, name) for name in ("name", "description", "tags", "content"))


def _text(skill: Skill | SkillDraft) -> str:
    """Everything that is searched."""
    return " ".join([skill.name, skill.description, *skill.tags, skill.content])
