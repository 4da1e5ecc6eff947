"""The diversity filter: dominant topics are thinned, all else stays."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dk_jax.agents import summary
from dk_jax.sft.diversity import DiversityConfig, Spread, cap_of, filter_samples, k_center, text_of, title_of
from dk_jax.sft.samples import Sample
from dk_jax.skills.record import SkillDraft

WIDTH = 10


def skill(name: str, content: str) -> SkillDraft:
    content = f"Motivation: {content}\nKey Idea: so.\nExample: x = 1"
    return SkillDraft(name=name, description="what it is", scope="general", tags=("a", "b", "c"), content=content)


def said(name: str, content: str, *, task: str = "t") -> Sample:
    answer = summary.format([skill(name, content)], style="chat")
    return Sample(agent="summary", kind="summary", task=task, turns=(("asked", answer, True),))


def places(texts) -> np.ndarray:
    """An embedder for texts that hold where they lie: "at 1.0 2.0 3.0;", all but the first numbers 0."""
    rows = [[float(x) for x in re.search(r"\bat ([^;]*);", text)[1].split()] for text in texts]
    return np.array([row + [0.0] * (WIDTH - len(row)) for row in rows])


def at(point) -> str:
    return f"at {' '.join(map(str, point))};"


def crowd(rng, name: str, axis: int, count: int, spread: float = 0.03) -> list[Sample]:
    """Samples around 5 on one axis."""
    points = 5 * np.eye(WIDTH)[axis] + spread * rng.standard_normal((count, WIDTH))
    return [said(f"{name}_{i}", at(point)) for i, point in enumerate(points)]


def scattered(rng, count: int) -> list[Sample]:
    return [said(f"rare_{i}", at(8 * rng.standard_normal(WIDTH))) for i in range(count)]


def many(seed: int = 0, sizes=(60, 12, 10, 8), noise: int = 6) -> list[Sample]:
    """Clusters of these sizes, scattered samples, and two of another agent, shuffled."""
    rng = np.random.default_rng(seed)
    samples = [s for i, n in enumerate(sizes) for s in crowd(rng, f"topic{i}", i, n)] + scattered(rng, noise)
    samples += [Sample(agent="policy", kind="policy", task=f"p{i}", turns=(("ask", f"```python\nx = {i}\n```", True),)) for i in range(2)]
    return [samples[i] for i in rng.permutation(len(samples))]


def topic(sample: Sample) -> str:
    return re.search(r'"name": "(topic\d|rare|)', sample.turns[0][1].split("skills")[2])[1]


def test_a_dominant_topic_is_thinned_and_all_else_stays_in_its_order():
    samples = many()
    kept, report = filter_samples(samples, config=DiversityConfig(max_share=0.3), embed=places, seed=0)
    [part] = report.agents
    assert len(part.topics) == 4 and part.topics[0].before == 60
    # All others are 36: a topic with 0.3 of what is kept has 0.3 / 0.7 times as many.
    assert part.topics[0].after == part.cap == math.floor(36 * 0.3 / 0.7)
    assert all(t.after == t.before for t in part.topics[1:])
    assert kept == [samples[i] for i in report.kept] and list(report.kept) == sorted(report.kept)
    gone = [s for i, s in enumerate(samples) if i not in set(report.kept)]
    assert len(gone) == 60 - part.cap and {topic(s) for s in gone} == {"topic0"}
    assert part.after.largest_share <= 0.3 < part.before.largest_share
    assert part.after.effective_clusters > part.before.effective_clusters
    assert part.topics[0].title.startswith("topic0_") and part.topics[0].texts == 60


def test_the_same_arguments_keep_the_same_samples_and_another_seed_may_decide_ties_otherwise():
    samples = [said("one", "at 5;") for _ in range(40)] + many(sizes=(12, 10, 8))
    runs = [filter_samples(samples, config=DiversityConfig(), embed=places, seed=s)[1].kept for s in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2] and len(runs[0]) == len(runs[2])


def test_what_stays_of_a_topic_is_spread_out_or_the_best_rewarded():
    samples = many()
    rewards = np.random.default_rng(1).random(len(samples))
    kept = {}
    for how in ("farthest", "reward"):
        config = DiversityConfig(max_share=0.2, keep=how)
        [part] = filter_samples(samples, config=config, embed=places, seed=0, rewards=rewards)[1].agents
        members = np.flatnonzero(part.labels == 0)
        kept[how] = (part.points[members[part.kept[members]]], rewards[part.places[members]], part.kept[members])

    def least_distance(points):
        return min(np.linalg.norm(a - b) for i, a in enumerate(points) for b in points[:i])

    assert least_distance(kept["farthest"][0]) > 1.5 * least_distance(kept["reward"][0])
    _, given_rewards, stayed = kept["reward"]
    assert given_rewards[stayed].min() > given_rewards[~stayed].max()


def test_copies_of_a_text_are_one_text_of_a_topic_and_leave_it_last():
    """One skill in three wordings, each many times: one topic, of which every wording is kept."""
    samples = [said(f"w{i % 3}", f"at 5 {0.1 * (i % 3)};") for i in range(60)] + many(sizes=(0, 9, 9, 9), noise=0)
    [part] = filter_samples(samples, config=DiversityConfig(max_share=0.3), embed=places, seed=0)[1].agents
    assert (part.topics[0].before, part.topics[0].texts) == (60, 3)
    members = np.flatnonzero((part.labels == 0) & part.kept)
    assert len({part.titles[i] for i in members}) == 3 and len(members) == part.cap < 60


def test_a_single_topic_among_scattered_samples_is_seen_and_one_that_is_all_there_is_stays():
    rng = np.random.default_rng(0)
    rare, dense = scattered(rng, 12), crowd(rng, "topic0", 0, 60)
    config = DiversityConfig(max_share=0.3)
    for others in (rare, rare[:4]):
        [part] = filter_samples([*dense, *others], config=config, embed=places, seed=0)[1].agents
        assert part.topics[0].before == 60 and part.topics[0].after == part.cap <= 12
        assert part.kept[60:].all()
    for alone in (rare, dense):
        [part] = filter_samples(alone, config=config, embed=places, seed=0)[1].agents
        assert part.kept.all() and part.noise > len(alone) / 2
    [part] = filter_samples([said("one", "at 1 2 3;")] * 50, config=config, embed=places, seed=0)[1].agents
    assert [(t.before, t.after) for t in part.topics] == [(50, 50)], "all say the same, and there is nothing else to be rarer"
    [part] = filter_samples([said("one", "at 1 2 3;")] * 50 + rare[:3], config=config, embed=places, seed=0)[1].agents
    assert [(t.before, t.after) for t in part.topics] == [(50, 5)]


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_few_samples_all_stay(count):
    samples = [said(f"s{i}", f"at {i} 0 1;") for i in range(count)]
    kept, report = filter_samples(samples, config=DiversityConfig(), embed=places, seed=0)
    assert kept == samples and report.kept == tuple(range(count))
    assert len(report.agents) == bool(count)
    for part in report.agents:
        assert part.before == part.after and part.before.effective_clusters == 0.0
        assert json.loads(json.dumps(part.as_data()))["noise"] == count


@given(
    sizes=st.lists(st.integers(5, 60), max_size=8),
    noise=st.integers(0, 40),
    share=st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.5, 1.0]),
    multiple=st.sampled_from([0.0, 1.0, 2.5]),
)
def test_the_cap_is_the_largest_that_keeps_to_the_bounds(sizes, noise, share, multiple):
    config = DiversityConfig(max_share=share, max_multiple=multiple, min_cluster_size=5)

    def fits(cap: int) -> bool:
        after = [min(n, cap) for n in sizes]
        of_kept = not share or max(after) <= share * (sum(after) + noise) + 1e-6
        return of_kept and (not multiple or max(after) <= multiple * float(np.median(sizes)))

    cap = cap_of(sizes, noise, config)
    least = min(sizes) if len(sizes) > 1 else 5 if noise else max(sizes, default=0)
    if not cap:
        assert not sizes or max(sizes) <= least or fits(max(sizes))
        return
    assert least <= cap < max(sizes) and not fits(max(sizes))
    assert fits(cap) or cap == least
    assert not any(fits(larger) for larger in range(cap + 1, max(sizes)))


@settings(max_examples=30)
@given(seed=st.integers(0, 999), n=st.integers(1, 12), count=st.integers(1, 12))
def test_greedy_centers_are_within_twice_the_best_radius(seed, n, count):
    points = np.random.default_rng(seed).standard_normal((n, 2)).round(1)
    taken = k_center(points, count)
    assert len(set(taken.tolist())) == len(taken) == min(n, count)

    def radius(centers) -> float:
        return float(np.linalg.norm(points[:, None] - points[list(centers)], axis=-1).min(axis=1).max())

    others = [radius(np.random.default_rng(s).permutation(n)[:count]) for s in range(50)]
    assert radius(taken) <= 2 * min(others) + 1e-9


def test_a_spread_counts_clusters_as_equal_ones_would_have_their_entropy():
    assert Spread.of([5, 5, 5, 5], 0).effective_clusters == pytest.approx(4.0)
    spread = Spread.of([30, 10, 0], 10)
    assert (spread.samples, spread.clustered, spread.clusters, spread.largest_share) == (50, 40, 2, 0.6)
    assert spread.entropy == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert Spread.of([], 3).effective_clusters == 0.0


@pytest.mark.parametrize(
    ("fields", "said_of"),
    [
        ({"agents": ("judge",)}, "judge"), ({"components": 0}, "components"), ({"min_cluster_size": 1}, "min_cluster_size"),
        ({"max_share": 1.5}, "max_share"), ({"max_multiple": 0.5}, "max_multiple"), ({"keep": "first"}, "keep"),
    ],
)  # fmt: skip
def test_a_config_out_of_range_is_refused(fields, said_of):
    with pytest.raises(ValueError, match=said_of):
        DiversityConfig(**fields)


def test_rewards_and_vectors_that_do_not_fit_are_refused():
    samples = many()
    for rewards in (None, [1.0]):
        with pytest.raises(ValueError, match="rewards"):
            filter_samples(samples, config=DiversityConfig(keep="reward"), embed=places, seed=0, rewards=rewards)
    for embed, said_of in ((lambda texts: np.zeros((3, 2)), "shape"), (lambda texts: np.full((len(texts), 2), np.nan), "finite")):
        with pytest.raises(ValueError, match=said_of):
            filter_samples(samples, config=DiversityConfig(), embed=embed, seed=0)


def test_samples_are_compared_by_skills_and_kernels_and_named_after_them():
    one = said("wide_loads", "load four floats at once")
    assert text_of(one, "chat").startswith("what it is\nMotivation: load four") and title_of(one, "chat") == "wide_loads"
    empty = dataclasses.replace(one, turns=(("asked", summary.format([], style="chat"), True),))
    assert title_of(empty, "chat") == "(no skill)" and text_of(empty, "chat")
    broken = dataclasses.replace(one, turns=(("asked", "no call " * 30, True),))
    assert text_of(broken, "chat") == "no call " * 30 and len(title_of(broken, "chat")) == 60
    policy = Sample(agent="policy", kind="policy", task="relu", turns=(("a", "```python\nx = 1\n```", True), ("b", "keep", True)))
    assert text_of(policy, "chat") == "x = 1" and title_of(policy, "chat") == "relu"
