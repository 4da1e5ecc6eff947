"""The data card, files of further samples, and scripts/sft_data.py."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from absl import flags
from ml_collections import config_flags

from dk_jax.agents import summary
from dk_jax.rollout.trajectory import Verdict
from dk_jax.sft.cpp_kernels import cpp_variants
from dk_jax.sft.data_card import Origin, Stage, card_markdown, make_card, read_further, summary_topics, topics_page
from dk_jax.sft.diversity import NOISE, DiversityConfig, filter_samples
from dk_jax.sft.embeddings import project
from dk_jax.sft.judged import JudgedKernel, save_kernels
from dk_jax.sft.samples import Sample
from dk_jax.sft.skill_topics import skill_catalogue
from dk_jax.tasks.builtin import builtin_suite
from tests.dk_jax.test_sft_diversity import many, places, skill

ROOT = Path(__file__).resolve().parents[2]

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
