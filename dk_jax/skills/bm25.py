"""BM25 (Okapi) over documents that come and go, for 100,000 of them and more.

Scores follow rank_bm25's BM25Okapi: with N documents, df of which hold a word, idf = log(N - df + 0.5) - log(df + 0.5), a negative idf
being replaced by a quarter of the mean idf of all words; k1 = 1.5, b = 0.75. Here besides no idf is below `MIN_IDF`.

The mean document length and every idf change with every document, so nothing that depends on them is kept for good. A document lies twice
in the index: as a list of its words, from which exact scores (f64) of few documents are computed, and in the list of each of its words,
from which a query adds up approximate scores (f32) of all. Terms are never negative, so the approximate scores have a bound on their
relative error; every document that it leaves in question is scored exactly. Words that many documents hold would have long lists. What such
a word adds is kept as a column over all documents, of statistics that were true a short while ago; the error of that is bounded too.
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

K1, B, EPSILON = 1.5, 0.75, 0.25
# Among few documents most words are common, and Okapi's idf of a word that half of them hold is zero or negative: a match would count for
# nothing or against. Every match shall count for something.
MIN_IDF = 1e-3

_EXACT_ROWS = 512
"""Up to so many documents, all are scored exactly."""
_COLUMN_SHARE = 1 / 16
"""A word gets a column when more than this share of the documents hold it: then adding up a column takes less time than its list."""
_COLUMN_CLOSENESS = 0.99
"""A column is used as long as its values are within this factor of what they would be by now."""
_COLUMN_TAIL = 1024
"""Largest number of documents with the word that are not in its column yet."""
_CHUNK_ROWS = 8192
"""Documents that are scored exactly at once: bounds the memory for it."""
_BATCH = 4096
"""Entries of lists that are added up at once, at least: enough to make calls few, few enough to stay in the processor's cache."""
_SPANS = 16
"""Spans of rows for each document that is looked for."""
_ROUNDING = 2.0**-20
"""Bound, with room, on the relative error (f32) of a term with a rounding error for each term that is added: some ten of 2^-24."""


@dataclasses.dataclass(frozen=True)
class _Column:
    """What a word adds to each row's score, by the first `postings` entries of its list, for the idf and mean length of that time."""

    values: np.ndarray
    postings: int
    idf: float
    mean_length: float


