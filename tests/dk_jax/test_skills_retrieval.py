"""Retrieval finds skills by their words, in a stable order, whatever the size of the library and however it came to be."""

import dataclasses

import numpy as np
import pytest
from rank_bm25 import BM25Okapi

from dk_jax.skills import bm25 as bm25_module
from dk_jax.skills import retrieval
from dk_jax.skills.bm25 import MIN_IDF, Bm25
from dk_jax.skills.record import Skill, SkillDraft, Usage
from dk_jax.skills.retrieval import SkillIndex, words


def skill(name, text, tags=("cpu", "loops", "simd")):
    content = f"Motivation: speed\nKey Idea: {text}\nExample: x"
    return SkillDraft(name=name, description=text, scope="general", tags=tags, content=content)


SKILLS = [
    skill("fuse_softmax", "find max and sum of a softmax row in one pass"),
    skill("tile_matmul", "block a matrix product so that tiles stay in cache"),
    skill("omp_rows", "threads over independent rows"),
    skill("simd_reduce", "vectorise a sum by several accumulators"),
    skill("pad_pool", "handle borders of a pooling window apart"),
]


@pytest.mark.parametrize(
    ("query", "best"),
    [
        ("class Model: torch.softmax(x, dim=-1)", "fuse_softmax"),
        ("MatMul of two matrices, product in blocks", "tile_matmul"),
        ("max_pool1d window borders", "pad_pool"),
    ],
)
def test_the_skill_about_the_task_comes_first(query, best):
    assert SkillIndex(SKILLS).top(query, k=3)[0].name == best


def test_every_field_is_searched():
    skills = [skill("alpha", "a"), skill("beta", "b", tags=("zebra", "y", "z")), skill("gamma", "c")]
    index = SkillIndex(skills)
    assert index.top("zebra")[0].name == "beta"
    assert index.top("gamma")[0].name == "gamma"


def test_scores_are_those_of_rank_bm25():
    rng = np.random.default_rng(0)
    vocabulary = [f"{a}{b}" for a in "abcdefgh" for b in "klmnop"]
    skills = [skill(f"s{chr(97 + i)}", " ".join(rng.choice(vocabulary, 12))) for i in range(25)]
    index = SkillIndex(skills)
    bm25 = BM25Okapi([words(" ".join([s.name, s.description, *s.tags, s.content])) for s in skills])
    for _ in range(20):
        query = rng.choice(vocabulary, 6, replace=False).tolist()
        np.testing.assert_allclose(index.scores(" ".join(query)), bm25.get_scores(query), rtol=1e-9)


def test_equal_scores_keep_the_given_order_and_k_bounds_the_answer():
    skills = [skill(f"skill_{c}", "the same words") for c in "edcba"]
    top = SkillIndex(skills).top("words", k=3)
    assert [s.name for s in top] == ["skill_e", "skill_d", "skill_c"]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_match_counts_even_in_a_library_of_few(count):
    others = [skill(f"other_{c}", "nothing of the kind") for c in "abc"[: count - 1]]
    top = SkillIndex([*others, skill("tiles", "cumsum")]).top("cumsum")
    assert top[0].name == "tiles" and len(top) == count


def test_an_empty_library_and_an_empty_query_are_fine():
    assert SkillIndex([]).top("anything") == []
    assert SkillIndex([]).top("") == []
    assert SkillIndex(SKILLS).top("", k=2) == SKILLS[:2]


def test_identifiers_fall_into_their_words():
    assert words("LayerNorm row_sum float32") == ["layer", "norm", "row", "sum", "float", "32"]


# --- documents that come and go, against rank_bm25 ---------------------------------------------------------------------


def oracle(documents, query):
    """Scores by rank_bm25 of a query's distinct words, with the floor on the idf."""
    if not any(documents):
        return np.zeros(len(documents))
    found = BM25Okapi(documents)
    found.idf = {word: max(idf, MIN_IDF) for word, idf in found.idf.items()}
    return found.get_scores(list(dict.fromkeys(query)))


