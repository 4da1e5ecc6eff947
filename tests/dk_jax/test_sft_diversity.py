"""What the diversity filter keeps, what embeds texts, and what the data card says of the rest."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import config_flags

from dk_jax.agents import summary
from dk_jax.models import BackboneConfig, build_backbone
from dk_jax.models.backbone import hidden_states
from dk_jax.rollout.trajectory import Verdict
from dk_jax.sft import embeddings
from dk_jax.sft.cpp_kernels import cpp_variants
from dk_jax.sft.data_card import Origin, Stage, card_markdown, make_card, read_further, summary_topics, topics_page
from dk_jax.sft.diversity import NOISE, DiversityConfig, Spread, cap_of, filter_samples, k_center, text_of, title_of
from dk_jax.sft.embeddings import BackboneEmbedder, CachedEmbedder, project, sentence_embedder
from dk_jax.sft.judged import JudgedKernel, save_kernels
from dk_jax.sft.samples import Sample
from dk_jax.sft.skill_topics import skill_catalogue
from dk_jax.skills.record import SkillDraft
from dk_jax.tasks.builtin import builtin_suite

ROOT = Path(__file__).resolve().parents[2]
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


# --- the filter ---------------------------------------------------------------------------------------------------------------


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


# --- embedders ----------------------------------------------------------------------------------------------------------------

CFG = BackboneConfig(family="qwen3", vocab_size=300, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=24, tie_embeddings=True)
CODEC = SimpleNamespace(encode=lambda text: list(text.encode()), eos_id=0)


@pytest.fixture(scope="module")
def backbone():
    return build_backbone(CFG, jax.random.key(0))


def test_a_text_is_the_mean_of_its_own_states_whatever_it_is_batched_with(backbone):
    static, params = backbone
    texts = ["a", "some text", "x" * 9, "a longer text that fills the row", "", "y" * 100]
    embed = BackboneEmbedder(static, params, CODEC, tokens=64, length_step=16, max_tokens=32)
    compiled = embeddings.mean_pooled._cache_size()
    vectors = embed(texts)
    assert embeddings.mean_pooled._cache_size() - compiled == 2, "one program for rows of 16, one for rows of 32"
    states = jax.jit(hidden_states, static_argnums=0)
    for text, vector in zip(texts, vectors, strict=True):  # each row alone, and no position of the padding in the mean
        tokens = CODEC.encode(text)[:32] or [0]
        own = states(static, params, jnp.array([tokens + [7] * (32 - len(tokens))]), jnp.array([len(tokens)]))[0, : len(tokens)]
        np.testing.assert_allclose(vector, np.asarray(own).mean(axis=0), atol=1e-5)
    assert vectors.dtype == np.float32 and embed([]).shape == (0, 16)


def test_a_text_is_embedded_once_and_interrupted_work_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(embeddings, "_SAVE_EVERY", 2)
    asked: list[str] = []

    def embed(texts):
        if len(asked) == 4:
            raise KeyboardInterrupt
        asked.extend(texts)
        return np.array([[len(text), 1.0] for text in texts], np.float32)

    texts = ["a" * n for n in range(1, 7)]
    path = tmp_path / "sub" / "vectors.npz"
    with pytest.raises(KeyboardInterrupt):
        CachedEmbedder(embed, path, "model")([*texts, "a"])
    asked.append("")  # no longer four
    found = CachedEmbedder(embed, path, "model")([*texts, "a"])
    np.testing.assert_array_equal(found[:, 0], [1, 2, 3, 4, 5, 6, 1])
    assert sorted(asked) == sorted(["", *texts]), "nothing was asked for twice"
    CachedEmbedder(embed, path, "another model")(["a"])
    assert asked.count("a") == 2
    path.write_bytes(b"no such file")
    with pytest.raises(ValueError, match=f"{path}.*Delete it"):
        CachedEmbedder(embed, path, "model")


def test_sentence_transformers_are_used_where_they_are_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ValueError, match="pip install sentence-transformers"):
        sentence_embedder("small")
    module = ModuleType("sentence_transformers")

    class SentenceTransformer:
        def __init__(self, name):
            if name != "small":
                raise OSError("no such model")

        def encode(self, texts, *, convert_to_numpy):
            return np.array([[len(text)] for text in texts])

    module.SentenceTransformer = SentenceTransformer
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    np.testing.assert_array_equal(sentence_embedder("small")(["a", "bbb"]), [[1.0], [3.0]])
    with pytest.raises(ValueError, match="'large'.*no such model"):
        sentence_embedder("large")


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_a_projection_keeps_groups_apart(method):
    rng = np.random.default_rng(0)
    points = np.concatenate([rng.standard_normal((10, 6)) * 0.1, 5 + rng.standard_normal((10, 6)) * 0.1])
    flat = project(points, method=method, seed=0)
    assert flat.shape == (20, 2)
    within = max(np.linalg.norm(flat[:10] - flat[:10].mean(0), axis=1).max(), np.linalg.norm(flat[10:] - flat[10:].mean(0), axis=1).max())
    assert np.linalg.norm(flat[:10].mean(0) - flat[10:].mean(0)) > within
    again = project(points[[*range(20), 3, 3]], method=method, seed=0)
    assert (again[20:] == again[3]).all(), "equal points stay in one place"
    for few, places_of in ((points[:2], 2), (np.ones((9, 1)), 1), (points[:0], 0)):
        flat = project(few, method=method)
        assert flat.shape == (len(few), 2) and len(np.unique(flat, axis=0)) == places_of
    with pytest.raises(ValueError, match="umap"):
        project(points, method="umap")


# --- the card -----------------------------------------------------------------------------------------------------------------

VERDICT = Verdict(outcome="ok", stage="timed", reward=1.0, speedup=2.0, noisy=False, coverage=None, feedback="")
KERNEL = JudgedKernel(task="relu", source="x = 1", techniques=("simd",), intent="good", verdict=VERDICT)


def test_the_card_counts_what_is_left_and_its_page_needs_nothing_from_elsewhere():
    samples = many()
    _, report = filter_samples(samples, config=DiversityConfig(), embed=places, seed=0)
    pairs = [(s, Origin(language="cpp")) for s in samples[:4]] + [(KERNELS_SAMPLE, Origin(source="teacher m", licence="MIT", language="cuda"))]
    card = make_card(
        [(KERNEL, Origin(language="cpp")), (dataclasses.replace(KERNEL, task="b|c"), Origin(source="pkg 1.0", licence="MIT", language="triton"))],
        pairs,
        kernel_topics=[["vector lanes"], []],
        summary_topics=[["a"], ["a", "b"], [], ["b"]],
        tokens=[(10, 1), (20, 2), (30, 3), (40, 4), (1000, 100)],
        stages=[Stage(name="duplicates", of="samples", before=9, after=5)],
        similarity_to_held_out={"0.00 to 1.00": 3, "1.00": 1},
        contaminated=[],
        diversity=report.agents,
        made_with={"seed": "0"},
    )
    assert card["stages"][0]["removed"] == 4
    assert card["kernels"]["licence"] == {"Apache-2.0": 1, "MIT": 1} and card["kernels"]["topic"] == {"(none)": 1, "vector lanes": 1}
    assert card["samples"]["count"] == 5 and sum(card["samples"]["agent"].values()) == 5
    assert card["samples"]["summary topic"] == {"a": 2, "b": 2, "(none)": 1}
    summaries = card["tokens"]["summary"]
    assert summaries["samples"] + card["tokens"]["policy"]["samples"] == 5 and card["tokens"]["policy"]["most"] == 1000
    assert json.loads(json.dumps(card)) == card
    text = card_markdown(card, "demo")
    assert "| b\\|c" not in text and "| duplicates | samples | 9 | 4 | 5 |" in text and "| MIT | 1 | 50.0% |" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.count("|") - line.count("\\|") >= 3 for line in rows)
    [part] = report.agents
    flat = [project(part.points)]
    page = topics_page(card, report.agents, flat, name="<demo>", projection="pca")
    assert "&lt;demo&gt;" in page and "<script" not in page and not re.search(r'(?:src|href)\s*=|url\(|https?://', page)
    assert page.count('<g class="cluster" tabindex="0"') == 2 * (len(part.topics) + 1)
    assert f"cluster 1, {part.topics[0].title}: {part.topics[0].before} samples" in page
    assert f"cluster 1, {part.topics[0].title}: {part.topics[0].after} samples" in page
    assert page.count("stroke-dasharray") == sum(~part.kept), "what was removed is a ring"
    assert "No agent" in topics_page(card, [], [], name="demo", projection="pca")


KERNELS_SAMPLE = Sample(agent="policy", kind="policy", task="relu", turns=(("ask", "```cpp\nx\n```", True),))


def test_summary_topics_are_those_of_the_catalogue():
    catalogue = skill_catalogue()
    draft = catalogue[2].phrasings[-1]
    answers = [summary.format(drafts, style="chat") for drafts in ([draft], [skill("own_idea", "new")], [])]
    samples = [Sample(agent="summary", kind="summary", task="t", turns=(("ask", answer, True),)) for answer in answers]
    assert summary_topics([*samples, KERNELS_SAMPLE], catalogue, style="chat") == [[catalogue[2].topic], ["(other)"], []]


def test_further_files_are_read_with_their_origins_and_bad_lines_named(tmp_path, caplog):
    path = tmp_path / "further.jsonl"
    reference = builtin_suite("cpu").train[0].reference
    where = {"package": "some-kernels", "version": "1.2", "licence": "MIT"}
    lines = [
        dataclasses.asdict(KERNELS_SAMPLE) | {"provenance": {"source": "teacher", "host": "example.org", "model": "big"}},
        dataclasses.asdict(KERNEL) | {"reference": reference, "provenance": where, "described": {"level": 2}},
        dataclasses.asdict(KERNEL),
    ]
    text = "\n".join(map(json.dumps, lines))
    path.write_text(text + '\n{"task": "cut sho')
    found = read_further(path, language="cpp")
    assert "further.jsonl:4" in caplog.text and "cut short" in caplog.text
    assert found.samples == ((KERNELS_SAMPLE, Origin(source="teacher big", licence="terms of example.org", language="cpp")),)
    assert [origin.source for _, origin in found.kernels] == ["some-kernels 1.2", "not stated"]
    assert found.kernels[0] == (KERNEL, Origin(source="some-kernels 1.2", licence="MIT", language="cpp"))
    assert found.tasks["relu"].reference == reference and found.tasks["relu"].level == 2
    bad = {
        '{"task": 1}': "source", '{"agent": "x", "kind": "", "task": "", "turns": []}': "'x'", "[]": "not an object", "{": "Expecting",
        json.dumps(lines[0] | {"turns": [["a", "b"]]}): "turns", json.dumps(lines[1] | {"reference": "x = 1"}): "no class Model",
        json.dumps(lines[2] | {"verdict": {"outcome": "ok"}}): "verdict|missing", json.dumps(lines[0] | {"provenance": "me"}): "provenance",
    }  # fmt: skip
    for line, said_of in bad.items():
        path.write_text(text + "\n" + line + "\n")
        with pytest.raises(ValueError, match=rf"further\.jsonl:4: .*(?:{said_of})"):
            read_further(path, language="cpp")


def loaded_script(monkeypatch, arguments):
    """scripts/sft_data.py and its config, with flags of its own, as a process would have them."""
    own = flags.FlagValues()
    for name in ("DEFINE_string", "DEFINE_list", "DEFINE_enum", "DEFINE_float", "DEFINE_bool", "DEFINE_integer"):
        monkeypatch.setattr(flags, name, functools.partial(getattr(flags, name), flag_values=own))
    monkeypatch.setattr(config_flags, "DEFINE_config_file", functools.partial(config_flags.DEFINE_config_file, flag_values=own))
    monkeypatch.setattr(flags, "FLAGS", own)
    spec = importlib.util.spec_from_file_location("sft_data_script", ROOT / "scripts/sft_data.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(sys, "argv", ["sft_data.py", *arguments])  # where the config's overrides are looked for
    own(sys.argv)
    return script, own["config"].value


def test_the_script_looks_through_a_runs_corpus(tmp_path, monkeypatch, capsys, caplog):
    """The whole of it with a small random model; a copy of a kernel and a contaminated file are found and said."""
    kernels = []
    for task in builtin_suite("cpu").train[:6]:
        for i, variant in enumerate([v for v in cpp_variants(task) if v.intent in ("good", "slow")][:3]):
            verdict = dataclasses.replace(VERDICT, speedup=1.0 + i)
            kernels.append(
                JudgedKernel(task=task.name, source=variant.source, techniques=tuple(sorted(variant.techniques)), intent="good", verdict=verdict)
            )
    copy = dataclasses.replace(kernels[0], source=f"// again\n{kernels[0].source}")
    save_kernels(tmp_path / "corpus.jsonl", [*kernels, copy])
    held_out = builtin_suite("cpu").held_out[0]
    more = dataclasses.asdict(dataclasses.replace(KERNEL, task="leak")) | {"reference": held_out.reference, "provenance": {"licence": "MIT"}}
    (tmp_path / "more.jsonl").write_text(json.dumps(more) + "\n")
    small = {"d_model": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "d_ff": 16, "shifted_kv_heads": 0}
    arguments = [
        f"--config={ROOT / 'configs/demo.py'}", f"--workdir={tmp_path}", f"--further={tmp_path / 'more.jsonl'}",
        "--config.tasks.generated=0", "--config.tasks.rl_fresh=0", "--config.tasks.rl_checked=0", "--config.corpus.timed_tasks=0",
        "--config.codec.vocab_size=400", *(f"--config.model.{key}={value}" for key, value in small.items()),
    ]  # fmt: skip
    script, cfg = loaded_script(monkeypatch, arguments)
    assert script._run(cfg, tmp_path) == 0
    assert "weights are random" in caplog.text
    out = tmp_path / "sft_data"
    card = json.loads((out / "data_card.json").read_text())
    removed = {(stage["name"], stage["of"]): stage["removed"] for stage in card["stages"]}
    assert removed["contaminated", "tasks"] == removed["contaminated", "kernels"] == removed["duplicates", "kernels"] == 1
    assert card["kernels"]["count"] == len(kernels)
    [twin] = [row for row in map(json.loads, (out / "duplicates.jsonl").read_text().splitlines()) if row["of"] == "kernel"]
    assert twin["exact"] and twin["text"] == copy.source and twin["twin"] == kernels[0].source
    rows = [json.loads(line) for line in (out / "contamination.jsonl").read_text().splitlines()]
    assert {(row["of"], row["task"], row["held_out"]) for row in rows} == {(of, "leak", held_out.name) for of in ("task", "kernel")}
    told = capsys.readouterr().out
    assert (out / "data_card.md").read_text() in told and "leak" in told
    assert (out / "topics.html").read_text().startswith("<!doctype html>") and (out / "embeddings.npz").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "more.jsonl", "sft_data"]
    (tmp_path / "config.json").write_text(json.dumps(cfg.to_dict() | {"seed": 7}))
    with pytest.raises(ValueError, match="differs from --config in seed"):
        script._run(cfg, tmp_path)
    with pytest.raises(FileNotFoundError, match="--mode=corpus"):
        script._run(cfg, tmp_path / "elsewhere")


def test_noise_has_a_label_of_its_own():
    [part] = filter_samples(many(), config=DiversityConfig(), embed=places, seed=0)[1].agents
    assert NOISE not in {t.label for t in part.topics} and part.noise == int((part.labels == NOISE).sum()) > 0
