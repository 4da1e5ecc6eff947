"""Finds skills by words: BM25 (Okapi) over all their text, on the statistics of rank_bm25.

rank_bm25 scores every skill for every word of a query. Here a word's contributions are laid out once, so that
a query only touches the skills that hold its words; the scores are the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
from rank_bm25 import BM25Okapi

from dk_jax.skills.record import Skill, SkillDraft

# In a handful of skills most words are common, and Okapi's idf of a word that half of them hold is zero or
# negative: a match
# would count for nothing or against. Every match shall count for something.
_MIN_IDF = 1e-3
_WORD = re.compile(r"[a-z]+|\d+")


def words(text: str) -> list[str]:
    """The text's words in lower case.

    Identifiers fall into their parts (`row_sum`, `LayerNorm`, `float32`).
    """
    return _WORD.findall(re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower())


class SkillIndex:
    """An index over a fixed set of skills; make a new one when the library changes."""

    def __init__(self, skills: Iterable[Skill | SkillDraft]):
        self._skills = list(skills)
        self._contributions: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        documents = [
            words(" ".join([skill.name, skill.description, *skill.tags, skill.content]))
            for skill in self._skills
        ]
        # rank_bm25 divides by the number of documents and by the number of distinct words.
        if any(documents):
            self._contributions = _contributions(BM25Okapi(documents))

    def __len__(self) -> int:
        return len(self._skills)

    def scores(self, query: str) -> np.ndarray:
        """The BM25 score of every skill, f64[number of skills].

        A word counts once, however often the query holds it.
        """
        scores = np.zeros(len(self._skills))
        for word in dict.fromkeys(words(query)):
            if word in self._contributions:
                at, amount = self._contributions[word]
                scores[at] += amount
        return scores

    def top(self, query: str, k: int = 20) -> list[Skill]:
        """The k best skills for a query, best first.

        Equal scores keep the order in which the skills were given.

        Skills that share no word with the query come last, so that a small library is shown whole.
        """
        order = np.argsort(-self.scores(query), kind="stable")
        return [self._skills[i] for i in order[:k]]


def _contributions(bm25: BM25Okapi) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """For each word the skills that hold it and what it adds to their scores."""
    holders: dict[str, list[int]] = {}
    counts: dict[str, list[int]] = {}
    for i, frequencies in enumerate(bm25.doc_freqs):
        for word, count in frequencies.items():
            holders.setdefault(word, []).append(i)
            counts.setdefault(word, []).append(count)
    length = np.asarray(bm25.doc_len) / bm25.avgdl
    out = {}
    for word, where in holders.items():
        at, count = np.asarray(where), np.asarray(counts[word], np.float64)
        saturated = count * (bm25.k1 + 1) / (count + bm25.k1 * (1 - bm25.b + bm25.b * length[at]))
        out[word] = (at, max(bm25.idf[word], _MIN_IDF) * saturated)
    return out
