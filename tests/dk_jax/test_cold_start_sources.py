"""The cold start's further sources: open packages' kernels and a teacher's samples, by config; what is refused before any work; and which
samples are left out."""

from __future__ import annotations

import json
import zlib
from collections import Counter

import numpy as np
import pytest

from configs.smollm2_triton import get_config
from dk_jax.agents import summary
from dk_jax.rollout.trajectory import Verdict
from dk_jax.sft.judged import JudgedKernel
from dk_jax.sft.open_source.kernels import OpenKernel, Provenance, save_open_kernels
from dk_jax.sft.samples import Sample
from dk_jax.sft.teacher_samples import TaughtSample, save_samples
from dk_jax.skills.record import SkillDraft
from dk_jax.tasks.task import Task
from dk_jax.train.checks import check_config
from dk_jax.train.clean_samples import cleaned
from dk_jax.train.cold_start import ColdStartData
from dk_jax.train.setup import ConfigError
from tests.end_to_end.scripted import ScriptedClient, ScriptedRun, tiny_config

REFERENCE = "class Model:\n    def forward(self, x):\n        return 2 * x"
KERNEL = "import triton\nclass ModelNew: ...  # doubles"
TAUGHT = Sample(agent="selection", kind="selection", task="taught", turns=(("which?", "that", True),))


@pytest.fixture
def cfg(tmp_path):
    verdict = Verdict(outcome="ok", stage="correct", reward=0.5, speedup=0.0, noisy=False, coverage=None, feedback="correct")
    task = Task(name="open_double", level=1, family="open_double", split="train", reference=REFERENCE, size="small")
    kernel = JudgedKernel(task=task.name, source=KERNEL, techniques=(), intent="good", verdict=verdict)
    where = Provenance(
        package="p", version="1", licence="MIT", copyright=("me",), notices=(), launcher="p:double", files=("p.py",), functions=("double",),
        own=(), configs=(),
    )  # fmt: skip
    save_open_kernels(tmp_path / "open.jsonl", [OpenKernel(task=task, kernel=kernel, provenance=where)])
    save_samples(tmp_path / "taught.jsonl", [TaughtSample(sample=TAUGHT, provenance=None)])
    c = get_config()
    c.corpus.update(dict(open_kernels=str(tmp_path / "open.jsonl"), teacher=str(tmp_path / "taught.jsonl")))
    return c