def assert_agrees(index, rows, documents, query, k):
    """`rows` and `documents`: those that are in the index, in order."""
    expected, scores = oracle(documents, query), index.scores(query)
    np.testing.assert_allclose(scores, expected, rtol=1e-9, atol=0)
    best = np.argsort(-scores, kind="stable")[:k]
    assert index.top(query, k).tolist() == [rows[i] for i in best]
    # In rank_bm25's order too, but for scores that differ by rounding alone.
    np.testing.assert_allclose(expected[best], -np.sort(-expected)[:k], rtol=1e-9, atol=0)


@pytest.fixture(params=["exact", "filtered", "filtered, no columns", "as it is"])
def road(request, monkeypatch):
    """Small numbers of documents go the ways that large ones go."""
    if request.param == "as it is":
        return
    small = {"_EXACT_ROWS": 10**9 if request.param == "exact" else 3, "_CHUNK_ROWS": 7, "_BATCH": 20, "_COLUMN_TAIL": 6, "_SPANS": 2}
    small |= {"_COLUMN_CLOSENESS": 0.7, "_COLUMN_SHARE": 2.0 if "no columns" in request.param else 0.1}
    for name, value in small.items():
        monkeypatch.setattr(bm25_module, name, value)


def zipf_words(rng, count, vocabulary=60):
    share = 1 / np.arange(1, vocabulary + 1)
    return [f"w{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in rng.choice(vocabulary, count, p=share / share.sum())]


@pytest.mark.parametrize("seed", range(6))
def test_scores_and_order_hold_after_every_addition_and_removal(road, seed):
    rng = np.random.default_rng(seed)
    documents = [zipf_words(rng, rng.integers(0, 25)) for _ in range(rng.choice([0, 1, 40]))]
    index, there = Bm25(documents), dict(enumerate(documents))
    for step in range(160):
        shrinking = (step // 40) % 2  # forty steps of growth, forty of decline
        if there and rng.random() < 0.2 + 0.6 * shrinking:
            row = int(rng.choice(list(there)))
            index.remove(row)
            del there[row]
        else:
            document = zipf_words(rng, rng.integers(0, 25) * (1 + 3 * (step > 80)))
            there[index.add(document)] = document
        if rng.random() < 0.05:
            there = dict(enumerate(there[row] for row in index.compact().tolist()))
            assert index.removed == 0
        assert len(index) == len(there)
        query = [*zipf_words(rng, rng.integers(0, 30)), "unknown"]
        assert_agrees(index, list(there), list(there.values()), query, int(rng.integers(0, 12)))


def test_an_index_that_grew_and_shrank_equals_a_new_one_bit_for_bit(road):
    rng = np.random.default_rng(1)
    skills = [skill(f"s{i}", " ".join(zipf_words(rng, 12))) for i in range(300)]
    grown = SkillIndex(skills[:50])
    for one in skills[50:]:
        grown.add(one)
    leaving = rng.permutation(300)[:200].tolist()
    for i in leaving:  # past the number at which the index tidies up
        grown.remove(skills[i])
    new = SkillIndex([one for i, one in enumerate(skills) if i not in leaving])
    assert len(grown) == len(new) == 100
    for _ in range(30):
        query = " ".join(zipf_words(rng, 15))
        np.testing.assert_array_equal(grown.scores(query), new.scores(query))
        assert grown.top(query) == new.top(query)


def test_an_index_that_follows_a_library_equals_a_new_one(monkeypatch):
    rng, index, built = np.random.default_rng(3), SkillIndex(), []
    fill = SkillIndex._fill
    monkeypatch.setattr(SkillIndex, "_fill", lambda self, skills: (self is index and built.append(len(self)), fill(self, skills)))
    library = [dataclasses.replace(Skill.from_draft(skill(f"s{i}", " ".join(zipf_words(rng, 12)))), id=f"{i:04d}") for i in range(400)]
    there = library[:50]
    for step in range(12):
        leaving = set(rng.permutation(len(there))[: rng.integers(0, 40)].tolist())
        there = [one for i, one in enumerate(there) if i not in leaving] + library[50 + 25 * step : 75 + 25 * step]
        there = [dataclasses.replace(one, usage=dataclasses.replace(one.usage, shown=step)) for one in there]
        if step == 8:  # one that was away is back where it was
            away = next(one for one in library if one.id not in {other.id for other in there})
            there = sorted([*there, away], key=lambda one: one.id)
        if step == 10:
            there[3] = dataclasses.replace(there[3], content="rewritten text")
        index.follow(there)
        assert len(built) == (step >= 8) + (step >= 10)
        new = SkillIndex(there)
        for _ in range(5):
            query = " ".join(zipf_words(rng, 15))
            np.testing.assert_array_equal(index.scores(query), new.scores(query))
            assert index.top(query) == new.top(query)
    index.follow([])
    assert len(index) == 0 and index.top("a") == []


def test_drafts_are_followed_too():
    index = SkillIndex(SKILLS)
    index.follow(SKILLS[1:])
    assert index.top("", k=9) == SKILLS[1:]


def test_a_thousand_documents_with_columns_out_of_date():
    rng = np.random.default_rng(2)
    documents = [zipf_words(rng, 20, vocabulary=400) for _ in range(1500)]
    index = Bm25(documents)
    for _ in range(4):
        query = zipf_words(rng, 40, vocabulary=400)
        assert_agrees(index, range(len(documents)), documents, query, 20)
        longer = [zipf_words(rng, 45, vocabulary=400) for _ in range(8)]  # the mean length grows by less than a column outlives
        for document in longer:
            index.add(document)
        documents += longer
        assert_agrees(index, range(len(documents)), documents, query, 20)


def test_equal_scores_keep_the_given_order_in_a_large_library(road):
    documents = [["same", "words"], ["other"]] * 400
    index = Bm25(documents)
    assert index.top(["same"], 5).tolist() == [0, 2, 4, 6, 8]
    index.remove(2)
    row = index.add(["same", "words"])
    assert index.top(["same"], 402).tolist() == [0, *range(4, 800, 2), row, 1, 3]
    assert index.top(["unknown"], 3).tolist() == [0, 1, 3]


def test_documents_of_equal_words_in_another_order_have_equal_scores(road):
    rng = np.random.default_rng(3)
    same = zipf_words(rng, 20)
    documents = [rng.permutation(same).tolist() if i % 3 else zipf_words(rng, 20) for i in range(600)]
    index = Bm25(documents)
    scores = index.scores(same)
    assert len(set(scores[[i for i in range(600) if i % 3]].tolist())) == 1
    assert index.top(same, 50).tolist() == np.argsort(-scores, kind="stable")[:50].tolist()


@pytest.mark.parametrize("seed", range(5))
def test_approximate_scores_are_as_close_as_they_say(monkeypatch, seed):
    monkeypatch.setattr(bm25_module, "_COLUMN_CLOSENESS", 0.5)
    rng = np.random.default_rng(seed)
    index = Bm25([zipf_words(rng, 20) for _ in range(400)])
    for growth in (0, 1, 10, 60):
        for _ in range(growth):
            index.add(zipf_words(rng, 60))
        for _ in range(10):
            terms = index._terms(zipf_words(rng, rng.integers(1, 40)))
            approximate, error = index._approximate(terms)
            exact = index._exact(index._rows(), terms)
            np.testing.assert_array_equal(approximate == 0, exact == 0)
            ratios = exact[exact > 0] / approximate[exact > 0]
            assert ratios.min() >= ratios.max() * (1 - error)


def test_few_matches_come_before_the_others_in_order(road):
    index = Bm25([["common"]] * 300 + [["rare", "common"], ["rare"]] + [["common"]] * 500)
    index.remove(1)
    assert index.top(["rare"], 5).tolist() == [301, 300, 0, 2, 3]


def test_a_word_in_every_document_counts_by_how_often_it_is_there(road):
    documents = [["all"] * (1 + i % 7) + ["pad"] * (6 - i % 7) for i in range(700)]
    index = Bm25(documents)
    assert_agrees(index, range(700), documents, ["all"], 20)
    assert index.top(["all"], 3).tolist() == [6, 13, 20]


def test_a_query_word_counts_once():
    index = SkillIndex(SKILLS)
    np.testing.assert_array_equal(index.scores("softmax sum softmax Softmax"), index.scores("softmax sum"))


@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_an_index_without_words(road, documents):
    index = Bm25(documents)
    np.testing.assert_array_equal(index.scores(["a"]), np.zeros(len(documents)))
    assert index.top(["a"], 5).tolist() == list(range(len(documents)))
    row = index.add(["a"])
    assert index.top(["a"], 5)[0] == row and index.scores(["a"])[row] > 0


def test_empty_documents_count_as_documents(road):
    documents = [[], ["a", "b"], [], ["b", "b"], []]
    index = Bm25(documents)
    assert_agrees(index, range(5), documents, ["a", "b"], 5)
    index.remove(2)
    assert_agrees(index, [0, 1, 3, 4], [documents[i] for i in (0, 1, 3, 4)], ["a", "b"], 5)


def test_all_may_leave_and_others_come():
    index = SkillIndex(SKILLS)
    for one in SKILLS:
        index.remove(one)
    assert len(index) == 0 and index.top("softmax") == [] and index.scores("softmax").shape == (0,)
    index.add(SKILLS[1])
    assert index.top("softmax") == [SKILLS[1]]
    core = Bm25([["a"], ["b"]])
    core.remove(0), core.remove(1)
    assert core.compact().tolist() == [] and core.add(["a"]) == 0


def test_a_row_is_removed_once():
    index = Bm25([["a"], ["b"]])
    index.remove(1)
    for row in (1, 2, -1):
        with pytest.raises(KeyError, match=f"row {row}"):
            index.remove(row)


# --- which skill is meant ------------------------------------------------------------------------------------------------


def test_skills_with_ids_leave_by_their_id_whatever_else_changed():
    first, second = (Skill.from_draft(SKILLS[0], id=f"s{i}") for i in range(2))
    index = SkillIndex([first, second])
    index.remove(dataclasses.replace(first, usage=Usage(shown=3)))
    assert index.top("softmax") == [second]
    index.remove("s1")
    assert len(index) == 0
    with pytest.raises(KeyError, match="s1"):
        index.remove("s1")


def test_an_id_is_there_once():
    one = Skill.from_draft(SKILLS[0], id="s1")
    with pytest.raises(ValueError, match="'s1'"):
        SkillIndex([one, one])
    index = SkillIndex([one])
    with pytest.raises(ValueError, match="'s1'"):
        index.add(one)
    assert len(index) == 1 and index.top("softmax") == [one]
    index.remove(one)
    index.add(one)
    assert index.top("softmax") == [one]


def test_of_equal_drafts_the_first_leaves():
    same, other = SKILLS[0], SKILLS[1]
    index = SkillIndex([same, other, Skill.from_draft(same)])
    index.remove(same)
    assert index.top("", k=5) == [other, Skill.from_draft(same)]
    index.remove(same)
    with pytest.raises(KeyError, match="fuse_softmax"):
        index.remove(same)


def test_skills_are_known_after_the_index_tidied_up(monkeypatch):
    monkeypatch.setattr(retrieval, "_SPARE_ROWS", 2)
    skills = [Skill.from_draft(skill(f"name_{i}", f"text{i}"), id=f"s{i}") for i in range(12)]
    index = SkillIndex(skills)
    for i in (3, 0, 7, 5, 11, 1):
        index.remove(f"s{i}")
    left = [skills[i] for i in (2, 4, 6, 8, 9, 10)]
    assert index.top("") == left
    index.add(skills[0])
    assert index.top("name 9", k=1) == [skills[9]] and index.top("") == [*left, skills[0]]
