"""How fast skills are found in a large library, and how fast they come and go; rank_bm25 for comparison.

    taskset -c 0 python scripts/bench/retrieval.py --out scripts/bench/results/retrieval.json [--skills 100000]

Skills are made up: some 120 words each, drawn by Zipf's law from 30,000 words, of which those of the built-in tasks are the most frequent.
Queries of a given number of words are either `task` (so much of the built-in tasks' texts) or `drawn` (by the same law as the skills, so
that more of the words are distinct). Times are of one thread, in milliseconds, and include cutting the query into its words. `after_add`
are queries each of which follows an addition, so that no statistics are at hand. Memory is what the process grew by, without the skills.
rank_bm25 is asked for the scores of the query's distinct words, without sorting them.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rank_bm25 import BM25Okapi
from serving import provenance

from dk_jax.skills.bm25 import MIN_IDF
from dk_jax.skills.record import Skill
from dk_jax.skills.retrieval import SkillIndex, words
from dk_jax.tasks.builtin import builtin_suite

VOCABULARY = 30_000
WORDS_MEAN, WORDS_SPREAD = 120, 0.3
QUERY_WORDS = (10, 30, 100, 200)
K = 20


class Texts:
    """Makes skills and queries; equal seeds make equal ones."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        suite = builtin_suite()
        texts = [words(f"{task.name} {task.compact}\n{task.reference}") for task in (*suite.train, *suite.held_out)]
        self.task_words = list(itertools.chain.from_iterable(texts))
        names = [word for word, _ in Counter(self.task_words).most_common()]
        letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
        known = set(names)
        while len(names) < VOCABULARY:
            name = "".join(self.rng.choice(letters, self.rng.integers(4, 11)))
            if name not in known:
                known.add(name)
                names.append(name)
        self.names = np.array(names)
        self.upto = np.cumsum(1 / np.arange(1, VOCABULARY + 1))
        self.upto /= self.upto[-1]
        self.made = 0

    def drawn(self, count: int) -> list[str]:
        """Words by Zipf's law."""
        return self.names[np.searchsorted(self.upto, self.rng.random(count))].tolist()

    def task(self, count: int) -> list[str]:
        """So many words of the tasks' texts, one after another."""
        start = self.rng.integers(len(self.task_words) - count)
        return self.task_words[start : start + count]

    def skill(self) -> Skill:
        """The next skill."""
        size = max(20, int(WORDS_MEAN * np.exp(WORDS_SPREAD * self.rng.standard_normal())))
        text = self.drawn(size)
        self.made += 1
        return Skill(
            id=f"s{self.made:06d}", name="_".join(text[:3]), description=" ".join(text[3:13]), scope="general", tags=tuple(text[13:17]),
            content=" ".join(text[17:]),
        )  # fmt: skip


def timed(action: Callable[[Any], Any], inputs: Iterable[Any]) -> dict[str, float]:
    """Median, 99 % and longest time of the action, in ms, and how often it ran."""
    took = []
    for value in inputs:
        start = time.perf_counter()
        action(value)
        took.append(1e3 * (time.perf_counter() - start))
    middle, high = np.percentile(took, [50, 99])
    return {"median_ms": round(middle, 4), "p99_ms": round(high, 4), "max_ms": round(max(took), 4), "times": len(took)}


def memory_mb() -> float:
    """Resident memory of this process, without what the allocator could give back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss / 2**20


def built(make: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What `make` makes, the seconds for it, and the MB that it takes."""
    before, start = memory_mb(), time.perf_counter()
    made = make()
    took = time.perf_counter() - start
    return made, {"build_s": round(took, 2), "memory_mb": round(memory_mb() - before, 1)}


def queries_of(texts: Texts, kind: str, count: int, number: int) -> list[str]:
    return [" ".join(getattr(texts, kind)(count)) for _ in range(number)]


def measure(texts: Texts, skills: Sequence[Skill], queries: int, changes: int) -> dict[str, Any]:
    """All times of a `SkillIndex`."""
    before = memory_mb()
    index, found = built(lambda: SkillIndex(skills))
    found["query"] = []
    for kind, count in itertools.product(("task", "drawn"), QUERY_WORDS):
        asked = queries_of(texts, kind, count, queries)
        timed(lambda query: index.top(query, K), asked[:10])
        found["query"].append({"kind": kind, "words": count, **timed(lambda query: index.top(query, K), asked)})
    found["memory_after_queries_mb"] = round(memory_mb() - before, 1)
    found["add"] = timed(index.add, [texts.skill() for _ in range(changes)])
    found["after_add"] = []
    for count in QUERY_WORDS:
        asked = ((index.add(texts.skill()), query)[1] for query in queries_of(texts, "drawn", count, queries))
        found["after_add"].append({"kind": "drawn", "words": count, **timed(lambda query: index.top(query, K), asked)})
    # So many that the index tidies up once on the way: that is the longest time.
    leaving = texts.rng.permutation([skill.id for skill in skills])[: len(skills) // 4].tolist()
    found["remove"] = timed(index.remove, leaving)
    return found


def compare(texts: Texts, skills: Sequence[Skill], queries: int) -> dict[str, Any]:
    """Times of rank_bm25 on the same words, and whether both find the same."""
    bm25, found = built(lambda: BM25Okapi([words(" ".join([s.name, s.description, *s.tags, s.content])) for s in skills]))
    index = SkillIndex(skills)
    bm25.idf = {word: max(idf, MIN_IDF) for word, idf in bm25.idf.items()}
    found |= {"query": [], "largest_relative_difference": 0.0, "same_order": True}
    for kind, count in itertools.product(("task", "drawn"), QUERY_WORDS):
        asked = queries_of(texts, kind, count, queries)
        found["query"].append({"kind": kind, "words": count, **timed(lambda query: bm25.get_scores(list(dict.fromkeys(words(query)))), asked)})
        scores = bm25.get_scores(list(dict.fromkeys(words(asked[0]))))
        difference = np.abs(index.scores(asked[0]) - scores) / np.maximum(scores, MIN_IDF)
        found["largest_relative_difference"] = max(found["largest_relative_difference"], float(difference.max()))
        found["same_order"] &= index.top(asked[0], K) == [skills[i] for i in np.argsort(-scores, kind="stable")[:K]]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--skills", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=300, help="of each length")
    parser.add_argument("--changes", type=int, default=5000, help="additions")
    parser.add_argument("--compared", type=int, default=2, help="queries of each length to rank_bm25; 0 leaves it out")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    texts = Texts(options.seed)
    skills = [texts.skill() for _ in range(options.skills)]
    result = provenance(("numpy", "rank_bm25")) | {"skills": options.skills, "k": K}
    result["index"] = measure(texts, skills, options.queries, options.changes)
    print(json.dumps(result["index"], indent=1), flush=True)
    if options.compared:
        result["rank_bm25"] = compare(texts, skills, options.compared)
        print(json.dumps(result["rank_bm25"], indent=1))
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