def test_both_are_among_the_samples_and_stay_what_they_were_when_the_run_began(cfg, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    data = ColdStartData(cfg, None, run / "corpus.jsonl")
    found = data.samples({}, [])
    assert found[-1] == TAUGHT and {s.agent for s in found[:-1]} == {"policy"} and {s.task for s in found[:-1]} == {"open_double"}
    [(prompt, answer, imitated)] = found[0].turns
    assert REFERENCE in prompt and KERNEL in answer and imitated
    for name in ("open.jsonl", "taught.jsonl"):
        (tmp_path / name).write_text("")
    assert data.samples({}, []) == found
    cfg.corpus.update(dict(open_kernels="", teacher=""))
    assert data.samples({}, []) == []


def test_files_that_are_not_there_or_of_another_kind_are_refused_at_once(cfg):
    check_config(cfg)
    for changes, said in (
        (lambda c: c.corpus.update(dict(teacher="/nowhere.jsonl")), r"corpus\.teacher is '/nowhere\.jsonl': there is no such file"),
        (lambda c: c.corpus.update(dict(open_kernels="/nowhere.jsonl")), r"scripts/open_kernels\.py writes one"),
        (lambda c: c.sandbox.update(dict(language="cpp")), "holds Triton modules, but sandbox.language='cpp'"),
    ):
        other = cfg.copy_and_resolve_references()
        changes(other)
        with pytest.raises(ConfigError, match=said):
            check_config(other)


# --- which are left out -----------------------------------------------------------------------------------------------------


def tasks(*bodies: str) -> list[Task]:
    form = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return {}\ndef get_inputs(): return [torch.rand(4)]\n"
    return [
        Task(name=f"t{i}", level=1, family=f"f{i}", split="train", reference=form.format(body) + "def get_init_inputs(): return []\n")
        for i, body in enumerate(bodies)
    ]


def summaries(count: int, text: str, task: str) -> list[Sample]:
    """Of one topic, worded a little differently."""
    made = []
    for i in range(count):
        draft = SkillDraft(
            name=f"{text}_{i}", description=f"About {text}", scope="general", tags=("a", "b", "c"),
            content=f"Motivation: {text} {i}\nKey Idea: {text}\nExample: {text}{i}()",
        )  # fmt: skip
        made.append(Sample(agent="summary", kind="summary", task=task, turns=((f"say {text} {i}", summary.format([draft], style="chat"), True),)))
    return made


def by_words(texts):
    """Embeddings that tell topics apart, and wordings a little."""
    own = [np.random.default_rng(zlib.crc32(text.encode())).normal(size=3) for text in texts]
    return np.array([[*(10.0 * (topic in text) for topic in ("fusion", "tiling", "lanes")), *noise] for text, noise in zip(texts, own, strict=True)])


def test_contaminated_doubled_and_dominant_samples_are_left_out_and_that_is_remembered(tmp_path):
    trained, held_out = tasks("torch.relu(x) * 2 + 1", "torch.softmax(x, -1)"), tasks("torch.relu(x) * 3 + 4")
    samples = [
        Sample(agent="policy", kind="policy", task="t0", turns=(("relu?", "```python\ny = 1\n```", True),)),
        *[Sample(agent="policy", kind="policy", task="t1", turns=(("softmax?", f"```python\n{name} = f(1)\n```", True),)) for name in "ab"],
        *summaries(30, "fusion", "t1"), *summaries(10, "tiling", "t1"), *summaries(10, "lanes", "t1"),
    ]  # fmt: skip
    c = get_config()
    c.corpus.update(dict(contaminated=0.9, near_duplicates=1.0))
    asked = []

    def embed():
        asked.append(1)
        return by_words

    path = tmp_path / "sft_kept.json"
    found = cleaned(samples, trained, held_out, cfg=c, embed=embed, path=path)
    assert found.counts == {"samples": 53, "contaminated": 1, "duplicates": 1, "of_a_dominant_topic": 20}
    assert [s.agent for s in found.samples].count("policy") == 1 and found.samples[0] == samples[1]
    left = Counter(next(t for t in ("fusion", "tiling", "lanes") if t in s.turns[0][0]) for s in found.samples[1:])
    assert left == {"fusion": 10, "tiling": 10, "lanes": 10}
    assert cleaned(samples, trained, held_out, cfg=c, embed=embed, path=path) == found and asked == [1], "what stayed is read back"
    with pytest.raises(ValueError, match="is of other samples than this recipe"):
        cleaned(samples[1:], trained, held_out, cfg=c, embed=embed, path=path)
    path.write_text("{")
    with pytest.raises(ValueError, match="sft_kept.json can't be read"):
        cleaned(samples, trained, held_out, cfg=c, embed=embed, path=path)


def test_a_run_embeds_its_samples_with_its_own_model_and_trains_on_those_that_stay(tmp_path):
    cfg = tiny_config()
    cfg.corpus.near_duplicates = 1.0
    cfg.corpus.diversity.update(dict(on=True, min_cluster_size=2))
    run = ScriptedRun(cfg, tmp_path, ScriptedClient())
    try:
        found, every = run.trained_samples(), run.samples()
        rest = iter(every)
        assert 0 < len(found) < len(every) and all(any(s == other for other in rest) for s in found), "in their order"
        counts = json.loads((tmp_path / "sft_kept.json").read_text())["counts"]
        assert counts["samples"] == len(every) and len(every) - counts["duplicates"] - counts["of_a_dominant_topic"] == len(found)
    finally:
        run.close()


def test_numbers_out_of_their_range_are_refused(cfg):
    for changes, said in (
        (dict(contaminated=1.5), r"corpus\.contaminated is 1\.5"),
        (dict(near_duplicates=-0.1), r"corpus\.near_duplicates is -0\.1"),
        (dict(diversity=dict(max_share=2.0)), r"corpus\.diversity: DiversityConfig\.max_share is 2\.0"),
    ):
        other = cfg.copy_and_resolve_references()
        other.corpus.update(changes)
        with pytest.raises(ConfigError, match=said):
            check_config(other)
