"""Retrieval finds skills by their words, in a stable order, whatever the size of the library."""

import numpy as np
import pytest
from rank_bm25 import BM25Okapi

from dk_jax.skills.record import SkillDraft
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