class Bm25:
    """An index over documents, each a list of words.

    A document's row is the number of documents that were added before it. Rows change in `compact` alone. Queries may run in several
    threads at once, but not while a document is added or removed.

    Args:
        documents: their words, in order.
    """

    def __init__(self, documents: Iterable[Sequence[str]] = ()):
        self._vocabulary: dict[str, int] = {}
        self._words, self._counts = array("i"), array("i")  # distinct words of all documents, one document after another
        self._starts = array("q", [0])  # where each document's words begin, and the end of the last
        self._lengths = array("i")  # of each document, in words
        self._alive = array("b")  # 0 for a removed document
        for document in documents:
            self._append(document)
        self._arrange()

    def __len__(self) -> int:
        return self._documents

    @property
    def removed(self) -> int:
        """Documents that were removed and still take memory and time: until `compact`."""
        return len(self._alive) - self._documents

    def add(self, document: Sequence[str]) -> int:
        """Adds a document and returns its row."""
        row = len(self._lengths)
        self._append(document)
        ids = self._words[self._starts[row] :]
        for word, count in zip(ids, self._counts[self._starts[row] :], strict=True):
            if word >= len(self._postings):  # new words have the next numbers
                self._postings.append((array("i"), array("f")))
                self._frequencies.append(0)
            rows, counts = self._postings[word]
            rows.append(row)
            counts.append(count)
        self._classes.append(0)
        self._count(np.asarray(ids), +1)
        self._documents += 1
        self._total_length += len(document)
        return row

    def remove(self, row: int) -> None:
        """Removes a document. Raises KeyError if there is none at this row."""
        if not 0 <= row < len(self._alive) or not self._alive[row]:
            raise KeyError(f"no document at row {row}")
        self._alive[row] = 0
        self._count(np.asarray(self._words[self._starts[row] : self._starts[row + 1]]), -1)
        self._documents -= 1
        self._total_length -= self._lengths[row]

    def compact(self) -> np.ndarray:
        """Forgets removed documents and the words that they alone held.

        Returns:
            The rows that remain, i64[number of documents], in their order: the document at row r[i] is at row i now.
        """
        rows = self._rows()
        at, owner = self._spans(rows)
        words, counts = np.asarray(self._words)[at], np.asarray(self._counts)[at]
        held = np.asarray(self._frequencies) > 0
        renumbered = np.cumsum(held) - 1
        lengths = np.asarray(self._lengths)[rows]
        self._vocabulary = {word: int(renumbered[i]) for word, i in self._vocabulary.items() if held[i]}
        self._words, self._counts = _int_array(renumbered[words]), _int_array(counts)
        self._starts = array("q", [0, *np.cumsum(np.bincount(owner, minlength=len(rows))).tolist()])
        self._lengths, self._alive = _int_array(lengths), array("b", [1]) * len(rows)
        self._arrange()
        return rows

    def scores(self, query: Iterable[str]) -> np.ndarray:
        """The score of every document for the query's distinct words, f64[number of documents], in order of their rows."""
        return self._exact(self._rows(), self._terms(query))

    def top(self, query: Iterable[str], k: int) -> np.ndarray:
        """Rows of the k documents with the highest scores, i64[min(k, number of documents)], best first; equal scores by row."""
        terms, k = self._terms(query), min(max(k, 0), self._documents)
        if not terms or not k:
            return self._rows()[:k]
        if self._documents <= max(_EXACT_ROWS, 4 * k):
            return self._best(self._rows(), terms, k)
        approximate, error = self._approximate(terms)
        if self.removed:
            approximate[np.asarray(self._alive) == 0] = -1
        # The k-th highest of the maxima of equal spans of rows is found quickly, and is no higher than the k-th score.
        span = max(1, len(approximate) // (_SPANS * k))
        maxima = approximate[: len(approximate) - len(approximate) % span].reshape(-1, span).max(axis=1)
        least = np.partition(maxima, len(maxima) - k)[-k]
        rows = np.flatnonzero(approximate >= least if least > 0 else approximate > 0)
        if len(rows) >= k:
            least = np.partition(approximate[rows], len(rows) - k)[-k]
            rows = np.flatnonzero(approximate >= least * (1 - error))
        best = self._best(rows, terms, k)
        return np.concatenate([best, np.flatnonzero(approximate == 0)[: k - len(best)]]) if len(best) < k else best

    def _append(self, document: Sequence[str]) -> None:
        """The document's words at the end of the list of all, and nothing else."""
        vocabulary, counts = self._vocabulary, Counter(document)
        self._words.extend([vocabulary.setdefault(word, len(vocabulary)) for word in counts])
        self._counts.extend(counts.values())
        self._starts.append(len(self._words))
        self._lengths.append(len(document))
        self._alive.append(1)

    def _arrange(self) -> None:
        """Everything that follows from the documents' words, none of them being removed."""
        words, counts = np.asarray(self._words), np.asarray(self._counts, np.float32)
        owner = np.repeat(np.arange(len(self._lengths), dtype=np.int32), np.diff(np.asarray(self._starts)))
        order = np.argsort(words.astype(np.uint16) if len(self._vocabulary) <= 1 << 16 else words, kind="stable")  # 16 bits take a fifth of the time
        owner, counts = owner[order], counts[order]
        frequencies = np.bincount(words, minlength=len(self._vocabulary))
        ends = np.cumsum(frequencies).tolist()
        self._postings = [
            (array("i", owner[start:end].tobytes()), array("f", counts[start:end].tobytes())) for start, end in zip([0, *ends], ends, strict=False)
        ]
        self._frequencies = _int_array(frequencies)  # documents that hold a word
        self._classes = _int_array(np.bincount(frequencies, minlength=len(self._lengths) + 1))  # words of each document frequency
        self._documents, self._total_length = len(self._lengths), sum(self._lengths)
        self._columns: dict[int, _Column] = {}
        self._forget()

    def _count(self, words: np.ndarray, change: int) -> None:
        """Counts a document's distinct words in or out."""
        frequencies, classes = np.asarray(self._frequencies), np.asarray(self._classes)
        before = frequencies[words]
        np.subtract.at(classes, before, 1)
        np.add.at(classes, before + change, 1)
        frequencies[words] = before + change
        self._forget()

    def _forget(self) -> None:
        """Lets go of what depends on all documents."""
        self._floor: float | None = None
        self._norms: np.ndarray | None = None

    def _rows(self) -> np.ndarray:
        return np.flatnonzero(np.asarray(self._alive))

    def _mean_length(self) -> float:
        return self._total_length / self._documents

    def _terms(self, query: Iterable[str]) -> list[tuple[int, float]]:
        """(number, idf) of the query's distinct words that a document holds, in order."""
        found = (self._vocabulary.get(word) for word in dict.fromkeys(query))
        return [(word, self._idf(self._frequencies[word])) for word in found if word is not None and self._frequencies[word]]

    def _idf(self, frequency: int) -> float:
        idf = math.log(self._documents - frequency + 0.5) - math.log(frequency + 0.5)
        if idf < 0:
            if self._floor is None:
                classes = np.asarray(self._classes)
                held = 1 + np.flatnonzero(classes[1:])
                idfs = np.log(self._documents - held + 0.5) - np.log(held + 0.5)
                self._floor = EPSILON * float(np.average(idfs, weights=classes[held]))
            idf = self._floor
        return max(idf, MIN_IDF)

    def _spans(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the words of these documents lie in the list of all, and for each of them the place in `rows` of its document."""
        starts = np.asarray(self._starts)
        first, sizes = starts[rows], starts[rows + 1] - starts[rows]
        owner = np.repeat(np.arange(len(rows)), sizes)
        return np.arange(len(owner)) + (first - (np.cumsum(sizes) - sizes))[owner], owner

    def _exact(self, rows: np.ndarray, terms: Sequence[tuple[int, float]]) -> np.ndarray:
        """Scores of some documents, f64[len(rows)]: for each, its terms are added in the order of the query."""
        if not terms:
            return np.zeros(len(rows))
        if len(rows) > _CHUNK_ROWS:
            return np.concatenate([self._exact(rows[i : i + _CHUNK_ROWS], terms) for i in range(0, len(rows), _CHUNK_ROWS)])
        place = np.full(len(self._vocabulary), -1, np.int32)  # of each word in the query
        place[[word for word, _ in terms]] = np.arange(len(terms))
        at, owner = self._spans(rows)
        places = place[np.asarray(self._words)[at]]
        hits = np.flatnonzero(places >= 0)
        hits = hits[np.argsort(places[hits], kind="stable")]
        owner, counts, idf = owner[hits], np.asarray(self._counts)[at[hits]], np.array([idf for _, idf in terms])[places[hits]]
        norms = K1 * (1 - B + B * np.asarray(self._lengths)[rows] / self._mean_length())
        return np.bincount(owner, idf * (counts * (K1 + 1) / (counts + norms[owner])), minlength=len(rows))

    def _best(self, rows: np.ndarray, terms: Sequence[tuple[int, float]], k: int) -> np.ndarray:
        """The k best of some rows, which are in order."""
        return rows[np.argsort(-self._exact(rows, terms), kind="stable")[:k]]

    def _approximate(self, terms: Sequence[tuple[int, float]]) -> tuple[np.ndarray, float]:
        """Scores of all rows in units of k1 + 1, f32[rows], and how far they are to be trusted: of two rows, the one with the exact score
        that is higher or equal has at least (1 - error) times the other's approximate score. Returns both."""
        total, agreement = np.zeros(len(self._lengths), np.float32), 1.0
        if self._norms is None:
            lengths = np.asarray(self._lengths, np.float32)
            self._norms = lengths * np.float32(K1 * B / self._mean_length()) + np.float32(K1 * (1 - B))
        lists: list[tuple[np.ndarray, np.ndarray, float]] = []  # rows and counts that no column holds, and the idf
        size = 0
        for word, idf in terms:
            rows, counts = map(np.asarray, self._postings[word])
            if len(rows) > _COLUMN_SHARE * len(total):
                column, closeness = self._column(word, idf)
                total[: len(column.values)] += column.values
                agreement = min(agreement, closeness)
                rows, counts = rows[column.postings :], counts[column.postings :]
            lists.append((rows, counts, idf))
            size += len(rows)
            if size > _BATCH:
                self._add_lists(total, lists)
                lists, size = [], 0
        self._add_lists(total, lists)
        return total, 1 - agreement**2 * (1 - 2 * _ROUNDING * (len(terms) + 1))  # twice, as columns may err in both directions

    def _add_lists(self, total: np.ndarray, lists: Sequence[tuple[np.ndarray, np.ndarray, float]]) -> None:
        """Adds to `total` what words add to the documents of their lists."""
        if not lists:
            return
        rows = np.concatenate([rows for rows, _, _ in lists]).astype(np.intp)
        added = _saturated(np.concatenate([counts for _, counts, _ in lists]), self._norms[rows])
        added *= np.repeat(np.array([idf for _, _, idf in lists], np.float32), [len(rows) for rows, _, _ in lists])
        np.add.at(total, rows, added)

    def _column(self, word: int, idf: float) -> tuple[_Column, float]:
        """The word's column, as it was if that is still close enough, and the factor by which its values may be off."""
        column, mean_length = self._columns.get(word), self._mean_length()
        rows, counts = map(np.asarray, self._postings[word])
        if column is not None and len(rows) - column.postings <= _COLUMN_TAIL:
            # A term is proportional to the idf. It grows with the mean length, and by no larger a factor.
            closeness = _ratio(column.idf, idf) * _ratio(column.mean_length, mean_length)
            if closeness >= _COLUMN_CLOSENESS:
                return column, closeness
        at, values = rows.astype(np.intp), np.zeros(len(self._lengths), np.float32)
        values[at] = idf * _saturated(counts, self._norms[at])
        column = self._columns[word] = _Column(values, len(at), idf, mean_length)
        return column, 1.0


def _ratio(a: float, b: float) -> float:
    """Of two positive numbers, at most 1."""
    return min(a / b, b / a)


def _saturated(counts: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """What a word adds to documents that hold it so often, without its idf and the factor k1 + 1."""
    return counts / (counts + norms)


def _int_array(values: np.ndarray) -> array:
    return array("i", values.astype(np.int32).tobytes())
